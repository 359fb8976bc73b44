# SPDX-License-Identifier: Apache-2.0
"""What a request or an engine may ask for, with LiLiCorr drafting: the served tokens stay the target's."""

import json
from pathlib import Path

import pytest
import torch
from engines import Engine, greedy, tokens
from pairs import drafter_config, target_config, write_checkpoint, write_drafter, write_target
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from vllm_lilicorr.method.head import LiLiCorrHead

pytestmark = pytest.mark.slow

BATCH = 16  # prompts of a request's smoke test
RANDOM_PROMPTS = [[2 + (7 * i + j * j) % 400 for j in range(5 + 9 * i)] for i in range(8)]
SMALL = {"skip_tokenizer_init": True, "max_model_len": 256, "num_gpu_blocks_override": 128}


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"bad_words": ["self", " def", "return"]},
        {"min_tokens": 30, "stop_token_ids": list(range(200, 400))},
        {"stop": ["\n\n", "self"], "include_stop_str_in_output": True},
        {"allowed_token_ids": list(range(4, 600))},
    ],
    ids=["penalties", "bad_words", "min_tokens", "stop", "allowed_token_ids"],
)
def test_parameters_that_change_the_target(lilicorr_engine, reference_engine, prompts, options):
    """Catches a constraint applied to the first token of a step and not to its accepted drafts."""
    params = greedy(32, **options)
    expected = tokens(reference_engine.generate(prompts[:BATCH], params))
    assert expected != tokens(reference_engine.generate(prompts[:BATCH], greedy(32))), "the option changes nothing"
    accepted = lilicorr_engine.counters.accepted
    assert tokens(lilicorr_engine.generate(prompts[:BATCH], params)) == expected
    assert lilicorr_engine.counters.accepted > accepted


def test_prompt_logprobs(lilicorr_engine, reference_engine, prompts):
    """Catches prompt logprobs that drafting shifts, and a request with them that stops drafting."""
    params = greedy(24, prompt_logprobs=1, logprobs=1)
    expected = reference_engine.generate(prompts[:8], params)
    accepted = lilicorr_engine.counters.accepted
    found = lilicorr_engine.generate(prompts[:8], params)
    assert lilicorr_engine.counters.accepted > accepted
    assert tokens(found) == tokens(expected)
    for prompt, mine, theirs in zip(prompts, found, expected, strict=False):
        assert len(mine.prompt_logprobs) == len(prompt)
        for token, a, b in zip(prompt[1:], mine.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


def test_two_completions_of_one_request(lilicorr_engine, prompts):
    """Catches completions that share a batch row's state: same seed, same pair; unlike each other."""
    params = SamplingParams(temperature=1.0, n=2, seed=11, max_tokens=32)
    runs = [lilicorr_engine.generate(prompts[:8], params) for _ in range(2)]
    texts = [[[list(c.token_ids) for c in output.outputs] for output in outputs] for outputs in runs]
    assert texts[0] == texts[1]
    assert all(len(pair) == 2 for pair in texts[0]) and sum(a != b for a, b in texts[0]) > 4


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    return write_target(folder / "target", target_config()), write_drafter(folder / "drafter", drafter_config())


@pytest.fixture(scope="module")
def random_reference(random_pair):
    with Engine(random_pair[0], **SMALL) as engine:
        return tokens(engine.generate(RANDOM_PROMPTS, greedy(24, ignore_eos=True)))


@pytest.mark.parametrize(
    "speculative",
    [
        {"method": "dflash", "num_speculative_tokens": 1},
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 6, "draft_sample_method": "greedy"},
        {"num_speculative_tokens": 5, "lilicorr": {"candidate_topk": 3}},
        {"num_speculative_tokens": 2, "lilicorr": {"candidate_topk": 1, "walk": "expected-length"}},
    ],
    ids=["dflash-1", "3", "greedy-6", "5 of 3", "2 of 1"],
)
def test_shorter_blocks_of_fewer_candidates(random_pair, random_reference, speculative, tmp_path):
    """Catches a head that expects the trained number of slots or candidates."""
    trace = tmp_path / "trace.jsonl"
    with Engine(*random_pair, speculative=speculative, trace=trace, **SMALL) as engine:
        assert tokens(engine.generate(RANDOM_PROMPTS, greedy(24, ignore_eos=True))) == random_reference
        assert engine.counters.drafts > 0
        drafts = [draft for drafts in engine.take_trace().values() for draft in drafts.values()]
    assert {len(draft.path) for draft in drafts} == {speculative["num_speculative_tokens"]}
    top_k = speculative.get("lilicorr", {}).get("candidate_topk", 8)
    assert {len(slot) for draft in drafts for slot in draft.candidate_ids} == {top_k}


