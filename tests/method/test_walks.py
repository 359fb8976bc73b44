# SPDX-License-Identifier: Apache-2.0
"""Walks against step-by-step ones and against brute force."""

import itertools

import pytest
import torch

from vllm_lilicorr.method.walks import DETERMINISTIC_WALKS, expected_length_walk, greedy_walk, oracle_walk


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


@pytest.mark.parametrize("name", DETERMINISTIC_WALKS)
def test_one_slot_and_one_candidate(name: str) -> None:
    """Would catch a walk that assumes a second slot or a second candidate."""
    walk, edge_logits = DETERMINISTIC_WALKS[name], lattices(2, 1, 4)
    assert torch.equal(walk(edge_logits)[:, 0], edge_logits[:, 0, 0].argmax(-1))
    assert walk(lattices(2, 5, 1)).tolist() == [[0] * 5] * 2


def expected_length(edge_logits: torch.Tensor, path: tuple[int, ...]) -> float:
    """Expected accepted tokens of one path through [S, K, K]: the sum of its running products."""
    rows = torch.softmax(edge_logits.double(), dim=-1)
    total, product, previous = 0.0, 1.0, 0
    for slot, rank in enumerate(path):
        product *= float(rows[slot, previous, rank])
        total, previous = total + product, rank
    return total


def test_expected_length_is_the_best_of_all_paths() -> None:
    """Would catch a programme that maximises the whole path's probability, or forgets the 1 of its own slot:
    1,000 random lattices, every path of each."""
    sizes = [(2, 4), (3, 3), (4, 2), (5, 2), (1, 5)]
    improved = 0
    for seed in range(1000):
        num_slots, top_k = sizes[seed % len(sizes)]
        edge_logits = lattices(1, num_slots, top_k, seed)
        values = {
            path: expected_length(edge_logits[0], path) for path in itertools.product(range(top_k), repeat=num_slots)
        }
        chosen = tuple(expected_length_walk(edge_logits)[0].tolist())
        assert values[chosen] == pytest.approx(max(values.values()), abs=1e-6), (seed, chosen)
        improved += values[chosen] > values[tuple(greedy_walk(edge_logits)[0].tolist())] + 1e-6
    assert improved > 20


def test_expected_length_ties_go_to_the_lower_rank() -> None:
    """Would catch draws that depend on the reduction's order."""
    assert expected_length_walk(torch.zeros(2, 4, 8, 8)).tolist() == [[0] * 4] * 2


def test_oracle_ends_where_no_candidate_is_right() -> None:
    """Would catch a prefix that goes on after a slot without the target's token."""
    candidate_ids = torch.tensor([[[5, 6], [7, 8], [9, 4]]])
    ranks, length = oracle_walk(candidate_ids, torch.tensor([[6, 7, 3]]))
    assert (ranks.tolist(), length.tolist()) == ([[1, 0, 0]], [2])
    assert oracle_walk(candidate_ids, torch.tensor([[1, 7, 9]]))[1].tolist() == [0]
