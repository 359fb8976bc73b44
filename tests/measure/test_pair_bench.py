# SPDX-License-Identifier: Apache-2.0
"""The bench's arithmetic, and one small run of it."""

import json

import pytest

from vllm_lilicorr.measure.acceptance import SpeculationCounts
from vllm_lilicorr.measure.engine_client import Run
from vllm_lilicorr.measure.pair_bench import BenchOptions, run_bench, spread, summarize


def runs(seconds: tuple[float, float], drafts: int = 0, accepted: int = 0, ids=(1, 2)) -> list[Run]:
    """Two runs of 100 tokens each."""
    counts = SpeculationCounts(drafts, 7 * drafts, accepted, (accepted,))
    return [Run(s, 100, counts, [list(ids)]) for s in seconds]


def test_ratios_are_formed_within_a_block():
    """Ratios of totals: a slow stretch of the machine in one block would decide the result."""
    fast = {"none": runs((2, 2)), "dflash-argmax": runs((1, 1), 50, 50), "lilicorr": runs((1, 1), 40, 60)}
    slow = {"none": runs((20, 20)), "dflash-argmax": runs((8, 8), 50, 50), "lilicorr": runs((5, 5), 40, 60)}
    result = summarize([fast, slow])
    ratio = result["ratios"]["lilicorr/none"]
    assert ratio["mean"] == pytest.approx((2 * 4) ** 0.5)
    assert (ratio["smallest"], ratio["largest"]) == (2, 4)
    assert result["acceptance_gain_over_dflash"] == pytest.approx(2.5 / 2.0)
    assert result["throughput_gain_per_acceptance_gain"] == pytest.approx((1 * 1.6) ** 0.5 / 1.25)
    assert result["engines"]["none"]["tokens_per_second"] == pytest.approx(400 / 44)


def test_different_tokens_are_counted():
    """A faster engine that writes something else."""
    block = {"none": runs((1, 1)), "dflash-argmax": runs((1, 1), 1, 1), "lilicorr": runs((1, 1), 1, 1, ids=(1, 3))}
    engines = summarize([block])["engines"]
    assert engines["lilicorr"]["same_tokens_as_none"] == 0.0
    assert engines["dflash-argmax"]["same_tokens_as_none"] == 1.0


def test_spread_is_geometric():
    """2x and 0.5x averaging to more than no change."""
    assert spread([2.0, 0.5])["mean"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_small_run_end_to_end(pair, tmp_path, monkeypatch):
    """Engines that do not start with these arguments, or counters that are not counted."""
    pytest.importorskip("vllm")
    from rich.console import Console

    from vllm_lilicorr.measure.embedded_pair import Pair

    output = tmp_path / "bench.json"
    options = BenchOptions(
        Pair(pair.target, pair.drafter), concurrency=(1, 2), num_prompts=8, max_tokens=8, dtype="float32", output=output
    )
    assert run_bench(options, Console(quiet=True)) == 0
    record = json.loads(output.read_text())
    assert record["hardware"]["cores"] >= 1 and record["versions"]["vllm"]
    for name, seconds in record["cpu_seconds_while_waiting"].items():
        assert seconds < 2, f"{name} takes processor time from the others"
    for number in ("1", "2"):
        engines = record["concurrency"][number]["engines"]
        assert engines["none"]["acceptance_length"] == 1.0
        assert engines["lilicorr"]["acceptance_length"] > 1.0
        assert engines["dflash-argmax"]["acceptance_length"] > 1.0
        assert engines["lilicorr"]["same_tokens_as_none"] == 1.0, "float32 is exact"
