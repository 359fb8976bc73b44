# SPDX-License-Identifier: Apache-2.0
"""A deterministic path through each request's lattice, in one launch.

    greedy: j_s = argmax_j z_s[j_{s-1}, j]
    expected length: E_s(i) = max_j p_s(j | i) (1 + E_{s+1}(j)),  p = softmax of a row of z

From the last slot back, every rank's best choice is found and kept in registers; then the
path is followed from the anchor. Ties go to the lower rank. One program per request reads
S * K * K scores and writes S tokens.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def walk_request(
    draft_tokens_ptr,
    edge_logits_ptr,
    candidate_ids_ptr,
    request,
    draft_tokens_stride,
    num_slots,
    top_k,
    EXPECTED_LENGTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes the S draft tokens of one request."""
    slots = tl.arange(0, BLOCK_S)
    ranks = tl.arange(0, BLOCK_K)
    edges = ranks[:, None] * top_k + ranks[None, :]
    is_edge = (ranks[:, None] < top_k) & (ranks[None, :] < top_k)
    choices = tl.zeros((BLOCK_S, BLOCK_K), tl.int32)
    beyond = tl.zeros((BLOCK_K,), tl.float32)
    for back in range(num_slots):
        slot = num_slots - 1 - back
        slot_ptr = edge_logits_ptr + (request * num_slots + slot) * top_k * top_k
        scores = tl.load(slot_ptr + edges, mask=is_edge, other=float("-inf"))
        if EXPECTED_LENGTH:
            best = tl.max(scores, axis=1)
            # Rows beyond K hold minus infinity alone.
            weights = tl.exp(scores - tl.where(best == float("-inf"), 0.0, best)[:, None])
            mass = tl.maximum(tl.sum(weights, axis=1), 1.0)
            scores = weights / mass[:, None] * (1.0 + beyond)[None, :]
            beyond = tl.max(scores, axis=1)
        chosen = tl.argmax(scores, axis=1, tie_break_left=True)
        choices = tl.where((slots == slot)[:, None], chosen[None, :], choices)
    path = tl.zeros((BLOCK_S,), tl.int32)
    rank = tl.zeros((), tl.int32)
    for slot in range(num_slots):
        here = (slots == slot)[:, None] & (ranks == rank)[None, :]
        rank = tl.sum(tl.sum(tl.where(here, choices, 0), axis=1), axis=0)
        path = tl.where(slots == slot, rank, path)
    id_ptrs = candidate_ids_ptr + (request * num_slots + slots) * top_k + path
    tokens = tl.load(id_ptrs, mask=slots < num_slots, other=0)
    tl.store(draft_tokens_ptr + request * draft_tokens_stride + slots, tokens, mask=slots < num_slots)


@triton.jit
def _walk_kernel(
    draft_tokens_ptr,
    edge_logits_ptr,
    candidate_ids_ptr,
    draft_tokens_stride,
    num_slots,
    top_k,
    EXPECTED_LENGTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    walk_request(
        draft_tokens_ptr,
        edge_logits_ptr,
        candidate_ids_ptr,
        tl.program_id(0).to(tl.int64),
        draft_tokens_stride,
        num_slots,
        top_k,
        EXPECTED_LENGTH,
        BLOCK_S,
        BLOCK_K,
    )


@torch.library.custom_op("lilicorr::walk", mutates_args=("draft_tokens",))
def walk(
    draft_tokens: torch.Tensor, edge_logits: torch.Tensor, candidate_ids: torch.Tensor, expected_length: bool
) -> None:
    """Walks each request's lattice.

    Args:
        draft_tokens: [at least R, at least S] int64, rows contiguous; its first R rows are written.
        edge_logits: [R, S, K, K] fp32 contiguous; every row has a number above minus infinity and no NaN.
        candidate_ids: [R, S, K] int64 contiguous.
        expected_length: whether to take the path of the largest expected length, or the greedy one.
    """
    num_reqs, num_slots, top_k, _ = edge_logits.shape
    if num_reqs:
        _walk_kernel[(num_reqs,)](
            draft_tokens,
            edge_logits,
            candidate_ids,
            draft_tokens.stride(0),
            num_slots,
            top_k,
            EXPECTED_LENGTH=expected_length,
            BLOCK_S=triton.next_power_of_2(num_slots),
            BLOCK_K=triton.next_power_of_2(top_k),
            num_warps=1,
        )


@walk.register_fake
def _(draft_tokens, edge_logits, candidate_ids, expected_length):
    return None
