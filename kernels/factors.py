# SPDX-License-Identifier: Apache-2.0
"""What a node says about the edges at it, given the anchor, in one launch.

    phi = SiLU(W_self y + W_cross (y * alpha) + anchor_part)
    y = RMSNorm(x),  alpha = RMSNorm(c),  anchor_part = W_anchor alpha + b, once per request

Both norms are scales of a row, taken out of the products: with u = x * norm and
v = c * anchor_norm, y = u / rms(x) and alpha = v / rms(c), so that

    W_self y + W_cross (y * alpha) = (W_self u + W_cross (u * v) / rms(c)) / rms(x).

Neither y, alpha, y * alpha nor their concatenation is written.
"""

import torch
import triton
import triton.language as tl

from vllm_lilicorr.kernels.linear import num_tiles, tiles


@triton.jit
def _factors_kernel(
    factors_ptr,
    nodes_ptr,
    norm_ptr,
    anchor_rows_ptr,
    anchor_norm_ptr,
    anchor_part_ptr,
    weight_ptr,
    anchor_part_stride,
    num_nodes,
    nodes_per_req,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_blocks = tl.cdiv(num_nodes, BLOCK_M)
    rows = (tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    requests = rows // nodes_per_req
    row_mask = rows[:, None] < num_nodes
    col_mask = cols[None, :] < WIDTH
    own = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    cross = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    anchor_squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        k = start + inner
        k_mask = k < WIDTH
        mask = row_mask & k_mask[None, :]
        x = tl.load(nodes_ptr + rows[:, None] * WIDTH + k[None, :], mask=mask, other=0.0).to(tl.float32)
        anchor = tl.load(anchor_rows_ptr + requests[:, None] * WIDTH + k[None, :], mask=mask, other=0.0).to(tl.float32)
        weight_ptrs = weight_ptr + cols[None, :] * (3 * WIDTH) + k[:, None]
        weight_mask = col_mask & k_mask[:, None]
        own_weight = tl.load(weight_ptrs, mask=weight_mask, other=0.0)
        cross_weight = tl.load(weight_ptrs + 2 * WIDTH, mask=weight_mask, other=0.0)
        squares += tl.sum(x * x, axis=1)
        anchor_squares += tl.sum(anchor * anchor, axis=1)
        x *= tl.load(norm_ptr + k, mask=k_mask, other=0.0).to(tl.float32)[None, :]
        anchor *= tl.load(anchor_norm_ptr + k, mask=k_mask, other=0.0).to(tl.float32)[None, :]
        own = tl.dot(x.to(own_weight.dtype), own_weight, own, input_precision="ieee")
        cross = tl.dot((x * anchor).to(own_weight.dtype), cross_weight, cross, input_precision="ieee")
    out = own + cross * tl.rsqrt(anchor_squares / WIDTH + eps)[:, None]
    out *= tl.rsqrt(squares / WIDTH + eps)[:, None]
    mask = row_mask & col_mask
    part_ptrs = anchor_part_ptr + requests[:, None] * anchor_part_stride + cols[None, :]
    out += tl.load(part_ptrs, mask=mask, other=0.0).to(tl.float32)
    out = out / (1.0 + tl.exp(-out))
    tl.store(factors_ptr + rows[:, None] * WIDTH + cols[None, :], out.to(factors_ptr.dtype.element_ty), mask=mask)


def factor_tiles(num_rows: int, dtype: torch.dtype) -> dict[str, int]:
    """As for other products, with smaller tiles: there are two products, and four tiles are read at a time."""
    block = tiles(num_rows, dtype)
    sizes = {"BLOCK_N": min(block["BLOCK_N"], 32), "BLOCK_K": min(block["BLOCK_K"], 128 // dtype.itemsize)}
    return block | sizes | {"num_stages": min(block["num_stages"], 3)}


@torch.library.custom_op("lilicorr::factors", mutates_args=())
def factors(
    nodes: torch.Tensor,
    norm: torch.Tensor,
    anchor_rows: torch.Tensor,
    anchor_norm: torch.Tensor,
    anchor_part: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The factors phi of every node.

    Args:
        nodes: [R * S * K, H] contiguous, after the last layer; bf16 or fp32.
        norm: [H], of output_norm.
        anchor_rows: [R, H] contiguous, before anchor_norm; 0 without an anchor.
        anchor_norm: [H].
        anchor_part: [R, H], rows contiguous: W_anchor alpha + b.
        weight: [H, 3 * H] contiguous: factor_input_proj, whose middle block is not read.
        eps: of both norms.

    Returns:
        [R * S * K, H] in the nodes' dtype.
    """
    num_nodes, width = nodes.shape
    out = torch.empty_like(nodes)
    if num_nodes:
        block = factor_tiles(num_nodes, weight.dtype)
        _factors_kernel[(num_tiles(num_nodes, width, block),)](
            out,
            nodes,
            norm,
            anchor_rows,
            anchor_norm,
            anchor_part,
            weight,
            anchor_part.stride(0),
            num_nodes,
            num_nodes // anchor_rows.shape[0],
            eps,
            WIDTH=width,
            **block,
        )
    return out


@factors.register_fake
def _(nodes, norm, anchor_rows, anchor_norm, anchor_part, weight, eps):
    return torch.empty_like(nodes)
