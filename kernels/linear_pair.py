# SPDX-License-Identifier: Apache-2.0
"""Two products of normalised rows that do not wait for each other, in one launch.

    out = norm(x) W^T + b            the first layer's queries, keys and values, of every node
    anchor_out = norm(c) V^T + d     what factors and start scores need of the anchor, once per request

The second has one row per request and would leave the chip empty alone.
"""

import torch
import triton
import triton.language as tl

from vllm_lilicorr.kernels.linear import linear_tile, num_tiles, tiles


@triton.jit
def _linear_pair_kernel(
    out_ptr,
    anchor_out_ptr,
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    anchor_ptr,
    anchor_norm_ptr,
    anchor_weight_ptr,
    anchor_bias_ptr,
    num_rows,
    num_cols,
    num_anchors,
    num_anchor_cols,
    num_node_tiles,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    # One product of chosen operands, not two in branches: those would take twice the shared memory.
    is_anchor = tile >= num_node_tiles
    linear_tile(
        tl.where(is_anchor, anchor_out_ptr, out_ptr),
        tl.where(is_anchor, anchor_ptr, x_ptr),
        tl.where(is_anchor, anchor_norm_ptr, norm_ptr),
        tl.where(is_anchor, anchor_weight_ptr, weight_ptr),
        tl.where(is_anchor, anchor_bias_ptr, bias_ptr),
        x_ptr,
        x_ptr,
        tl.where(is_anchor, tile - num_node_tiles, tile),
        WIDTH,
        tl.where(is_anchor, num_anchors, num_rows),
        tl.where(is_anchor, num_anchor_cols, num_cols),
        0,
        eps,
        WIDTH,
        True,
        False,
        False,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )


@torch.library.custom_op("lilicorr::linear_pair", mutates_args=())
def linear_pair(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    anchor: torch.Tensor,
    anchor_weight: torch.Tensor,
    anchor_bias: torch.Tensor,
    anchor_norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) weight^T + bias, and the same of the anchors with their own weights.

    Args:
        x: [M, H] contiguous, in the weights' dtype: bf16, fp16 or fp32.
        weight, bias, norm: [O, H] contiguous, [O], [H].
        anchor: [R, H] contiguous.
        anchor_weight, anchor_bias, anchor_norm: [P, H] contiguous, [P], [H].
        eps: of both norms.

    Returns:
        [M, O] and [R, P] in the weights' dtype.
    """
    num_rows, width = x.shape
    num_cols, num_anchors, num_anchor_cols = weight.shape[0], anchor.shape[0], anchor_weight.shape[0]
    out = x.new_empty((num_rows, num_cols))
    anchor_out = x.new_empty((num_anchors, num_anchor_cols))
    if num_rows:
        block = tiles(num_rows, weight.dtype)
        num_node_tiles = num_tiles(num_rows, num_cols, block)
        _linear_pair_kernel[(num_node_tiles + num_tiles(num_anchors, num_anchor_cols, block),)](
            out,
            anchor_out,
            x,
            norm,
            weight,
            bias,
            anchor,
            anchor_norm,
            anchor_weight,
            anchor_bias,
            num_rows,
            num_cols,
            num_anchors,
            num_anchor_cols,
            num_node_tiles,
            eps,
            WIDTH=width,
            **block,
        )
    return out, anchor_out


@linear_pair.register_fake
def _(x, weight, bias, norm, anchor, anchor_weight, anchor_bias, anchor_norm, eps):
    return x.new_empty((x.shape[0], weight.shape[0])), x.new_empty((anchor.shape[0], anchor_weight.shape[0]))
