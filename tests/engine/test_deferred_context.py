# SPDX-License-Identifier: Apache-2.0
"""A drafter that was suspended drafts what it would have drafted without: its context has no holes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engines import Engine, greedy, tokens
from test_schedules import EDGE_TOLERANCE, LARGEST_SHARE_OF_TIES, compare_lattices

from vllm_lilicorr.engine.deferred_context import DeferredContext, committed_rows, last_of_each


class Cache:
    """What was written, by slot, and how large the writes were."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[float, int]] = {}
        self.sizes: list[int] = []

    def write(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        assert len(slots.unique()) == len(slots)
        self.sizes.append(len(slots))
        for feature, position, slot in zip(features[:, 0], positions, slots, strict=True):
            self.rows[int(slot)] = (float(feature), int(position))


def step(first_feature: int, slots: list[int], positions: list[int] | None = None):
    features = torch.arange(first_feature, first_feature + len(slots)).float()[:, None].repeat(1, 3)
    return features, torch.tensor(positions or slots), torch.tensor(slots)


def test_the_last_row_of_a_slot_is_written():
    """Catches a bulk write in which a block's former owner wins."""
    cache = Cache()
    deferred = DeferredContext(cache.write, rows_per_write=100)
    deferred.defer(*step(0, [5, 6, 7]))
    deferred.defer(*step(10, [6, 8], [1, 2]))
    assert cache.rows == {} and len(deferred) == 5
    assert deferred.flush() == 5
    assert cache.rows == {5: (0.0, 5), 6: (10.0, 1), 7: (2.0, 7), 8: (11.0, 2)}
    assert deferred.flush() == 0 and len(deferred) == 0


def test_later_writes_win_over_deferred_ones_of_an_earlier_flush():
    """Catches rows that stay behind after a write and overwrite newer ones later."""
    cache = Cache()
    deferred = DeferredContext(cache.write, rows_per_write=100)
    deferred.defer(*step(0, [1]))
    deferred.flush()
    deferred.defer(*step(5, [1]))
    deferred.flush()
    assert cache.rows == {1: (5.0, 1)}


def test_kept_positions_and_slots_are_copies():
    """Catches views of the runner's buffers, which the next step overwrites."""
    cache = Cache()
    deferred = DeferredContext(cache.write, rows_per_write=100)
    features, positions, slots = step(0, [3, 4])
    deferred.defer(features, positions, slots)
    positions.fill_(0)
    slots.fill_(0)
    deferred.flush()
    assert cache.rows == {3: (0.0, 3), 4: (1.0, 4)}


@pytest.mark.parametrize(("bounds", "kept"), [({"max_rows": 6}, 4), ({"max_bytes": 60}, 4), ({"max_rows": 0}, 0)])
def test_memory_is_bounded(bounds, kept):
    """Catches features of a long suspension that are kept without end; 12 bytes a row here."""
    cache = Cache()
    deferred = DeferredContext(cache.write, rows_per_write=100, **bounds)
    wrote = [deferred.defer(*step(10 * index, [2 * index, 2 * index + 1])) for index in range(3)]
    assert wrote == ([False, False, True] if kept else [True] * 3)
    assert len(deferred) == 0 and len(cache.rows) == 6


def test_writes_are_no_larger_than_a_step():
    """Catches a bulk write with activations beyond what vLLM's profiling run made room for."""
    cache = Cache()
    deferred = DeferredContext(cache.write, rows_per_write=4)
    for index in range(5):
        deferred.defer(*step(10 * index, [2 * index, 2 * index + 1]))
    deferred.flush()
    assert cache.sizes == [4, 4, 2] and len(cache.rows) == 10


def test_many_steps_are_joined():
    """Catches an order that is lost when pieces are joined."""
    cache = Cache()
    deferred = DeferredContext(cache.write, rows_per_write=10_000)
    for index in range(1000):
        deferred.defer(*step(index, [index % 7]))
        assert len(deferred._pieces) < 256
    deferred.flush()
    assert {slot: feature for slot, (feature, _) in cache.rows.items()} == {
        index % 7: float(index) for index in range(993, 1000)
    }


def test_rejected_rows_are_dropped():
    """Catches an off-by-one at the end of a request, and a request that had no drafts."""
    rows = committed_rows(torch.tensor([0, 4, 5, 9], dtype=torch.int32), torch.tensor([2, 0, 3], dtype=torch.int32))
    assert rows.tolist() == [0, 1, 4, 5]


def test_last_of_each_against_a_loop():
    """Catches a sort that is not stable."""
    slots = torch.from_numpy(np.random.default_rng(0).integers(0, 50, 400))
    expected = sorted({int(slot): index for index, slot in enumerate(slots)}.values())
    assert last_of_each(slots).tolist() == expected


class Scripted:
    """A policy that drafts two steps of every seven, with whole or with ragged lengths."""

    def __init__(self, ragged: bool = False) -> None:
        self.steps, self.resumptions, self._ragged, self._drafted = 0, 0, ragged, False

    def begin_step(self, view, can_draft=True, must_draft=False) -> bool:
        self.steps += 1
        drafts = can_draft and self.steps % 7 < 2
        self.resumptions += drafts and not self._drafted
        self._drafted = drafts
        return drafts

    def choose(self, features, *kinds):
        num_reqs, num_slots, _ = features.shape
        lengths = np.full(num_reqs, num_slots)
        if self._ragged:
            lengths = (np.arange(num_reqs) * 3 + self.steps) % (num_slots + 1)
        return lengths

    def exclude_from_timing(self) -> None:
        pass


SCHEDULES = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 128},
    "cached": {"enable_prefix_caching": True, "num_gpu_blocks_override": 2560},
    "few cached blocks": {"enable_prefix_caching": True, "num_gpu_blocks_override": 64},
    "preempted": {"num_gpu_blocks_override": 32},
}


@pytest.fixture(params=SCHEDULES)
def suspended_engine(request, pair, tmp_path) -> Iterator[Engine]:
    speculative, trace = {"lilicorr": {"adaptive_length": True}}, tmp_path / "trace.jsonl"
    options = SCHEDULES[request.param]
    with Engine(pair.target, pair.drafter, trace=trace, speculative=speculative, **options) as engine:
        engine.schedule = request.param
        yield engine


@pytest.mark.slow
def test_drafts_after_resumption_equal_those_without_suspension(suspended_engine, runs, prompts, reference):
    """Catches holes in the drafter's context and rows of a block's former owner: drafts turn to noise where
    the position is right and the context is not. Whatever is drafted, the served tokens are the target's."""
    engine, half = suspended_engine, prompts[:100]
    if "cached" in engine.schedule:  # prompts whose context was deferred by others, and evicted in between
        engine.proposer._policy = Scripted()
        engine.generate(half, greedy(1))
        engine.take_trace()
    engine.proposer._policy = policy = Scripted()
    outputs = engine.generate(half, greedy(40))
    drafts = engine.take_trace()
    assert tokens(outputs) == reference[:100]
    assert policy.resumptions > 30
    assert (engine.counters.preemptions > 0) == (engine.schedule in ("preempted", "few cached blocks"))
    found = [drafts.get(output.request_id, {}) for output in outputs]
    ties, error = compare_lattices(found, runs("plain").drafts[:100])
    assert sum(len(mine) for mine in found) > 300
    assert ties <= LARGEST_SHARE_OF_TIES
    assert error < EDGE_TOLERANCE
