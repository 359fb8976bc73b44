# SPDX-License-Identifier: Apache-2.0
"""FP8 weights of a Linear: E4M3 numbers with one scale per tensor or one per row.

Format, as NVIDIA Model Optimizer 0.47 exports it and vLLM reads it (the golden bytes in tests/checkpoint/golden were
made by Model Optimizer):

    weight        F8_E4M3  [N, K]
    weight_scale  F32      []      amax(W) / 448: quant_algo "FP8"
                           [N]     amax of each row / 448: quant_algo "FP8_PER_CHANNEL_PER_TOKEN"
    input_scale   F32      []      with quant_algo "FP8", where activations were calibrated

A weight is weight * weight_scale.
"""

from typing import NamedTuple

import torch

from vllm_lilicorr.checkpoint.nvfp4 import E4M3_MAX, row_blocks

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class EncodedFp8(NamedTuple):
    """The two tensors of an FP8 weight."""

    weight: torch.Tensor  # [N, K] float8_e4m3fn
    weight_scale: torch.Tensor  # [] or [N] float32


def tensor_scale(*weights: torch.Tensor) -> torch.Tensor:
    """weight_scale for weights that share one: the largest magnitude of all of them, over 448.

    Args:
        weights: [N, K] each, float32, bfloat16 or float16.

    Returns:
        [] float32; 1 if every weight is zero.

    Raises:
        ValueError: a weight holds NaN or infinity.
    """
    return row_scales(torch.stack([_row_amax(weight).amax() for weight in weights])[None])[0]


def row_scales(
    weight: torch.Tensor,  # [N, K] float32, bfloat16 or float16
) -> torch.Tensor:
    """weight_scale [N] float32: the largest magnitude of each row over 448; 1 for a row of zeros.

    Raises:
        ValueError: the weight holds NaN or infinity.
    """
    amax = _row_amax(weight)
    if not torch.isfinite(amax).all():
        raise ValueError("The weight holds NaN or infinity, and FP8 cannot scale either. Export the checkpoint again.")
    return torch.where(amax > 0, amax / E4M3_MAX, torch.ones(()))


def encode(
    weight: torch.Tensor,  # [N, K] float32, bfloat16 or float16
    weight_scale: torch.Tensor | None = None,  # [] or [N] float32
) -> EncodedFp8:
    """Encodes a weight as Model Optimizer 0.47 does on a CPU, byte for byte.

    With one scale the quotient is taken in the weight's own dtype, so that a bfloat16 weight is rounded twice; with
    one per row, in float32. Then it is rounded to the nearest E4M3 number, halfway to the even one, and saturates
    at 448.

    Args:
        weight_scale: by default tensor_scale(weight); row_scales(weight) for one per row.

    Raises:
        ValueError: not a matrix of floats, NaN or infinity in it, or a scale is not positive and finite.
    """
    if weight.ndim != 2 or weight.numel() == 0 or weight.dtype not in _FLOATS:
        raise ValueError(
            f"weight is {weight.dtype} of shape {list(weight.shape)}; FP8 encodes a matrix [N, K] of float32, "
            "bfloat16 or float16. Leave other tensors as they are."
        )
    own_scale = tensor_scale(weight)
    scale = own_scale if weight_scale is None else weight_scale.detach().to("cpu", torch.float32)
    if tuple(scale.shape) not in ((), (weight.shape[0],)) or not (torch.isfinite(scale) & (scale > 0)).all():
        raise ValueError(
            f"weight_scale of shape {list(scale.shape)}; it must be one number or one per row ({weight.shape[0]}), "
            "positive and finite. Use tensor_scale() or row_scales()."
        )
    encoded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for rows in row_blocks(*weight.shape):
        quotient = weight[rows] / (scale[rows, None] if scale.ndim else scale)
        encoded[rows] = quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return EncodedFp8(encoded, scale.clone())


def decode(
    weight: torch.Tensor,  # [N, K] float8_e4m3fn
    weight_scale: torch.Tensor,  # [] or [1]; or [N] or [N, 1], one per row: float32 or bfloat16
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight that the numbers and scales stand for, computed in float32 and then cast: [N, K] of `dtype`.

    Raises:
        ValueError: the weight is not FP8, or the scales are neither one nor one per row.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2:
        raise ValueError(
            f"weight is {weight.dtype} of shape {list(weight.shape)}; FP8 needs a matrix of float8_e4m3fn. "
            "Export the checkpoint again."
        )
    if weight_scale.numel() not in (1, weight.shape[0]):
        raise ValueError(
            f"weight_scale has {weight_scale.numel()} elements for {weight.shape[0]} rows; FP8 needs one in all or "
            "one per row. Export the checkpoint again."
        )
    scales = weight_scale.float().reshape(-1, 1).expand(weight.shape[0], 1)  # [N, 1]
    decoded = torch.empty(weight.shape, dtype=dtype)
    for rows in row_blocks(*weight.shape):
        decoded[rows] = (weight[rows].to(torch.float32) * scales[rows]).to(dtype)
    return decoded


def _row_amax(weight: torch.Tensor) -> torch.Tensor:
    low, high = torch.aminmax(weight, dim=-1)
    return torch.maximum(-low.float(), high.float())
