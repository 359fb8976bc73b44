# SPDX-License-Identifier: Apache-2.0
"""Paths through a lattice: edge logits in, one candidate rank per slot out.

Edge logits have shape [R, S, K, K] (fp32): entry [r, s, i, j] scores candidate j
of slot s after candidate i of slot s - 1. Slot 0 follows the anchor alone, so its
K rows are equal and row 0 is read.
"""

import torch


def _follow(
    choices: torch.Tensor,  # [R, S, K] int64: best next rank after each predecessor rank
) -> torch.Tensor:
    """The path [R, S] that starts at the anchor and takes each row's choice."""
    rank = choices[:, 0, 0]
    path = [rank]
    for slot in range(1, choices.shape[1]):
        rank = choices[:, slot].gather(1, rank[:, None])[:, 0]
        path.append(rank)
    return torch.stack(path, dim=1)


def greedy_walk(
    edge_logits: torch.Tensor,  # [R, S, K, K] fp32
) -> torch.Tensor:
    """The most probable candidate after each chosen one, as ranks [R, S] int64.

    Ties go to the lower rank.
    """
    return _follow(edge_logits.argmax(dim=-1))


def sampled_walk(
    edge_logits: torch.Tensor,  # [R, S, K, K] fp32
    temperature: torch.Tensor,  # [R] fp32; 0 walks that request greedily
    noise: torch.Tensor,  # [R, S, K] fp32, independent draws of the exponential distribution
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws each slot's candidate from softmax(z / T) of the row that was reached.

    Returns:
        path [R, S] int64 ranks, and rows [R, S, K] fp32: the probabilities that
        each rank was drawn from, summing to 1; a greedy request's row is one-hot.

    A draw takes the candidate with the smallest noise / probability (exponential
    races), so one noise value serves every predecessor of a slot: only the row
    that the walk reaches uses it.
    """
    is_greedy = temperature == 0
    scale = torch.where(is_greedy, torch.ones_like(temperature), temperature).view(-1, 1, 1, 1)
    probs = torch.softmax(edge_logits / scale, dim=-1)
    drawn = (probs / noise[:, :, None, :]).argmax(dim=-1)
    choices = torch.where(is_greedy.view(-1, 1, 1), edge_logits.argmax(dim=-1), drawn)
    path = _follow(choices)
    previous = torch.cat((torch.zeros_like(path[:, :1]), path[:, :-1]), dim=1)
    top_k = edge_logits.shape[-1]
    rows = probs.gather(2, previous[:, :, None, None].expand(-1, -1, 1, top_k))[:, :, 0]
    one_hot = torch.zeros_like(rows).scatter_(2, path[:, :, None], 1.0)
    return path, torch.where(is_greedy.view(-1, 1, 1), one_hot, rows)
