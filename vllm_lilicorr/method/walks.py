# SPDX-License-Identifier: Apache-2.0
"""Paths through a lattice: edge logits in, one candidate rank per slot out.

Edge logits have shape [R, S, K, K] (fp32): entry [r, s, i, j] scores candidate j
of slot s after candidate i of slot s - 1. Slot 0 follows the anchor alone, so its
K rows are equal and row 0 is read.

These walks are deterministic; proposals.py draws a path for requests that sample.
"""

from collections.abc import Callable

import torch


def follow(
    choices: torch.Tensor,  # [R, S, K] int64: best next rank after each predecessor rank
) -> torch.Tensor:
    """The path [R, S] that starts at the anchor and takes each row's choice."""
    rank = choices[:, 0, 0]
    path = [rank]
    for slot in range(1, choices.shape[1]):
        rank = choices[:, slot].gather(1, rank[:, None])[:, 0]
        path.append(rank)
    return torch.stack(path, dim=1)


def rows_along(
    rows: torch.Tensor,  # [R, S, I, J]: of each slot, one row per predecessor rank
    path: torch.Tensor,  # [R, S] int64 ranks below I
) -> torch.Tensor:
    """The row that a path reached in each slot, [R, S, J]; slot 0 follows the anchor and has row 0."""
    previous = torch.nn.functional.pad(path[:, :-1], (1, 0))
    return rows.gather(2, previous[:, :, None, None].expand(-1, -1, 1, rows.shape[-1]))[:, :, 0]


def greedy_walk(
    edge_logits: torch.Tensor,  # [R, S, K, K] fp32
) -> torch.Tensor:
    """The most probable candidate after each chosen one, as ranks [R, S] int64.

    Ties go to the lower rank.
    """
    return follow(edge_logits.argmax(dim=-1))


def expected_length_walk(
    edge_logits: torch.Tensor,  # [R, S, K, K] fp32
) -> torch.Tensor:
    """The path with the largest expected number of accepted tokens, as ranks [R, S] int64.

    With p the softmax of each edge row, it maximises the sum over t of the product of
    p along the first t slots: acceptance counts the longest correct prefix, so a slot is
    worth what it makes reachable. By dynamic programming from the last slot back,
    E_s(i) = max_j p_s(j | i) (1 + E_{s+1}(j)) with E_S = 0. Ties go to the lower rank.
    """
    probs = torch.softmax(edge_logits, dim=-1)
    beyond = probs.new_zeros(probs.shape[0], 1, probs.shape[-1])
    choices = []
    for slot in reversed(range(probs.shape[1])):
        best = (probs[:, slot] * (1 + beyond)).max(dim=-1)
        beyond = best.values[:, None]
        choices.append(best.indices)
    return follow(torch.stack(choices[::-1], dim=1))


def oracle_walk(
    candidate_ids: torch.Tensor,  # [R, S, K] int64
    continuation: torch.Tensor,  # [R, S] int64: what the target says in these slots
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best path that any walk could have taken: a diagnostic, since it knows the answer.

    Returns:
        ranks [R, S] int64 (0 where the target's token is no candidate), and the number of
        slots, from the first on, whose token was among the candidates, [R] int64.
    """
    hits = candidate_ids == continuation[:, :, None]
    return hits.long().argmax(dim=-1), hits.any(dim=-1).long().cumprod(dim=1).sum(dim=1)


# What a request at temperature 0 may walk by.
DETERMINISTIC_WALKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "greedy": greedy_walk,
    "expected-length": expected_length_walk,
}
