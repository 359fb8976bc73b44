# SPDX-License-Identifier: Apache-2.0
"""Everything that a lattice's nodes are made of and that needs no other node, in one launch.

    candidate_ids, l = the best K of each slot, joined from parts (candidates.py)
    feature_rows[n, k] = SiLU(U LayerNorm(l, exp l, l - max l, k / (K_trained - 1), [k = 0]) + u)
    hidden_rows[n] = W_pass h[n] + b                 one row per slot, not one per candidate
    anchor_rows[r] = valid[r] (W_ctx a[r] + b)

The first two are a few microseconds of one program per slot; the products beside them
read 2 * D * H weights. The LayerNorm's weight and bias are folded into U and u.
"""

import torch
import triton
import triton.language as tl

from vllm_lilicorr.kernels.candidates import merge_row
from vllm_lilicorr.kernels.linear import linear_tile, num_tiles, tiles

LAYER_NORM_EPS = tl.constexpr(1e-5)  # nn.LayerNorm's, which the head was trained with


@triton.jit
def _store_feature_rows(
    feature_rows_ptr,
    feature_weight_ptr,
    feature_bias_ptr,
    log_probs,
    row,
    last_rank,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    ranks = tl.arange(0, TOP_K)
    probs = tl.exp(log_probs)
    below = log_probs - tl.max(log_probs, axis=0)
    place = ranks.to(tl.float32) / last_rank
    first = tl.where(ranks == 0, 1.0, 0.0)
    mean = (log_probs + probs + below + place + first) / 5
    log_probs, probs, below, place, first = log_probs - mean, probs - mean, below - mean, place - mean, first - mean
    variance = (log_probs * log_probs + probs * probs + below * below + place * place + first * first) / 5
    scale = tl.rsqrt(variance + LAYER_NORM_EPS)
    for start in range(0, WIDTH, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        mask = cols < WIDTH
        weight_ptrs = feature_weight_ptr + cols
        out = tl.load(feature_bias_ptr + cols, mask=mask, other=0.0)[None, :]
        out += (log_probs * scale)[:, None] * tl.load(weight_ptrs, mask=mask, other=0.0)[None, :]
        out += (probs * scale)[:, None] * tl.load(weight_ptrs + WIDTH, mask=mask, other=0.0)[None, :]
        out += (below * scale)[:, None] * tl.load(weight_ptrs + 2 * WIDTH, mask=mask, other=0.0)[None, :]
        out += (place * scale)[:, None] * tl.load(weight_ptrs + 3 * WIDTH, mask=mask, other=0.0)[None, :]
        out += (first * scale)[:, None] * tl.load(weight_ptrs + 4 * WIDTH, mask=mask, other=0.0)[None, :]
        out = out / (1.0 + tl.exp(-out))
        places = (row * TOP_K + ranks)[:, None] * WIDTH + cols[None, :]
        tl.store(feature_rows_ptr + places, out.to(feature_rows_ptr.dtype.element_ty), mask=mask[None, :])


@triton.jit
def _project_kernel(
    candidate_ids_ptr,
    log_probs_ptr,
    feature_rows_ptr,
    hidden_rows_ptr,
    anchor_rows_ptr,
    keys_ptr,
    partitions_ptr,
    feature_weight_ptr,
    feature_bias_ptr,
    hidden_ptr,
    hidden_weight_ptr,
    hidden_bias_ptr,
    anchor_ptr,
    anchor_weight_ptr,
    anchor_bias_ptr,
    anchor_valid_ptr,
    hidden_stride,
    anchor_stride,
    num_rows,
    num_reqs,
    num_parts,
    num_hidden_tiles,
    impossible,
    last_rank,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    program = tl.program_id(0)
    if program < num_rows:
        row = program.to(tl.int64)
        ranks = tl.arange(0, TOP_K)
        ids, log_probs = merge_row(keys_ptr, partitions_ptr, row, num_parts, impossible, BLOCK_PARTS, TOP_K)
        tl.store(candidate_ids_ptr + row * TOP_K + ranks, ids)
        tl.store(log_probs_ptr + row * TOP_K + ranks, log_probs)
        _store_feature_rows(
            feature_rows_ptr, feature_weight_ptr, feature_bias_ptr, log_probs, row, last_rank, WIDTH, TOP_K, BLOCK_H
        )
    else:
        # One product of chosen operands, not two in branches: those would take twice the shared memory.
        is_anchor = program >= num_rows + num_hidden_tiles
        linear_tile(
            tl.where(is_anchor, anchor_rows_ptr, hidden_rows_ptr),
            tl.where(is_anchor, anchor_ptr, hidden_ptr),
            hidden_ptr,
            tl.where(is_anchor, anchor_weight_ptr, hidden_weight_ptr),
            tl.where(is_anchor, anchor_bias_ptr, hidden_bias_ptr),
            hidden_ptr,
            anchor_valid_ptr,
            program - num_rows - tl.where(is_anchor, num_hidden_tiles, 0),
            tl.where(is_anchor, anchor_stride, hidden_stride),
            tl.where(is_anchor, num_reqs, num_rows),
            WIDTH,
            tl.where(is_anchor, num_reqs, 0),
            0.0,
            HIDDEN,
            False,
            False,
            False,
            True,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )


@torch.library.custom_op("lilicorr::project", mutates_args=())
def project(
    keys: torch.Tensor,
    partitions: torch.Tensor,
    hidden_states: torch.Tensor,
    anchor_hidden: torch.Tensor,
    anchor_valid: torch.Tensor,
    feature_weight: torch.Tensor,
    feature_bias: torch.Tensor,
    hidden_weight: torch.Tensor,
    hidden_bias: torch.Tensor,
    anchor_weight: torch.Tensor,
    anchor_bias: torch.Tensor,
    trained_top_k: int,
    impossible: float,
) -> list[torch.Tensor]:
    """Candidates from their parts, feature rows, and the rows of drafter states and anchors.

    Args:
        keys: [N, parts, K] int64 contiguous, of `partial_candidates`; N = R * S.
        partitions: [N, parts] fp32 contiguous.
        hidden_states: [N, D], rows contiguous, in the weights' dtype.
        anchor_hidden: [R, D], rows contiguous.
        anchor_valid: [R] bool contiguous.
        feature_weight, feature_bias: [5, H] and [H] fp32 contiguous, LayerNorm folded in.
        hidden_weight, hidden_bias: [H, D] contiguous and [H]; bf16, fp16 or fp32.
        anchor_weight, anchor_bias: likewise.
        trained_top_k: what the head was trained with; K may be smaller.
        impossible: finite log-probability of a candidate that has none.

    Returns:
        candidate ids [N, K] int64, best first; log-probabilities [N, K] fp32 over the whole
        vocabulary; feature rows [N * K, H], hidden rows [N, H] and anchor rows [R, H] in the weights' dtype.
    """
    num_rows, num_parts, top_k = keys.shape
    width, hidden_size = hidden_weight.shape
    num_reqs = anchor_hidden.shape[0]
    outputs = _outputs(keys, hidden_states, anchor_hidden, hidden_weight)
    if num_rows:
        block = tiles(num_rows, hidden_weight.dtype)
        num_hidden_tiles = num_tiles(num_rows, width, block)
        _project_kernel[(num_rows + num_hidden_tiles + num_tiles(num_reqs, width, block),)](
            *outputs,
            keys,
            partitions,
            feature_weight,
            feature_bias,
            hidden_states,
            hidden_weight,
            hidden_bias,
            anchor_hidden,
            anchor_weight,
            anchor_bias,
            anchor_valid,
            hidden_states.stride(0),
            anchor_hidden.stride(0),
            num_rows,
            num_reqs,
            num_parts,
            num_hidden_tiles,
            impossible,
            float(max(trained_top_k - 1, 1)),
            HIDDEN=hidden_size,
            WIDTH=width,
            TOP_K=top_k,
            BLOCK_PARTS=triton.next_power_of_2(num_parts),
            BLOCK_H=128,
            **block,
        )
    return outputs


@project.register_fake
def _(
    keys,
    partitions,
    hidden_states,
    anchor_hidden,
    anchor_valid,
    feature_weight,
    feature_bias,
    hidden_weight,
    hidden_bias,
    anchor_weight,
    anchor_bias,
    trained_top_k,
    impossible,
):
    return _outputs(keys, hidden_states, anchor_hidden, hidden_weight)


def _outputs(
    keys: torch.Tensor, hidden_states: torch.Tensor, anchor_hidden: torch.Tensor, hidden_weight: torch.Tensor
) -> list[torch.Tensor]:
    num_rows, _, top_k = keys.shape
    width = hidden_weight.shape[0]
    return [
        keys.new_empty((num_rows, top_k)),
        keys.new_empty((num_rows, top_k), dtype=torch.float32),
        hidden_states.new_empty((num_rows * top_k, width)),
        hidden_states.new_empty((num_rows, width)),
        hidden_states.new_empty((anchor_hidden.shape[0], width)),
    ]
