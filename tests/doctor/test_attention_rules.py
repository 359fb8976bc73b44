# SPDX-License-Identifier: Apache-2.0
"""Predicted attention backends against vLLM's own selection."""

import ast
import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from vllm_sources import fetch

from vllm_lilicorr.doctor.attention_rules import (
    BACKENDS,
    COVERED_KV_CACHE_DTYPES,
    DrafterAttention,
    is_non_causal,
    predict_backend,
    refusal,
)
from vllm_lilicorr.serving.installation import find_vllm

CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))


class Case(NamedTuple):
    capability: tuple[int, int]
    attention: DrafterAttention
    sliding: bool = False
    named: str | None = None  # the backend that a user names

    def expected(self) -> str | None:
        if self.named is None:
            return predict_backend(self.capability, self.attention)
        return None if refusal(self.named, self.capability, self.attention) else self.named


def grid() -> list[Case]:
    """Every machine × head × causality × KV type × block × window; dtypes, sinks and named backends in wider steps."""
    kinds = COVERED_KV_CACHE_DTYPES
    cases = [
        Case(capability, DrafterAttention(head_dim, non_causal, False, "bfloat16", kv, block_size), sliding)
        for capability, head_dim, non_causal, kv, block_size, sliding in itertools.product(
            CAPABILITIES,
            (16, 36, 64, 100, 128, 192, 256, 320, 512),
            (True, False),
            kinds,
            (None, 48, 64, 128, 8),
            (True, False),
        )
    ]
    cases += [
        Case(capability, DrafterAttention(head_dim, non_causal, sinks, dtype, kv))
        for capability, head_dim, non_causal, kv, dtype, sinks in itertools.product(
            CAPABILITIES, (16, 64, 128, 256), (True, False), kinds, ("float16", "float32"), (True, False)
        )
    ]
    cases += [
        Case(capability, DrafterAttention(128, True, False, "bfloat16", kv, block_size, target_head_dim))
        for capability, target_head_dim, kv, block_size in itertools.product(
            CAPABILITIES, (256, 512), kinds, (None, 48, 64, 128)
        )
    ]
    cases += [
        Case(capability, DrafterAttention(head_dim, True, sinks, "bfloat16", kv), False, backend)
        for capability, head_dim, kv, sinks, backend in itertools.product(
            CAPABILITIES, (16, 64, 128, 256, 320), kinds, (True, False), BACKENDS
        )
    ]
    return cases


def vllm_choices(cases: list[Case], package_parent: Path | None = None) -> list[str | None]:
    """What vLLM picks, by attention_selection.py in a process of its own."""
    environment = os.environ | {"LILICORR_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if package_parent:
        environment["PYTHONPATH"] = str(package_parent)
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("attention_selection.py")],
        input="".join(json.dumps(case._replace(attention=asdict(case.attention))) + "\n" for case in cases),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    answers = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(cases) + 1
    print(f"vLLM {answers[-1]['vllm']}: {len(cases)} cases")
    return [answer["backend"] for answer in answers[:-1]]


def assert_equal(cases: list[Case], choices: list[str | None]) -> None:
    wrong = [
        f"{case}: vLLM {choice}, predicted {case.expected()}"
        for case, choice in zip(cases, choices, strict=True)
        if case.expected() != choice
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:20])
    assert set(choices) == {*BACKENDS, None}, "every backend, and none at all, must occur"


@pytest.mark.slow
def test_predictions_are_vllms_own_choices():
    """Would catch a table that differs from the installed vLLM on any GPU, head, cache type or block."""
    cases = grid()
    assert_equal(cases, vllm_choices(cases))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_predictions_are_the_choices_of_other_tested_releases(version):
    """Would catch a rule that only the installed release has."""
    try:
        package = fetch(version)
    except RuntimeError as error:  # offline, and not fetched before
        pytest.skip(str(error))
    cases = grid()[::7]
    assert_equal(cases, vllm_choices(cases, package.parent))


def vllm_is_non_causal(package: Path):
    """vLLM's own function, taken out of its module: importing that takes seconds."""
    tree = ast.parse((package / "model_executor/models/qwen3_dflash.py").read_text())
    wanted = ("_dflash_layer_causal", "dflash_has_any_non_causal", "_SLIDING_ATTENTION")
    body = [
        node
        for node in tree.body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in wanted)
    ]
    space = {"Qwen3Config": object}
    exec(compile(ast.Module(body, []), "qwen3_dflash", "exec"), space)
    return space["dflash_has_any_non_causal"]


def test_causality_is_read_as_vllm_reads_it():
    """Would catch a drafter taken for causal: it gets a backend that cannot run it."""
    ask = vllm_is_non_causal(find_vllm().package)
    full, sliding = "full_attention", "sliding_attention"
    answers = set()
    for top, nested, kinds in itertools.product(
        (None, True, False),
        ({}, None, {"causal": True}, {"causal": False}),
        (None, [full, full], [sliding] * 2, [full, sliding]),
    ):
        config = {"num_hidden_layers": 2, "is_causal": top, "dflash_config": nested, "layer_types": kinds}
        assert is_non_causal(config) == ask(SimpleNamespace(**config)), config
        answers.add(is_non_causal(config))
    assert answers == {True, False}
