# SPDX-License-Identifier: Apache-2.0
"""The guard on the trained pair: what is broken on purpose is named first within 200 drafts, hard text left alone."""

import json
import logging
import random
from pathlib import Path

import pytest
import torch
from engines import Engine, greedy, tokens
from pairs import drafter_config, target_config, write_checkpoint, write_drafter, write_target
from safetensors.torch import load_file
from vllm import SamplingParams

from vllm_lilicorr.engine.guard import Guard
from vllm_lilicorr.engine.proposer import LiLiCorrProposer
from vllm_lilicorr.measure.prompt_files import load_prompts

pytestmark = pytest.mark.slow

WITHIN = 200
MAX_TOKENS = 24


def shuffle_features(tensors: dict[str, torch.Tensor]) -> None:
    """The fc of a drafter for another target."""
    rows = torch.randperm(tensors["fc.weight"].shape[0], generator=torch.Generator().manual_seed(0))
    tensors["fc.weight"] = tensors["fc.weight"][rows]


def swap_scales(tensors: dict[str, torch.Tensor]) -> None:
    """As if the up projections were read with the scale of another tensor."""
    for name in list(tensors):
        if name.endswith("mlp.up_proj.weight") and "lilicorr" not in name:
            tensors[name] = tensors[name] * 4


def zero_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = torch.zeros_like(tensors["norm.weight"])


# Name: top-level config, dflash_config, tensors, the cause to come first.
BROKEN = {
    "rope layout": ({"is_neox_style": False}, {}, None, "rope"),
    "mask token": ({}, {"mask_token_id": 5}, None, "mask"),
    "target layers": ({}, {"target_layer_ids": [0, 1, 2]}, None, "layers"),
    "swapped scales": ({}, {}, swap_scales, "scales"),
    "logit scale": ({}, {"lilicorr_logit_scale": 1.0}, None, "logit_scale"),
    "vector eps": ({}, {"lilicorr_vector_eps": 100.0}, None, "logit_scale"),
    "another target": ({}, {}, shuffle_features, "pair"),
    "zero weights": ({}, {}, zero_norm, "dead"),
}
FIRST_WORDS = {
    "anchors": "stale anchors",
    "dead": "weights that are missing or zero",
    "rope": "wrong RoPE layout",
    "mask": "wrong mask token",
    "layers": "shifted target layers",
    "scales": "wrongly scaled weights",
    "logit_scale": "wrong lilicorr_logit_scale or lilicorr_vector_eps",
    "pair": "another target",
}


