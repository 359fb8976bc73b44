# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch operations on a lattice: what the CPU runs, and what fast kernels are held against."""

import torch


def partial_candidates(
    logits: torch.Tensor,  # [N, V] bf16, fp16 or fp32; its padding columns are overwritten
    top_k: int,
    num_padding: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best entries of one shard of the vocabulary, ready to merge with other shards.

    Returns:
        values [N, K] fp32, best first; ids [N, K] int64 within the shard; the
        log of the sum of exponentials over the shard, [N, 1] fp32. The last
        `num_padding` columns count for nothing.
    """
    if num_padding:
        logits[..., -num_padding:] = -torch.inf
    values, ids = logits.topk(top_k, dim=-1)
    return values.float(), ids, torch.logsumexp(logits.float(), dim=-1, keepdim=True)


def merge_candidates(
    values: torch.Tensor,  # [N, shards * K] fp32
    ids: torch.Tensor,  # [N, shards * K] int64, in the whole vocabulary
    partitions: torch.Tensor,  # [N, shards] fp32
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [N, K] int64, best first, and log-probabilities [N, K] fp32 over all shards."""
    values, chosen = values.topk(top_k, dim=-1)
    return ids.gather(-1, chosen), values - torch.logsumexp(partitions, dim=-1, keepdim=True)


def store_candidates(
    rows: torch.Tensor,  # [max_num_reqs, S, V] fp32; changed in place
    candidate_ids: torch.Tensor,  # [R * S, K] int64, distinct in each row
    scores: torch.Tensor,  # [R * S, K] fp32
    req_states: torch.Tensor,  # [R * S] int64; negative for padding
) -> None:
    """Writes K scores into the vocabulary row of each request and slot."""
    for index, req_state in enumerate(req_states.tolist()):
        if req_state >= 0:
            rows[req_state, index % rows.shape[1]].scatter_(0, candidate_ids[index], scores[index])
