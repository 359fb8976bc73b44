# SPDX-License-Identifier: Apache-2.0
"""Lattices of drafters that give infinities or no numbers at all."""

import pytest
import torch

from vllm_lilicorr.kernels.reference import partial_candidates
from vllm_lilicorr.method.lattice import IMPOSSIBLE, Lattice, finite_log_probs, possible_edges
from vllm_lilicorr.method.proposals import Noise, Sampling, sampled_walk
from vllm_lilicorr.method.walks import DETERMINISTIC_WALKS

NUM_SLOTS, TOP_K, VOCAB_SIZE = 3, 4, 12
BROKEN_ROWS = {
    "one finite": torch.full((VOCAB_SIZE,), -torch.inf).index_fill(0, torch.tensor([7]), 0.5),
    "none finite": torch.full((VOCAB_SIZE,), -torch.inf),
    "all NaN": torch.full((VOCAB_SIZE,), torch.nan),
    "one NaN": torch.linspace(0, 1, VOCAB_SIZE).index_fill(0, torch.tensor([3]), torch.nan),
    "plus infinity": torch.linspace(0, 1, VOCAB_SIZE).index_fill(0, torch.tensor([3]), torch.inf),
    "all equal": torch.zeros(VOCAB_SIZE),
}


def broken_lattice(row: torch.Tensor, edge: float) -> tuple[Lattice, torch.Tensor]:
    """One request whose middle slot has this row of logits, and edge logits with `edge` in it."""
    logits = torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[1] = row
    values, ids, partition = partial_candidates(logits, TOP_K)
    log_probs = finite_log_probs(values - partition)[None]
    edge_logits = torch.randn(1, NUM_SLOTS, TOP_K, TOP_K, generator=torch.Generator().manual_seed(1))
    edge_logits[:, 1, 2] = edge
    logits[log_probs[0, :, 0] <= IMPOSSIBLE] = 0.0
    return Lattice(ids[None], log_probs, possible_edges(edge_logits, log_probs)), logits[None]


@pytest.mark.parametrize("edge", [0.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", BROKEN_ROWS)
@pytest.mark.parametrize("walk", DETERMINISTIC_WALKS)
def test_walks_are_defined_and_take_possible_candidates(walk: str, name: str, edge: float) -> None:
    """Would catch an invalid token id, or a candidate of probability 0 where there is another."""
    lattice, _ = broken_lattice(BROKEN_ROWS[name], edge)
    assert lattice.log_probs.isfinite().all()
    path = DETERMINISTIC_WALKS[walk](lattice.edge_logits)
    tokens = lattice.tokens(path)
    assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()
    if name == "one finite":
        assert tokens[0, 1] == 7


@pytest.mark.parametrize("edge", [0.0, torch.nan])
@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_draws_are_defined_and_follow_their_rows(name: str, edge: float) -> None:
    """Would catch a proposal that is not a distribution, or a token that it calls impossible."""
    lattice, logits = broken_lattice(BROKEN_ROWS[name], edge)
    if name in ("one NaN", "plus infinity"):
        assert (lattice.log_probs[0, 1] <= IMPOSSIBLE).all(), "a row with one such logit is no distribution"
    for seed in range(50):
        rows = logits.clone()
        noise = Noise.empty(1, NUM_SLOTS, TOP_K, rows.device).draw(generator=torch.Generator().manual_seed(seed))
        greedy = torch.zeros(1, NUM_SLOTS, dtype=torch.int64)
        _, tokens = sampled_walk(lattice, rows, Sampling(torch.ones(1)), noise, greedy)
        assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()
        torch.testing.assert_close(rows.sum(-1), torch.ones(1, NUM_SLOTS))
        assert (rows.gather(2, tokens[:, :, None]) > 0).all()