class Messages(logging.Handler):
    """Keeps what the plugin logs; vLLM's first engine takes handlers away, so `listen` is called after it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def listen(self) -> None:
        logging.getLogger("vllm.lilicorr").addHandler(self)


@pytest.fixture
def logged():
    messages = Messages()
    yield messages
    logging.getLogger("vllm.lilicorr").removeHandler(messages)


def watch(engine: Engine) -> Guard:
    """A guard that has seen nothing yet."""
    proposer = engine.proposer
    if proposer._guard is not None:
        proposer._guard._end_window()
    proposer._guard = Guard(proposer, proposer.vllm_config, engine.runner, engine.runner.get_model())
    return proposer._guard


def broken_drafter(drafter: Path, folder: Path, name: str) -> Path:
    changed, nested, edit, _ = BROKEN[name]
    config = json.loads((drafter / "config.json").read_text()) | changed
    config["dflash_config"] |= nested
    tensors = load_file(drafter / "model.safetensors")
    if edit is not None:
        edit(tensors)
    return write_checkpoint(folder / name.replace(" ", "-"), config, tensors)


def check_first(logged: Messages, guard: Guard, cause: str, command: str) -> None:
    assert len(logged.texts) == 1, logged.texts
    assert logged.texts[0].startswith("The drafter ") and f"(1) {FIRST_WORDS[cause]}" in logged.texts[0]
    assert logged.texts[0].endswith(f"Check with: {command}")
    assert 0 < guard.counts.drafts <= WITHIN


@pytest.mark.parametrize("name", BROKEN)
def test_the_right_cause_comes_first(pair, prompts, tmp_path, logged, name: str) -> None:
    """Would catch a silent collapse that stays silent, or that is blamed on something else."""
    drafter = broken_drafter(pair.drafter, tmp_path, name)
    with Engine(pair.target, drafter) as engine:
        guard = engine.proposer._guard
        logged.listen()
        engine.generate([prompt[:150] for prompt in prompts[::7]], greedy(MAX_TOKENS, ignore_eos=True))
    check_first(logged, guard, BROKEN[name][3], f"lilicorr doctor {drafter} --target {pair.target}")


@pytest.mark.parametrize("stale", ["neighbour's features", "last step's features", "neighbour's token"])
def test_stale_anchors_come_first(pair, lilicorr_engine, prompts, monkeypatch, logged, stale: str) -> None:
    """Would catch anchors of another request or step, which hardly lower acceptance and never the output."""
    set_inputs = LiLiCorrProposer.set_inputs_first_pass
    last: dict[str, torch.Tensor] = {}

    def set_stale_inputs(self, **inputs):
        if stale == "neighbour's token":
            inputs["next_token_ids"] = inputs["next_token_ids"].roll(1)
        result = set_inputs(self, **inputs)
        if stale == "neighbour's features":
            self._anchor_hidden = self._anchor_hidden.roll(1, 0)
        if stale == "last step's features":
            for row, request_id in enumerate(self._runner.input_batch.req_ids):
                anchor = self._anchor_hidden[row].clone()
                self._anchor_hidden[row] = last.get(request_id, anchor)
                last[request_id] = anchor
        return result

    monkeypatch.setattr(LiLiCorrProposer, "set_inputs_first_pass", set_stale_inputs)
    guard = watch(lilicorr_engine)
    logged.listen()
    lilicorr_engine.generate(prompts[:16], greedy(MAX_TOKENS, ignore_eos=True))
    check_first(logged, guard, "anchors", f"lilicorr doctor {pair.drafter} --target {pair.target}")


def hard_texts(how_many: int) -> dict[str, list[str]]:
    """Texts that a small drafter of Python finds hard, or easy, but that are no fault of its own."""
    rng = random.Random(1)

    def letters(alphabet: str, length: int) -> str:
        return "".join(rng.choice(alphabet) for _ in range(length))

    harbour = (
        "It was a grey morning in the harbour and nobody, least of all the old ferryman, expected the letter that "
        "would change everything. She read it twice, folded it, and walked without a word along the pier where her "
        "father had once mended nets. You cannot leave before winter, he had told her; yet the ice was late. "
    )
    scripts = (
        "Съешь же ещё этих мягких булок. 日本語の文章をここに書きます。"
        "الذكاء الاصطناعي فرع من العلوم. Ξεσκεπάζω τὴν ψυχοφθόρα. "
    )
    hash_in_c = (
        "static inline uint32_t hash(const char *s, size_t n) {\n  uint32_t h = 2166136261u;\n  for (size_t i = 0; "
        "i < n; ++i) h = (h ^ (uint8_t)s[i]) * 16777619u;\n  return h;\n}\nint main(void) { return 0; }\n"
    )
    words = ["ab", "the the", "0", "x = x", "((", "foo bar baz", "-", "a\n", "1 2 3", "é", "##", "None,", "\t\t", "=="]
    python = [prompt.text for prompt in load_prompts("held_out_python")]
    return {
        "python": (python * how_many)[:how_many],
        "maths": [
            f"{a} * {b} = {a * b}\n$\\int_0^{{{a}}} x^{{{b}}} dx = \\frac{{{a}^{{{b + 1}}}}}{{{b + 1}}}$\n"
            for a, b in ((rng.randrange(1, 999), rng.randrange(1, 99)) for _ in range(how_many))
        ],
        "scripts": [scripts[5 * i :] + scripts[: 5 * i] for i in range(how_many)],
        "repeated": [(words[i % len(words)] + " ") * 40 for i in range(how_many)],
        "symbols": ["".join(chr(rng.randrange(33, 0x2FFF)) for _ in range(60)) for _ in range(how_many)],
        "prose": [harbour[12 * i :] + harbour[: 12 * i] for i in range(how_many)],
        "json": [
            f'{{"id": {rng.randrange(10**9)}, "name": "{letters("abcdefghij", 12)}", "values": [{rng.random():.6f}, '
            f'{rng.random():.6f}, {rng.random():.6f}], "ok": true}}\n'
            for _ in range(how_many)
        ],
        "hex": [letters("0123456789abcdef", 120) for _ in range(how_many)],
        "c": [hash_in_c[8 * i :] + hash_in_c[: 8 * i] for i in range(how_many)],
        "short": [letters("abcdefghijklmnop(=[", 2) for _ in range(how_many)],
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hard_text_is_left_alone(pair, lilicorr_engine, prompts, logged, temperature: float) -> None:
    """Would catch a sound drafter blamed for hard text: ten kinds, random tokens and shuffled ones."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    kinds = {
        kind: [tokenizer.encode(text, add_special_tokens=False).ids[:150] for text in texts]
        for kind, texts in hard_texts(16).items()
    }
    rng = random.Random(2)
    kinds["random tokens"] = [[rng.randrange(2, 2048) for _ in range(60)] for _ in range(16)]
    kinds["shuffled"] = [rng.sample(prompt[:150], len(prompt[:150])) for prompt in prompts[:16]]
    logged.listen()
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True)
    for kind, requests in kinds.items():
        guard = watch(lilicorr_engine)
        lilicorr_engine.generate(requests, params)
        assert logged.texts == [], kind
        # All was asked that could be.
        assert guard.counts.drafts > 96 and (guard._result is not None or not guard.counts.is_poor), kind


