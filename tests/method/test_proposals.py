# SPDX-License-Identifier: Apache-2.0
"""Proposals: drawn from what they say, close to what the target samples, the same whatever the batch."""

import pytest
import torch
from scipy import stats

from vllm_lilicorr.method.lattice import Lattice
from vllm_lilicorr.method.proposals import ROW_TEMPERATURE, Noise, Sampling, keep_probable, sampled_walk
from vllm_lilicorr.method.walks import greedy_walk

VOCAB_SIZE, NUM_SLOTS, TOP_K = 7, 3, 3
SETTINGS = {
    "temperature 1": Sampling(torch.tensor([1.0])),
    "temperature 0.5": Sampling(torch.tensor([0.5])),
    "top-k 2": Sampling(torch.tensor([1.3]), top_k=torch.tensor([2])),
    "top-k 5": Sampling(torch.tensor([1.3]), top_k=torch.tensor([5])),
    "top-p 0.9": Sampling(torch.tensor([1.5]), top_p=torch.tensor([0.9])),
    "top-k 6, top-p 0.9": Sampling(torch.tensor([0.8]), top_k=torch.tensor([6]), top_p=torch.tensor([0.9])),
}


def lattice_and_logits(num_reqs: int, seed: int = 0) -> tuple[Lattice, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_reqs, NUM_SLOTS, VOCAB_SIZE, generator=generator)
    values, ids = torch.log_softmax(logits, dim=-1).topk(TOP_K, dim=-1)
    edge_logits = 3 * torch.randn(num_reqs, NUM_SLOTS, TOP_K, TOP_K, generator=generator)
    edge_logits[:, 0] = edge_logits[:, 0, :1]
    return Lattice(ids, values, edge_logits), logits


def repeated(sampling: Sampling, num_reqs: int) -> Sampling:
    parts = (sampling.temperature, sampling.top_k, sampling.top_p)
    return Sampling(*(part if part is None else part.expand(num_reqs) for part in parts))


def draw(lattice: Lattice, logits: torch.Tensor, sampling: Sampling, seed: int = 2):
    """Path, tokens and proposals of one step."""
    noise = Noise.empty(*lattice.candidate_ids.shape, logits.device)
    noise.draw(generator=torch.Generator().manual_seed(seed))
    proposals = logits.clone()
    return *sampled_walk(lattice, proposals, sampling, noise, greedy_walk(lattice.edge_logits)), proposals


