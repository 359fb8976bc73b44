# SPDX-License-Identifier: Apache-2.0
"""Scores of all edges of a lattice, and the walk over them, in one launch.

    z[r, s, i, j] = logit_scale * unit(out[r, s - 1, i]) . unit(in[r, s, j])
    z[r, 0, i, j] = logit_scale * unit(start[r]) . unit(in[r, 0, j])         for every i
    unit(v) = v / max(|v|, vector_eps)

Dot products are taken of the vectors as they are and divided by both lengths in fp32:
no normalised vector is written. One program per request and slot. The last program of a
request to finish walks it: it alone sees that all S slots were counted, after a barrier
that makes every slot's scores visible to it, and it sets the count back to 0. So counts
are 0 between launches; two launches at a time need counts of their own.

A candidate that the drafter calls impossible is scored minus infinity, except at rank 0,
so that every row has a choice; a score that is not a number counts as 0.
"""

import torch
import triton
import triton.language as tl

from vllm_lilicorr.kernels.walk import walk_request


@triton.jit
def _edges_kernel(
    edge_logits_ptr,
    draft_tokens_ptr,
    arrived_ptr,
    vectors_ptr,
    start_ptr,
    candidate_ids_ptr,
    log_probs_ptr,
    start_stride,
    draft_tokens_stride,
    num_slots,
    top_k,
    logit_scale,
    vector_eps,
    impossible,
    FACTORS: tl.constexpr,
    EXPECTED_LENGTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    ranks = tl.arange(0, 16)  # the fewest rows of a matrix product
    dims = tl.arange(0, BLOCK_F)
    incoming_rows = (request * num_slots + slot) * top_k + ranks
    outgoing_rows = incoming_rows - top_k
    is_rank = (ranks < top_k)[:, None]
    dots = tl.zeros((16, 16), tl.float32)
    outgoing_squares = tl.zeros((16,), tl.float32)
    incoming_squares = tl.zeros((16,), tl.float32)
    for first in range(0, FACTORS, BLOCK_F):
        f = first + dims
        mask = is_rank & (f < FACTORS)[None, :]
        incoming = tl.load(
            vectors_ptr + incoming_rows[:, None] * (2 * FACTORS) + FACTORS + f[None, :], mask=mask, other=0.0
        )
        # One of the two is 0: slot 0 follows the anchor, every other slot its predecessor.
        outgoing = tl.load(
            vectors_ptr + outgoing_rows[:, None] * (2 * FACTORS) + f[None, :], mask=mask & (slot > 0), other=0.0
        )
        start = tl.load(start_ptr + request * start_stride + f, mask=(f < FACTORS) & (slot == 0), other=0.0)
        outgoing = (outgoing.to(tl.float32) + start.to(tl.float32)[None, :]).to(incoming.dtype)
        outgoing_squares += tl.sum(outgoing.to(tl.float32) * outgoing.to(tl.float32), axis=1)
        incoming_squares += tl.sum(incoming.to(tl.float32) * incoming.to(tl.float32), axis=1)
        dots = tl.dot(outgoing, tl.trans(incoming), dots, input_precision="ieee")
    outgoing_length = tl.maximum(tl.sqrt(outgoing_squares), vector_eps)
    incoming_length = tl.maximum(tl.sqrt(incoming_squares), vector_eps)
    scores = dots / outgoing_length[:, None] / incoming_length[None, :] * logit_scale
    scores = tl.where(tl.abs(scores) < float("inf"), scores, 0.0)  # false for what is not a number too
    log_probs = tl.load(log_probs_ptr + incoming_rows, mask=ranks < top_k, other=0.0)
    is_impossible = (log_probs <= impossible) & (ranks > 0)
    scores = tl.where(is_impossible[None, :], float("-inf"), scores)
    edge_ptrs = edge_logits_ptr + ((request * num_slots + slot) * top_k + ranks[:, None]) * top_k + ranks[None, :]
    tl.store(edge_ptrs, scores, mask=is_rank & (ranks < top_k)[None, :])
    # All threads' scores are written before one thread counts the slot.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + request, 1, sem="acq_rel", scope="gpu")
    if arrived == num_slots - 1:
        tl.store(arrived_ptr + request, 0)
        walk_request(
            draft_tokens_ptr,
            edge_logits_ptr,
            candidate_ids_ptr,
            request,
            draft_tokens_stride,
            num_slots,
            top_k,
            EXPECTED_LENGTH,
            BLOCK_S,
            BLOCK_K,
        )


@torch.library.custom_op("lilicorr::score_and_walk", mutates_args=("draft_tokens", "arrived"))
def score_and_walk(
    draft_tokens: torch.Tensor,
    arrived: torch.Tensor,
    vectors: torch.Tensor,
    start: torch.Tensor,
    candidate_ids: torch.Tensor,
    log_probs: torch.Tensor,
    num_slots: int,
    logit_scale: float,
    vector_eps: float,
    impossible: float,
    expected_length: bool,
) -> torch.Tensor:
    """Edge logits of all requests; their draft tokens are written.

    Args:
        draft_tokens: [at least R, at least S] int64, rows contiguous; its first R rows are written.
        arrived: [at least R] int32, zeros, and zeros again afterwards.
        vectors: [R * S * K, 2 * F] contiguous; bf16, fp16 or fp32: outgoing, then incoming vectors.
        start: [R, F], rows contiguous: the anchors' outgoing vectors, in the same dtype.
        candidate_ids: [R * S, K] int64 contiguous.
        log_probs: [R * S, K] fp32 contiguous.
        num_slots: S.
        logit_scale, vector_eps: the head's.
        impossible: log-probability of a candidate that no walk may take.
        expected_length: which walk, see walk.py.

    Returns:
        [R, S, K, K] fp32: entry [r, s, i, j] scores candidate j of slot s after candidate i of slot s - 1.
    """
    edge_logits, top_k = _edge_logits(candidate_ids, num_slots), candidate_ids.shape[-1]
    if edge_logits.numel():
        num_factors = start.shape[1]
        _edges_kernel[edge_logits.shape[:2]](
            edge_logits,
            draft_tokens,
            arrived,
            vectors,
            start,
            candidate_ids,
            log_probs,
            start.stride(0),
            draft_tokens.stride(0),
            num_slots,
            top_k,
            logit_scale,
            vector_eps,
            impossible,
            FACTORS=num_factors,
            EXPECTED_LENGTH=expected_length,
            BLOCK_S=triton.next_power_of_2(num_slots),
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK_F=min(256, max(16, triton.next_power_of_2(num_factors))),
            num_warps=4,
            num_stages=3,
        )
    return edge_logits


@score_and_walk.register_fake
def _(
    draft_tokens,
    arrived,
    vectors,
    start,
    candidate_ids,
    log_probs,
    num_slots,
    logit_scale,
    vector_eps,
    impossible,
    expected_length,
):
    return _edge_logits(candidate_ids, num_slots)


def _edge_logits(candidate_ids: torch.Tensor, num_slots: int) -> torch.Tensor:
    num_rows, top_k = candidate_ids.shape
    return candidate_ids.new_empty((num_rows // num_slots, num_slots, top_k, top_k), dtype=torch.float32)
