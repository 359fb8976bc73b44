# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server with LiLiCorr drafting, over HTTP: what clients see is what no speculation gives."""

import json
import urllib.request
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from vllm_lilicorr.serving.preflight import choose_port
from vllm_lilicorr.serving.server import ServerProcess

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["module", "class"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}


def start(pair, folder) -> ServerProcess:
    arguments = [str(pair.target), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    arguments += ["--max-model-len", "512", "--max-num-seqs", "8"]
    structured = {"backend": "xgrammar", "disable_any_whitespace": True}
    arguments += ["--structured-outputs-config", json.dumps(structured)]
    arguments += ["--speculative-config", json.dumps({"method": "lilicorr", "model": str(pair.drafter)})]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return ServerProcess(arguments, choose_port(None), folder / "server.log", environment)


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory) -> Iterator[ServerProcess]:
    with start(pair, tmp_path_factory.mktemp("server")) as server:
        server.wait_until_ready(300)
        yield server


def post(server: ServerProcess, **body):
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({"model": "tiny", "temperature": 0} | body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=120)


def complete(server: ServerProcess, **body) -> dict:
    with post(server, **body) as response:
        return json.load(response)


def counter(server: ServerProcess, name: str) -> float:
    lines = [line for line in server.metrics().splitlines() if line.startswith(f"vllm:spec_decode_{name}_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_streaming(server, prompts, reference):
    """Catches tokens lost or repeated where one step gives several."""
    accepted = counter(server, "num_accepted_tokens")
    ids = []
    body = {"prompt": prompts[3], "max_tokens": 32, "stream": True, "return_token_ids": True}
    with post(server, **body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
    assert ids == reference[3][:32]
    assert counter(server, "num_accepted_tokens") > accepted


def test_completions_and_logprobs(server, pair, prompts, reference):
    """Catches logprobs that do not belong to the tokens beside them."""
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    answer = complete(server, prompt=prompts[5], max_tokens=32, logprobs=2)["choices"][0]
    assert answer["text"] == tokenizer.decode(reference[5][:32])
    assert len(answer["logprobs"]["token_logprobs"]) == len(reference[5][:32])
    for chosen, best in zip(answer["logprobs"]["token_logprobs"], answer["logprobs"]["top_logprobs"], strict=True):
        assert chosen == pytest.approx(max(best.values()), abs=1e-5)


def test_json_schema(server):
    """Catches a grammar that drafting breaks."""
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    body = {"prompt": "def count_modules():", "max_tokens": 48, "response_format": schema}
    answer = complete(server, **body)["choices"][0]["text"]
    assert set(json.loads(answer)) == {"count", "kind"}


def test_two_sampled_completions(server):
    """Catches sampled requests that fail over HTTP alone: seeds, top-k and top-p."""
    body = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "n": 2, "seed": 5}
    body |= {"prompt": "class Engine:", "max_tokens": 24}
    texts = [[choice["text"] for choice in complete(server, **body)["choices"]] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 2


def test_restart(server, pair, prompts, reference, tmp_path):
    """Catches a server that leaves something behind which its successor stumbles over."""
    server.stop()
    with start(pair, tmp_path) as successor:
        successor.wait_until_ready(300)
        answer = complete(successor, prompt=prompts[3], max_tokens=32, return_token_ids=True)["choices"][0]
        assert answer["token_ids"] == reference[3][:32]
        assert counter(successor, "num_drafts") > 0
