# SPDX-License-Identifier: Apache-2.0
"""Writes what candidates scored into each request's row over the vocabulary.

    rows[req_states[n], n mod S, candidate_ids[n, k]] = scores[n, k]

for every row n of a real request; rows of a padded batch write nothing. The other
entries of a row of the vocabulary are neither read nor written: K stores a row.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_candidates_kernel(
    rows_ptr,
    candidate_ids_ptr,
    scores_ptr,
    req_states_ptr,
    rows_stride_0,
    rows_stride_1,
    candidate_ids_stride,
    scores_stride,
    num_slots,
    top_k,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    req_state = tl.load(req_states_ptr + row).to(tl.int64)
    ranks = tl.arange(0, BLOCK_K)
    mask = (ranks < top_k) & (req_state >= 0)
    token_ids = tl.load(candidate_ids_ptr + row * candidate_ids_stride + ranks, mask=mask, other=0)
    scores = tl.load(scores_ptr + row * scores_stride + ranks, mask=mask, other=0.0)
    row_ptr = rows_ptr + req_state * rows_stride_0 + (row % num_slots) * rows_stride_1
    tl.store(row_ptr + token_ids, scores, mask=mask)


def store_candidates(
    rows: torch.Tensor,  # [max_num_reqs, S, V] fp32; changed in place
    candidate_ids: torch.Tensor,  # [R * S, K] int64, distinct in each row
    scores: torch.Tensor,  # [R * S, K] fp32
    req_states: torch.Tensor,  # [R * S] int64; negative for padding
) -> None:
    """Writes K scores into the vocabulary row of each request and slot."""
    num_rows, top_k = candidate_ids.shape
    _store_candidates_kernel[(num_rows,)](
        rows,
        candidate_ids,
        scores,
        req_states,
        rows.stride(0),
        rows.stride(1),
        candidate_ids.stride(0),
        scores.stride(0),
        rows.shape[1],
        top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
    )