def test_block_length_that_follows_the_batch(random_pair, random_reference, tmp_path):
    """Catches state sized by an earlier block length: long blocks, none, and short ones in one run."""
    schedule = [(1, 2, 7), (3, 5, 3), (6, 8, 0)]
    speculative = {"num_speculative_tokens_per_batch_size": schedule}
    lengths = [24 - 2 * index for index in range(len(RANDOM_PROMPTS))]
    with Engine(*random_pair, speculative=speculative, trace=tmp_path / "trace.jsonl", **SMALL) as engine:
        params = [greedy(length, ignore_eos=True) for length in lengths]
        served = tokens(engine.generate(RANDOM_PROMPTS, params))
        drafts = engine.take_trace().values()
    assert served == [ids[:length] for ids, length in zip(random_reference, lengths, strict=True)]
    assert {len(draft.path) for per_request in drafts for draft in per_request.values()} == {3, 7}


def test_drafter_with_a_shorter_context(pair, prompts, reference):
    """Catches an error, or a wrong token, once a request outgrows the drafter's max_model_len."""
    # vLLM skips the drafter for a whole batch in which one request does not fit: start short, then outgrow it.
    chosen = [index for index, prompt in enumerate(prompts) if len(prompt) < 100][-24:]
    with Engine(pair.target, pair.drafter, speculative={"max_model_len": 128}) as engine:
        served = tokens(engine.generate([prompts[i] for i in chosen], greedy(40)))
        assert served == [reference[i] for i in chosen]
        assert engine.counters.accepted > 0


def write_lora(folder: Path, num_layers: int, config: dict, seed: int) -> Path:
    """A random LoRA adapter on the attention and MLP projections of a Qwen3 target."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    query, key = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    projections = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for index in range(num_layers):
        for name, (inputs, outputs) in projections.items():
            prefix = f"base_model.model.model.layers.{index}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * inputs**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.1
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "base_model_name_or_path": ""}
    adapter["target_modules"] = sorted({name.rpartition(".")[2] for name in projections})
    write_checkpoint(folder, adapter, tensors)
    (folder / "config.json").rename(folder / "adapter_config.json")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    return folder


def test_target_with_lora(pair, prompts, reference, tmp_path):
    """Catches drafting through the adapter's embedding wrapper, which adds another batch's rows.

    No batch mixes requests with and without an adapter: vLLM's CPU build adds the
    adapter to both, even without speculation.
    """
    config = json.loads((pair.target / "config.json").read_text())
    adapter = LoRARequest("random", 1, str(write_lora(tmp_path / "lora", config["num_hidden_layers"], config, seed=3)))
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    with Engine(pair.target, **options) as engine:
        expected = tokens(engine.generate(prompts[:BATCH], greedy(32), lora_request=adapter))
    plain = [ids[:32] for ids in reference[:BATCH]]
    assert [a == b for a, b in zip(expected, plain, strict=True)].count(False) > BATCH // 2, "the adapter does nothing"
    with Engine(pair.target, pair.drafter, **options) as engine:
        assert tokens(engine.generate(prompts[:BATCH], greedy(32), lora_request=adapter)) == expected
        accepted = engine.counters.accepted
        assert accepted > 0
        assert tokens(engine.generate(prompts[:BATCH], greedy(32))) == plain
        assert engine.counters.accepted > accepted


def test_compiled_and_warm(random_pair, monkeypatch):
    """Catches a head that first runs, or compiles, at the first request after the engine is ready."""
    calls = []
    forward = LiLiCorrHead.forward
    monkeypatch.setattr(
        LiLiCorrHead, "forward", lambda self, *args: calls.append(args[1].shape) or forward(self, *args)
    )
    with Engine(random_pair[0], enforce_eager=False, **SMALL) as engine:
        expected = tokens(engine.generate(RANDOM_PROMPTS, greedy(24, ignore_eos=True)))
    with Engine(*random_pair, enforce_eager=False, **SMALL) as engine:
        assert calls, "the head did not run before the engine was ready"
        warm = len(calls)
        assert tokens(engine.generate(RANDOM_PROMPTS, greedy(24, ignore_eos=True))) == expected
        assert len(calls) > warm and engine.counters.drafts > 0


def test_engine_core_in_its_own_process(pair, prompts, reference, monkeypatch, tmp_path):
    """Catches a plugin that registers in the front end alone."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with Engine(pair.target, pair.drafter, trace=tmp_path / "trace.jsonl") as engine:
        assert tokens(engine.generate(prompts[:BATCH], greedy(40))) == reference[:BATCH]
        assert engine.counters.accepted > 0
        drafts = [draft for per_request in engine.take_trace().values() for draft in per_request.values()]
    assert any(any(draft.path) for draft in drafts)
