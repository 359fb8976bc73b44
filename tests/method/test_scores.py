# SPDX-License-Identifier: Apache-2.0
"""Scores for Gumbel-max against the proposals that they stand for."""

import pytest
import torch

from vllm_lilicorr.method.lattice import Lattice
from vllm_lilicorr.method.proposals import Noise, Sampling, keep_probable, sampled_walk
from vllm_lilicorr.method.scores import proposal_scores
from vllm_lilicorr.method.walks import greedy_walk

NUM_REQS, NUM_SLOTS, TOP_K, VOCAB_SIZE = 40, 3, 4, 16
TEMPERATURES = torch.tensor([1.0, 0.4, 1.7, 0.0, 0.8]).repeat(NUM_REQS // 5)


def lattice_and_logits(spread: float = 2.0) -> tuple[Lattice, torch.Tensor]:
    """A lattice and the logits [R, S, V] that its candidates were taken from."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(NUM_REQS, NUM_SLOTS, VOCAB_SIZE, generator=generator)
    log_probs, ids = torch.log_softmax(logits, dim=-1).topk(TOP_K)
    return Lattice(ids, log_probs, 3 * torch.randn(*ids.shape, TOP_K, generator=generator)), logits


def spread_scores(lattice: Lattice, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Scores [R, S, K + 1, V] over the vocabulary, each token from elsewhere put in turn into the last column."""
    divisor = sampling.divisor[:, None, None]
    limits = [None if x is None else x.repeat_interleave(NUM_SLOTS) for x in (sampling.top_k, sampling.top_p)]
    kept = keep_probable(torch.softmax(logits / divisor, dim=-1).flatten(0, 1), *limits).view_as(logits) > 0
    kept_logits = logits.masked_fill(~kept, -torch.inf)
    log_partition = torch.logsumexp(logits / divisor, dim=-1)
    ids = lattice.candidate_ids
    spread = []
    for token in range(VOCAB_SIZE):
        elsewhere = kept_logits[:, :, token].masked_fill((ids == token).any(-1), -torch.inf)
        args = (logits.gather(2, ids), kept_logits.gather(2, ids), elsewhere, log_partition, sampling)
        scores = proposal_scores(lattice.edge_logits, *args)
        spread.append(scores[..., -1])
    rows = torch.stack(spread, dim=-1)
    return rows.scatter(3, ids[:, :, None].expand(-1, -1, TOP_K + 1, -1), scores[..., :-1])


LIMITS = {
    "none": {},
    "top-k": {"top_k": torch.tensor([1, 3, 6, 16]).repeat(NUM_REQS // 4)},
    "top-p": {"top_p": torch.tensor([0.3, 0.9, 1.0, 0.6]).repeat(NUM_REQS // 4)},
    "both": {
        "top_k": torch.tensor([5, 16, 3, 8]).repeat(NUM_REQS // 4),
        "top_p": torch.tensor([0.5, 0.9, 1.0, 0.7]).repeat(NUM_REQS // 4),
    },
}


@pytest.mark.parametrize("limits", LIMITS)
def test_softmax_of_the_scores_is_the_proposal(limits: str) -> None:
    """Would catch a row whose parts are on different scales: mass on the candidates gained or lost."""
    lattice, logits = lattice_and_logits()
    sampling = Sampling(TEMPERATURES, **LIMITS[limits])
    noise = Noise.empty(NUM_REQS, NUM_SLOTS, TOP_K, logits.device).draw(generator=torch.Generator().manual_seed(1))
    proposals = logits.clone()
    path, _ = sampled_walk(lattice, proposals, sampling, noise, greedy_walk(lattice.edge_logits))
    assert (path == TOP_K).any() and (path < TOP_K).any()
    previous = torch.cat((torch.zeros_like(path[:, :1]), path[:, :-1]), dim=1)
    rows = spread_scores(lattice, logits, sampling)
    rows = rows.gather(2, previous[:, :, None, None].expand(-1, -1, 1, VOCAB_SIZE))[:, :, 0]
    drawn = TEMPERATURES > 0
    realised = torch.softmax(rows / sampling.divisor[:, None, None], dim=-1)
    torch.testing.assert_close(realised[drawn], proposals[drawn], rtol=1e-4, atol=1e-6)


def test_a_walk_over_one_token_from_elsewhere_draws_from_all_of_them() -> None:
    """Would catch a token from elsewhere that is weighed by the mass of all of them."""
    lattice, logits = lattice_and_logits(spread=1.0)
    sampling = Sampling(TEMPERATURES.clamp_min(0.1))
    gumbel = -torch.empty_like(logits).exponential_(generator=torch.Generator().manual_seed(2)).log()
    noised = spread_scores(lattice, logits, sampling) / sampling.divisor[:, None, None, None] + gumbel[:, :, None]
    ids = lattice.candidate_ids
    outside = (logits / sampling.divisor[:, None, None] + gumbel).scatter(2, ids, -torch.inf)
    token = outside.argmax(dim=-1, keepdim=True)
    with_elsewhere = torch.cat((ids, token), dim=2)[:, :, None].expand(-1, -1, TOP_K + 1, -1)
    chosen = with_elsewhere.gather(3, noised.gather(3, with_elsewhere).argmax(dim=-1, keepdim=True))[..., 0]
    assert torch.equal(chosen, noised.argmax(dim=-1))


def test_requests_at_temperature_0_keep_their_edges() -> None:
    """Would catch a token from elsewhere, or a flattened row, in a deterministic walk."""
    lattice, logits = lattice_and_logits()
    rows = spread_scores(lattice, logits, Sampling(TEMPERATURES))[TEMPERATURES == 0]
    ids, edges = (x[TEMPERATURES == 0] for x in (lattice.candidate_ids, lattice.edge_logits))
    ids = ids[:, :, None].expand(-1, -1, TOP_K, -1)
    assert torch.equal(rows[:, :, :TOP_K].gather(3, ids), edges)
    assert rows[:, :, :TOP_K].scatter(3, ids, -torch.inf).isneginf().all()


def test_no_row_is_not_a_number() -> None:
    """Would catch minus infinity minus itself: impossible candidates, and no token from elsewhere."""
    lattice, logits = lattice_and_logits()
    ids = lattice.candidate_ids
    edges = lattice.edge_logits.clone()
    edges[..., 1:] = -torch.inf
    candidates = logits.gather(2, ids)
    candidates[..., 1:] = -torch.inf
    nothing = torch.full(ids.shape[:2], -torch.inf)
    sampling = Sampling(TEMPERATURES, torch.full((NUM_REQS,), 2), torch.full((NUM_REQS,), 0.5))
    for log_partition in (torch.logsumexp(candidates, dim=-1), -nothing):
        scores = proposal_scores(edges, candidates, candidates, nothing, log_partition, sampling)
        assert not scores.isnan().any()
        assert (scores[..., :TOP_K, :].amax(dim=-1) > -torch.inf).all()