def plain_row(
    lattice: Lattice, logits: torch.Tensor, slot: int, previous: int, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """q of one slot of request 0 after rank `previous`, [V] fp64, written out entry by entry."""
    marginal = torch.softmax(logits[0, slot].double() / temperature, dim=-1)
    ids = lattice.candidate_ids[0, slot].tolist()
    mass = float(marginal[ids].sum())
    order = marginal.argsort(descending=True).tolist()
    q, before = torch.zeros(VOCAB_SIZE, dtype=torch.float64), 0.0
    kept_mass = float(marginal[order[:top_k]].sum())
    for rank, token in enumerate(order):
        if rank < top_k and before < top_p * kept_mass:
            q[token] = marginal[token]
        before += float(marginal[token])
    if previous < TOP_K:
        edges = torch.softmax(lattice.edge_logits[0, slot, previous].double() / (ROW_TEMPERATURE * temperature), dim=-1)
        before, q[ids] = 0.0, 0.0
        for rank, j in enumerate(edges.argsort(descending=True).tolist()):
            if rank < top_k and mass * before < top_p:
                q[ids[j]] = mass * edges[j]
            before += float(edges[j])
    return q / q.sum()


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_are_as_written_out(name: str) -> None:
    """Would catch mass that is lost or moved between candidates and elsewhere, and a limit applied to the wrong row."""
    sampling = SETTINGS[name]
    top_k = VOCAB_SIZE if sampling.top_k is None else int(sampling.top_k)
    top_p = 1.0 if sampling.top_p is None else float(sampling.top_p)
    reached = set()
    for seed in range(60):
        lattice, logits = lattice_and_logits(1, seed)
        path, tokens, proposals = draw(lattice, logits, sampling, seed)
        previous = 0
        for slot in range(NUM_SLOTS):
            wanted = plain_row(lattice, logits, slot, previous, float(sampling.temperature), top_k, top_p)
            torch.testing.assert_close(proposals[0, slot].double(), wanted, atol=1e-6, rtol=1e-4)
            previous = int(path[0, slot])
            reached.add(previous)
            if previous < TOP_K:
                assert tokens[0, slot] == lattice.candidate_ids[0, slot, previous]
            else:
                assert tokens[0, slot] not in lattice.candidate_ids[0, slot]
    assert reached == set(range(TOP_K + 1)) or (name == "top-k 2" and TOP_K not in reached)


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_are_drawn_from_their_proposals(name: str) -> None:
    """Would catch a race or a search that favours a token: chi-square over 50,000 whole drafts, fixed seed."""
    num_draws, sampling = 50_000, SETTINGS[name]
    lattice, logits = lattice_and_logits(1, seed=4)
    parts = (lattice.candidate_ids, lattice.log_probs, lattice.edge_logits)
    many = Lattice(*(part.expand(num_draws, *part.shape[1:]) for part in parts))
    _, tokens, proposals = draw(many, logits.expand(num_draws, -1, -1), repeated(sampling, num_draws))
    # The joint distribution of a draft, from the rows that were realised after each predecessor.
    joint = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    first = proposals[0, 0].double()
    for a in range(VOCAB_SIZE):
        after_a = (tokens[:, 0] == a).nonzero()[:, 0]
        if not len(after_a):
            continue
        second = proposals[after_a[0], 1].double()
        assert (proposals[after_a, 1] == proposals[after_a[0], 1]).all()
        for b in range(VOCAB_SIZE):
            after_b = after_a[tokens[after_a, 1] == b]
            if len(after_b):
                joint[a, b] = first[a] * second[b] * proposals[after_b[0], 2].double()
    observed = torch.bincount(tokens @ torch.tensor([VOCAB_SIZE**2, VOCAB_SIZE, 1]), minlength=VOCAB_SIZE**3).double()
    expected = joint.flatten() * num_draws
    assert expected.sum() > 0.999 * num_draws
    assert (observed[expected == 0] == 0).all()
    common = expected >= 5
    observed = torch.cat((observed[common], observed[~common].sum()[None]))
    expected = torch.cat((expected[common], num_draws - expected[common].sum()[None]))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    result = stats.chisquare(observed.numpy(), (expected * observed.sum() / expected.sum()).numpy())
    assert result.pvalue > 1e-3, result


def test_greedy_requests_take_their_path() -> None:
    """Would catch temperature 0 drawn from, or its proposal left as a distribution."""
    lattice, logits = lattice_and_logits(3)
    path, tokens, proposals = draw(lattice, logits, Sampling(torch.tensor([0.0, 1.0, 0.0])))
    greedy = greedy_walk(lattice.edge_logits)
    for row in (0, 2):
        assert torch.equal(path[row], greedy[row])
        assert torch.equal(proposals[row].argmax(-1), tokens[row])
        assert (proposals[row].amax(-1) == 1).all() and (proposals[row].sum(-1) == 1).all()


def test_top_k_1_takes_the_greedy_path() -> None:
    """Would catch a proposal that spreads where the target cannot."""
    lattice, logits = lattice_and_logits(20)
    path, _, proposals = draw(lattice, logits, repeated(Sampling(torch.tensor([0.8]), torch.tensor([1])), 20))
    assert torch.equal(path, greedy_walk(lattice.edge_logits))
    torch.testing.assert_close(proposals.amax(-1), torch.ones(20, NUM_SLOTS))


def test_a_request_draws_the_same_in_any_batch() -> None:
    """Would catch noise, limits or rows of a neighbour."""
    lattice, logits = lattice_and_logits(4)
    sampling = Sampling(
        torch.tensor([1.0, 0.0, 0.7, 1.5]), torch.tensor([7, 7, 2, 5]), torch.tensor([1.0, 1.0, 0.9, 0.5])
    )
    noise = Noise.empty(4, NUM_SLOTS, TOP_K, logits.device).draw(generator=torch.Generator().manual_seed(0))
    for row in range(4):
        noise.draw(row, torch.Generator().manual_seed(row))
    proposals = logits.clone()
    greedy = greedy_walk(lattice.edge_logits)
    path, tokens = sampled_walk(lattice, proposals, sampling, noise, greedy)
    for row in range(4):
        part = slice(row, row + 1)
        alone = Lattice(lattice.candidate_ids[part], lattice.log_probs[part], lattice.edge_logits[part])
        own = Noise.empty(1, NUM_SLOTS, TOP_K, logits.device).draw(0, torch.Generator().manual_seed(row))
        limits = Sampling(sampling.temperature[part], sampling.top_k[part], sampling.top_p[part])
        rows = logits[part].clone()
        alone_path, alone_tokens = sampled_walk(alone, rows, limits, own, greedy[part])
        assert torch.equal(alone_path, path[part]) and torch.equal(alone_tokens, tokens[part])
        torch.testing.assert_close(rows, proposals[part])


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.5), (5, None), (3, 0.8), (1, 1.0), (1000, 0.999), (40, 0.01)])
def test_probable_tokens_are_those_of_a_sort(top_k: int | None, top_p: float | None) -> None:
    """Would catch a threshold on the wrong side, or top-p of the unlimited distribution."""
    probs = torch.softmax(4 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(1)), dim=-1)
    limits = (None if top_k is None else torch.full((8,), top_k), None if top_p is None else torch.full((8,), top_p))
    kept = keep_probable(probs, *limits)
    ordered, order = probs.sort(dim=-1, descending=True)
    if top_k is not None:
        ordered[:, top_k:] = 0
    share = ordered / ordered.sum(-1, keepdim=True)
    ordered[(share.cumsum(-1) - share) >= (1 if top_p is None else top_p)] = 0
    wanted = torch.zeros_like(probs).scatter_(1, order, ordered)
    differ = (kept > 0) != (wanted > 0)
    assert (probs[differ] < 2e-5).all(), probs[differ]
    assert torch.equal(kept[kept > 0], probs[kept > 0])


def test_only_some_requests_limit() -> None:
    """Would catch a limit that reaches requests without one."""
    probs = torch.softmax(torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), dim=-1)
    kept = keep_probable(probs, torch.tensor([50, 3, 50]), torch.tensor([1.0, 1.0, 0.2]))
    assert torch.equal(kept[0], probs[0])
    assert (kept[1] > 0).sum() == 3
    assert (kept[2] > 0).sum() < 20
