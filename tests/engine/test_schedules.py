# SPDX-License-Identifier: Apache-2.0
"""Drafts do not depend on the schedule: prefix caching, chunked prefill, preemption and batch rows
leave every request's drafts and accepted tokens as they are."""

import numpy as np
import pytest
import torch
from engines import accepted_steps, greedy

from vllm_lilicorr.engine.proposer import LiLiCorrProposer

pytestmark = pytest.mark.slow

# Float32 sums in another order: a head of logit scale 8 over factors of a hundred values.
EDGE_TOLERANCE = 2e-3
# A candidate list may swap two nearly equal logits.
LARGEST_SHARE_OF_TIES = 0.005


def steps_of(run, prompts):
    return [accepted_steps(*row) for row in zip(run.drafts, prompts, run.token_ids, strict=True)]


def compare_lattices(found, expected):
    """(share of blocks whose candidates differ, largest difference of edge logits in the others),
    over the blocks that start at the same position of the same request."""
    blocks = [
        (mine[at], theirs[at]) for mine, theirs in zip(found, expected, strict=True) for at in mine if at in theirs
    ]
    same = [(mine, theirs) for mine, theirs in blocks if mine.candidate_ids == theirs.candidate_ids]
    errors = [np.abs(np.array(mine.edge_logits) - np.array(theirs.edge_logits)).max() for mine, theirs in same]
    return 1 - len(same) / len(blocks), max(errors)


@pytest.mark.parametrize("scenario", ["chunked", "cached"])
def test_accepted_tokens_equal_those_of_the_plain_schedule(runs, prompts, scenario):
    """Catches a drafter whose context has holes, or whose anchor is not the last committed token:
    tokens stay right, acceptance falls to nearly none. (A preempted request gives up the drafts that
    it was to verify, so its steps differ; its lattices are compared below.)"""
    plain, other = runs("plain"), runs(scenario)
    expected, found = steps_of(plain, prompts), steps_of(other, prompts)
    different = [index for index, row in enumerate(found) if row != expected[index]]
    assert len(different) <= len(prompts) * LARGEST_SHARE_OF_TIES, f"prompts {different}"
    assert sum(step.accepted for row in expected for step in row) > 0
    assert abs(other.num_drafts - plain.num_drafts) <= plain.num_drafts * LARGEST_SHARE_OF_TIES
    assert abs(other.num_accepted - plain.num_accepted) <= plain.num_accepted * LARGEST_SHARE_OF_TIES


@pytest.mark.parametrize("scenario", ["chunked", "cached", "preempted"])
def test_lattices_equal_those_of_the_plain_schedule(runs, scenario):
    """Catches an anchor of another row or another step even where no token changes."""
    ties, error = compare_lattices(runs(scenario).drafts, runs("plain").drafts)
    assert ties <= LARGEST_SHARE_OF_TIES
    assert error < EDGE_TOLERANCE


def lattices(engine, prompts, max_tokens):
    outputs = engine.generate(prompts, [greedy(count) for count in max_tokens])
    drafts = engine.take_trace()
    return [drafts[output.request_id] for output in outputs]


@pytest.fixture(scope="module")
def alone(lilicorr_engine, prompts):
    """Drafts of 16 prompts, each served alone."""
    lilicorr_engine.take_trace()
    return [lattices(lilicorr_engine, [prompt], [24])[0] for prompt in prompts[:16]]


def test_rows_that_move_keep_their_anchor(lilicorr_engine, prompts, alone):
    """Catches an anchor kept by batch row: requests of different length leave, the last row fills the gap,
    and new requests arrive in the middle of others' decoding."""
    together = lattices(lilicorr_engine, prompts[:16], [4 + 7 * index % 21 for index in range(16)])
    ties, error = compare_lattices(together, alone)
    assert ties <= LARGEST_SHARE_OF_TIES
    assert error < EDGE_TOLERANCE


def test_the_neighbours_anchor_is_noticed(lilicorr_engine, prompts, alone, monkeypatch):
    """Catches a comparison that would pass with any anchor: here each row reads its neighbour's."""
    score = LiLiCorrProposer._score

    def of_the_neighbour(self, *inputs):
        self._anchor_hidden = self._anchor_hidden.roll(1, dims=0)
        return score(self, *inputs)

    monkeypatch.setattr(LiLiCorrProposer, "_score", of_the_neighbour)
    _, error = compare_lattices(lattices(lilicorr_engine, prompts[:8], [24] * 8), alone[:8])
    assert error > 100 * EDGE_TOLERANCE


def test_a_lost_anchor_is_noticed(lilicorr_engine, prompts, alone, monkeypatch):
    """Catches a head that ignores its anchor, whatever row it comes from."""
    score = LiLiCorrProposer._score

    def without_anchor(self, *inputs):
        self._anchor_valid = torch.zeros_like(self._anchor_valid)
        return score(self, *inputs)

    monkeypatch.setattr(LiLiCorrProposer, "_score", without_anchor)
    _, error = compare_lattices(lattices(lilicorr_engine, prompts[:8], [24] * 8), alone[:8])
    assert error > 100 * EDGE_TOLERANCE
