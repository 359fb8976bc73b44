# SPDX-License-Identifier: Apache-2.0
"""A product with what surrounds it in a transformer layer, in one launch.

    out = residual + act(norm(x) W^T + b)        norm: RMSNorm or none; act: SiLU or none

The rows of a lattice are few (56 to 120 per request) and the weights large: a launch is
one reading of W, cut into narrow column blocks so that a single request fills the chip.
Each program reads all of its rows of x anyway, so it sums their squares on the way and
scales its product by them at the end: the normalised rows are never written, and

    RMSNorm(x) W^T = rsqrt(mean(x^2) + eps) * ((x * norm) W^T).

Products accumulate in fp32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def product(
    x_ptr,
    x_stride,
    norm_ptr,
    weight_ptr,
    rows,
    num_rows,
    cols,
    num_cols,
    eps,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """norm(x)[rows] W[cols]^T, [BLOCK_M, BLOCK_N] fp32; `rows` int64, `cols` int32."""
    inner = tl.arange(0, BLOCK_K)
    row_mask = rows[:, None] < num_rows
    col_mask = cols[None, :] < num_cols
    x_ptrs = x_ptr + rows[:, None] * x_stride
    weight_ptrs = weight_ptr + cols[None, :] * WIDTH
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        k = start + inner
        x = tl.load(x_ptrs + k[None, :], mask=row_mask & (k[None, :] < WIDTH), other=0.0)
        weight = tl.load(weight_ptrs + k[:, None], mask=col_mask & (k[:, None] < WIDTH), other=0.0)
        if NORM:
            norm = tl.load(norm_ptr + k, mask=k < WIDTH, other=0.0).to(tl.float32)
            x = x.to(tl.float32)
            squares += tl.sum(x * x, axis=1)
            x = (x * norm[None, :]).to(weight.dtype)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if NORM:
        total *= tl.rsqrt(squares / WIDTH + eps)[:, None]
    return total


@triton.jit
def linear_tile(
    out_ptr,
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    is_valid_ptr,
    tile,
    x_stride,
    num_rows,
    num_cols,
    num_maskable,
    eps,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of out = residual + act(norm(x) W^T + b).

    Where MASKED, those of the first `num_maskable` rows that are not valid become 0.
    """
    # Row blocks of the same columns run side by side and share their weights in L2.
    row_blocks = tl.cdiv(num_rows, BLOCK_M)
    rows = (tile % row_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tile // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    out = product(
        x_ptr,
        x_stride,
        norm_ptr,
        weight_ptr,
        rows,
        num_rows,
        cols,
        num_cols,
        eps,
        WIDTH,
        NORM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    out += tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    if MASKED:
        is_valid = tl.load(is_valid_ptr + rows, mask=rows < num_maskable, other=1)
        out = tl.where((is_valid != 0)[:, None], out, 0.0)
    mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
    places = rows[:, None] * num_cols + cols[None, :]
    if RESIDUAL:
        out += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _linear_kernel(
    out_ptr,
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    x_stride,
    num_rows,
    num_cols,
    eps,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    linear_tile(
        out_ptr,
        x_ptr,
        norm_ptr,
        weight_ptr,
        bias_ptr,
        residual_ptr,
        x_ptr,
        tl.program_id(0),
        x_stride,
        num_rows,
        num_cols,
        0,
        eps,
        WIDTH,
        NORM,
        SILU,
        RESIDUAL,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )


def tiles(num_rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes and scheduling for a product of `num_rows` rows.

    Narrow columns while one or two row blocks hold all rows: 1024 columns are 64 programs.
    All fit into the 99 KiB of shared memory of sm_120 and sm_121.
    """
    if num_rows <= 16:
        block = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4}
    elif num_rows <= 128:
        block = {"BLOCK_M": 64, "BLOCK_N": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    else:
        block = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    return block | {"BLOCK_K": block["BLOCK_K"] * 2 // dtype.itemsize}


def num_tiles(num_rows: int, num_cols: int, block: dict[str, int]) -> int:
    """Programs that a product needs."""
    return triton.cdiv(num_rows, block["BLOCK_M"]) * triton.cdiv(num_cols, block["BLOCK_N"])


@torch.library.custom_op("lilicorr::linear", mutates_args=())
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    silu: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """residual + act(norm(x) weight^T + bias).

    Args:
        x: [M, I], rows contiguous, in the weight's dtype.
        weight: [O, I] contiguous; bf16, fp16 or fp32.
        bias: [O].
        norm: [I], the weight of an RMSNorm over x's rows; None for no norm.
        eps: of the norm.
        silu: whether the activation is SiLU.
        residual: [M, O] contiguous, or None.

    Returns:
        [M, O] in the weight's dtype.
    """
    num_rows, width = x.shape
    num_cols = weight.shape[0]
    out = x.new_empty((num_rows, num_cols))
    if num_rows:
        block = tiles(num_rows, weight.dtype)
        _linear_kernel[(num_tiles(num_rows, num_cols, block),)](
            out,
            x,
            weight if norm is None else norm,
            weight,
            bias,
            x if residual is None else residual,
            x.stride(0),
            num_rows,
            num_cols,
            eps,
            WIDTH=width,
            NORM=norm is not None,
            SILU=silu,
            RESIDUAL=residual is not None,
            **block,
        )
    return out


@linear.register_fake
def _(x, weight, bias, norm, eps, silu, residual):
    return x.new_empty((x.shape[0], weight.shape[0]))