def test_the_guard_can_be_switched_off(tmp_path) -> None:
    """Would catch an option that is read and then forgotten."""
    target = write_target(tmp_path / "target", target_config(vocab_size=64))
    drafter = write_drafter(tmp_path / "drafter", drafter_config(vocab_size=64))
    small = {"skip_tokenizer_init": True, "max_model_len": 128, "num_gpu_blocks_override": 64}
    with Engine(target, drafter, speculative={"lilicorr": {"guard": False}}, **small) as engine:
        engine.generate([[5, 6, 7]], greedy(8, ignore_eos=True))
        assert engine.counters.drafts > 0 and engine.proposer._guard is None


def test_output_does_not_depend_on_the_guard(lilicorr_engine, prompts) -> None:
    """Would catch a guard that draws from a request's generator, changes an anchor or writes into a cache."""
    params = [
        SamplingParams(temperature=float(index % 2), seed=index, max_tokens=MAX_TOKENS, ignore_eos=True)
        for index in range(24)
    ]
    guard = watch(lilicorr_engine)
    with_guard = lilicorr_engine.generate(prompts[:24], params)
    assert guard.counts.drafts > 96 and guard._result is not None, "nothing was examined"
    drafted = lilicorr_engine.take_trace()
    lilicorr_engine.proposer._guard = None
    without = lilicorr_engine.generate(prompts[:24], params)
    assert tokens(with_guard) == tokens(without)
    again = lilicorr_engine.take_trace()
    for first, second in zip(with_guard, without, strict=True):
        assert drafted[first.request_id] == again[second.request_id]


def test_a_guard_that_fails_goes_off_and_serving_goes_on(lilicorr_engine, prompts, monkeypatch, logged) -> None:
    """Would catch an error of the guard that ends the engine."""
    guard = watch(lilicorr_engine)
    logged.listen()
    monkeypatch.setattr(guard, "_learn", lambda *_: 1 / 0)
    lilicorr_engine.generate(prompts[:2], greedy(8))
    assert guard.is_done
    assert logged.texts == ["The guard of the drafter is off: ZeroDivisionError: division by zero"]
