# SPDX-License-Identifier: Apache-2.0
"""FP8 weights of a Linear: E4M3 numbers with one scale per tensor.

Format, as NVIDIA Model Optimizer 0.47 exports it and vLLM reads it:

    weight        F8_E4M3  [N, K]
    weight_scale  F32      []      amax(W) / 448
    input_scale   F32      []      present where activations are quantized with a calibrated scale

A weight is weight * weight_scale.
"""

from typing import NamedTuple

import torch

from vllm_lilicorr.checkpoint.nvfp4 import E4M3_MAX, row_blocks


class EncodedFp8(NamedTuple):
    """The two tensors of an FP8 weight."""

    weight: torch.Tensor  # [N, K] float8_e4m3fn
    weight_scale: torch.Tensor  # [] float32


def tensor_scale(*weights: torch.Tensor) -> torch.Tensor:
    """weight_scale for weights that share it: the largest magnitude of all of them, over 448.

    Args:
        weights: [N, K] each, float32, bfloat16 or float16.

    Returns:
        [] float32; 1 if every weight is zero.

    Raises:
        ValueError: a weight holds NaN or infinity.
    """
    amax = torch.stack([torch.stack(torch.aminmax(weight)).float().abs().amax() for weight in weights]).amax()
    if not torch.isfinite(amax):
        raise ValueError("The weight holds NaN or infinity, and FP8 cannot scale either. Export the checkpoint again.")
    return amax / E4M3_MAX if amax > 0 else torch.ones(())


def encode(
    weight: torch.Tensor,  # [N, K] float32, bfloat16 or float16
    weight_scale: torch.Tensor | None = None,  # [] float32
) -> EncodedFp8:
    """Encodes a weight as Model Optimizer 0.47 does on a CPU, byte for byte.

    The quotient is taken in the weight's own dtype, so that a bfloat16 weight is rounded twice, as Model
    Optimizer rounds it; then to the nearest E4M3 number, halfway to the even one, saturating at 448.

    Args:
        weight_scale: the tensor's scale; by default tensor_scale(weight).

    Raises:
        ValueError: not a matrix of floats, NaN or infinity in it, or weight_scale is not positive and finite.
    """
    if weight.ndim != 2 or weight.numel() == 0 or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"weight is {weight.dtype} of shape {list(weight.shape)}; FP8 encodes a matrix [N, K] of float32, "
            "bfloat16 or float16. Leave other tensors as they are."
        )
    own_scale = tensor_scale(weight)
    scale = own_scale if weight_scale is None else weight_scale.detach().to("cpu", torch.float32).reshape(())
    if not (torch.isfinite(scale) and scale > 0):
        raise ValueError(f"weight_scale is {scale.item()}; it must be positive and finite. Use tensor_scale().")
    encoded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for rows in row_blocks(*weight.shape):
        encoded[rows] = (weight[rows] / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return EncodedFp8(encoded, scale.clone())


def decode(
    weight: torch.Tensor,  # [N, K] float8_e4m3fn
    weight_scale: torch.Tensor,  # [], [1] or, one per row, [N, 1] float32
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
    scales = weight_scale.float().reshape(-1, 1)  # [1, 1] or [N, 1]
    decoded = torch.empty(weight.shape, dtype=dtype)
    for rows in row_blocks(*weight.shape):
        row_scales = scales[rows] if len(scales) > 1 else scales
        decoded[rows] = (weight[rows].to(torch.float32) * row_scales).to(dtype)
    return decoded
