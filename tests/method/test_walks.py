# SPDX-License-Identifier: Apache-2.0
"""Walks against step-by-step ones, and the sampled walk's draws against their own rows."""

import torch
from scipy import stats

from vllm_lilicorr.method.walks import greedy_walk, sampled_walk


def lattices(num_reqs: int, num_slots: int, top_k: int, seed: int = 0) -> torch.Tensor:
    edge_logits = 3 * torch.randn(num_reqs, num_slots, top_k, top_k, generator=torch.Generator().manual_seed(seed))
    edge_logits[:, 0] = edge_logits[:, 0, :1]
    return edge_logits


def test_greedy_follows_the_row_it_reached() -> None:
    """Would catch an argmax that ignores the chosen predecessor."""
    edge_logits = lattices(50, 7, 8)
    path = greedy_walk(edge_logits)
    for row in range(50):
        rank = 0
        for slot in range(7):
            rank = int(edge_logits[row, slot, rank].argmax())
            assert path[row, slot] == rank
    assert not torch.equal(path, torch.zeros_like(path))


def test_greedy_ties_go_to_the_lower_rank() -> None:
    """Would catch draws that depend on the reduction's order."""
    edge_logits = torch.zeros(3, 4, 16, 16)
    edge_logits[1, :, :, 5:9] = 1.0
    path = greedy_walk(edge_logits)
    assert path.tolist() == [[0] * 4, [5] * 4, [0] * 4]


def test_one_slot() -> None:
    """Would catch a walk that assumes a second slot."""
    edge_logits = lattices(2, 1, 4)
    assert torch.equal(greedy_walk(edge_logits)[:, 0], edge_logits[:, 0, 0].argmax(-1))


def test_sampled_rows_are_the_rows_that_were_drawn_from() -> None:
    """Would catch proposal rows of another predecessor, another request or another temperature."""
    edge_logits = lattices(6, 5, 4)
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0, 0.7])
    noise = torch.empty(6, 5, 4).exponential_(generator=torch.Generator().manual_seed(1))
    path, rows = sampled_walk(edge_logits, temperature, noise)
    for row in range(6):
        rank = 0
        for slot in range(5):
            if temperature[row] == 0:
                wanted = torch.zeros(4)
                wanted[edge_logits[row, slot, rank].argmax()] = 1
            else:
                wanted = torch.softmax(edge_logits[row, slot, rank] / temperature[row], dim=0)
            torch.testing.assert_close(rows[row, slot], wanted)
            rank = int(path[row, slot])
    assert torch.equal(path[4], greedy_walk(edge_logits)[4])


def test_sampled_walk_draws_from_its_rows() -> None:
    """Would catch a race that favours a rank: chi-square over 50,000 whole paths, fixed seed."""
    num_draws, num_slots, top_k = 50_000, 3, 3
    edge_logits = lattices(1, num_slots, top_k).expand(num_draws, -1, -1, -1)
    noise = torch.empty(num_draws, num_slots, top_k).exponential_(generator=torch.Generator().manual_seed(2))
    path, _ = sampled_walk(edge_logits, torch.full((num_draws,), 1.3), noise)
    probs = torch.softmax(edge_logits[0].double() / 1.3, dim=-1)
    expected = torch.einsum("a,ab,bc->abc", probs[0, 0], probs[1], probs[2]).flatten()
    observed = torch.bincount(path[:, 0] * 9 + path[:, 1] * 3 + path[:, 2], minlength=27)
    result = stats.chisquare(observed.numpy(), (expected * num_draws).numpy())
    assert result.pvalue > 1e-3, result
