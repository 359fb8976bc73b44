# SPDX-License-Identifier: Apache-2.0
"""The acceptance table's arithmetic and its variants; one small run of it."""

import json

import pytest
from rich.console import Console

from vllm_lilicorr.measure.acceptance import SpeculationCounts
from vllm_lilicorr.measure.acceptance_table import AcceptanceOptions, difference, run_acceptance, variants_of
from vllm_lilicorr.measure.engine_client import Run
from vllm_lilicorr.measure.held_out_text import PROMPT_CHARACTERS, held_out_text

CONSOLE = Console(quiet=True)


def run(steps: tuple[int, ...], drafts: int, accepted: int) -> Run:
    return Run(1.0, 0, SpeculationCounts(drafts, 7 * drafts, accepted), [[5] * 13] * len(steps), steps)


def test_differences_are_paired():
    """A spread between prompts that hides what two engines differ by."""
    found = difference(run((4, 5, 7), 13, 39), run((5, 7, 13), 22, 44))
    assert found["mean"] == pytest.approx((12 / 3 - 12 / 4 + 12 / 4 - 12 / 6 + 12 / 6 - 12 / 12) / 3)
    assert found["standard_error"] == pytest.approx(0)
    assert found["ratio"] == pytest.approx(4 / 3)


def test_variants_fit_the_drafter():
    """More candidates or slots than the drafter was trained with."""
    names = [variant.name for variant in variants_of(top_k=2, num_slots=3)]
    assert names == ["plain DFlash", "sampled", "greedy", "expected-length", "K 1", "S 1"]


def test_held_out_text_is_cut_evenly():
    """A prompt set that is short, empty or the same piece again and again."""
    prompts = held_out_text(50)
    assert len(set(prompts)) == 50
    assert {len(prompt) for prompt in prompts} == {PROMPT_CHARACTERS}


def test_unknown_variants_are_named(tmp_path):
    """A misspelt variant that measures nothing."""
    from vllm_lilicorr.measure.embedded_pair import find_pair

    with pytest.raises(ValueError, match="'gredy' is no variant; use some of: plain DFlash, sampled"):
        run_acceptance(AcceptanceOptions(find_pair(), only=("gredy",), output=tmp_path / "a.json"), CONSOLE)


@pytest.mark.slow
def test_a_small_run(tmp_path):
    """A table that cannot be made, or that misses the comparison it is for."""
    from vllm_lilicorr.measure.embedded_pair import find_pair

    output = tmp_path / "acceptance.json"
    options = AcceptanceOptions(
        find_pair(), num_prompts=6, max_tokens=16, only=("plain DFlash", "K 2"), output=output, dtype="float32"
    )
    assert run_acceptance(options, CONSOLE) == 0
    record = json.loads(output.read_text())
    assert set(record["variants"]["K 2"]) == {"temperature 0", "temperature 1"}
    assert record["variants"]["K 2"]["temperature 0"]["acceptance_length"] > 1.2
    assert record["over_plain_dflash"]["K 2"]["temperature 1"]["standard_error"] > 0
