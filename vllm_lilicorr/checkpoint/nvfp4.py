# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights of a Linear: 4-bit floats in groups of 16 along K with two levels of scales.

Format, as NVIDIA Model Optimizer 0.47 exports it and vLLM reads it (the golden bytes in
tests/checkpoint/golden were made by Model Optimizer):

    weight          U8       [N, K/2]   byte j holds code[2j] in its low four bits, code[2j+1] in its high four
    weight_scale    F8_E4M3  [N, K/16]  one scale per group of 16 columns
    weight_scale_2  F32      []         one scale per tensor: amax(W) / (6 * 448)

A code is E2M1: bit 3 the sign, bits 0 to 2 one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. A weight is
magnitude * weight_scale * weight_scale_2.
"""

from typing import NamedTuple

import torch

from vllm_lilicorr.checkpoint.quantization import GROUP_SIZE

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9
# Elements decoded or encoded at a time: working memory stays near 32 MB, whatever the tensor's size.
_BLOCK_ELEMENTS = 1 << 20

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The largest value that still rounds to code i. A value halfway between two magnitudes takes the even code, so
# bounds above an odd code end just below the halfway point.
_HALFWAY = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BOUNDS = torch.where(torch.arange(7) % 2 == 1, torch.nextafter(_HALFWAY, torch.zeros(7)), _HALFWAY)  # [7] float32
_VALUES = torch.tensor(_MAGNITUDES + tuple(-magnitude for magnitude in _MAGNITUDES))  # [16] float32, by code


class EncodedNvfp4(NamedTuple):
    """The three tensors of an NVFP4 weight; N rows, K columns rounded up to whole groups of 16."""

    weight: torch.Tensor  # [N, K/2] uint8
    weight_scale: torch.Tensor  # [N, K/16] float8_e4m3fn
    weight_scale_2: torch.Tensor  # [] float32


def tensor_scale(*weights: torch.Tensor) -> torch.Tensor:
    """weight_scale_2 for weights that share it: the largest magnitude of all of them, over 6 * 448.

    Linears that vLLM fuses (gate and up; q, k and v) keep a single weight_scale_2 after fusion, so they are
    encoded with a common one.

    Args:
        weights: [N, K] each, float32, bfloat16 or float16.

    Returns:
        [] float32; 1 if every weight is zero, where Model Optimizer would divide zero by zero.

    Raises:
        ValueError: a weight holds NaN or infinity.
    """
    amax = torch.stack([_amax(weight) for weight in weights]).amax()
    if not torch.isfinite(amax):
        raise ValueError(
            "The weight holds NaN or infinity, and NVFP4 has no code for either. Export the checkpoint again."
        )
    return amax / (E2M1_MAX * E4M3_MAX) if amax > 0 else torch.ones(())


def encode(
    weight: torch.Tensor,  # [N, K] float32, bfloat16 or float16
    weight_scale_2: torch.Tensor | None = None,  # [] float32
) -> EncodedNvfp4:
    """Encodes a weight as Model Optimizer 0.47 does, byte for byte.

    A group's scale is its largest magnitude over 6 * weight_scale_2, kept within E4M3's smallest and largest
    positive numbers; a group of zeros gets 1. Values are rounded to the nearest magnitude, halfway to the even
    code, and saturate at 6. Negative values keep their sign bit when they round to zero; -0 becomes code 0.
    If K is no multiple of 16, the last group is filled up with zeros.

    Args:
        weight_scale_2: the tensor's scale; by default tensor_scale(weight).

    Raises:
        ValueError: not a matrix of floats, NaN or infinity in it, or weight_scale_2 is not positive and finite.
    """
    if weight.ndim != 2 or weight.numel() == 0 or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"weight is {weight.dtype} of shape {list(weight.shape)}; NVFP4 encodes a matrix [N, K] of float32, "
            "bfloat16 or float16. Leave other tensors as they are."
        )
    own_scale = tensor_scale(weight)
    scale_2 = own_scale if weight_scale_2 is None else weight_scale_2.detach().to("cpu", torch.float32).reshape(())
    if not (torch.isfinite(scale_2) and scale_2 > 0):
        raise ValueError(f"weight_scale_2 is {scale_2.item()}; it must be positive and finite. Use tensor_scale().")
    num_rows, num_columns = weight.shape
    num_groups = -(-num_columns // GROUP_SIZE)
    packed = torch.empty((num_rows, num_groups * GROUP_SIZE // 2), dtype=torch.uint8)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float8_e4m3fn)
    for rows in row_blocks(num_rows, num_columns):
        packed[rows], scales[rows] = _encode_rows(weight[rows], num_groups, scale_2)
    return EncodedNvfp4(packed, scales, scale_2.clone())


def decode(
    weight: torch.Tensor,  # [N, K/2] uint8
    weight_scale: torch.Tensor,  # [N, K/16] float8_e4m3fn
    weight_scale_2: torch.Tensor,  # [] or [1] float32
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight that the codes and scales stand for, computed in float32 and then cast.

    Returns:
        [N, K] of `dtype`; K counts the zeros that filled the last group.

    Raises:
        ValueError: dtypes or shapes that do not belong together.
    """
    if weight.dtype != torch.uint8 or weight_scale.dtype != torch.float8_e4m3fn or weight_scale_2.numel() != 1:
        raise ValueError(
            f"weight {weight.dtype}, weight_scale {weight_scale.dtype}, weight_scale_2 with {weight_scale_2.numel()} "
            "elements; NVFP4 needs uint8, float8_e4m3fn and one float32. Export the checkpoint again."
        )
    if weight.ndim != 2 or tuple(weight_scale.shape) != (weight.shape[0], weight.shape[1] * 2 // GROUP_SIZE):
        raise ValueError(
            f"weight {list(weight.shape)} and weight_scale {list(weight_scale.shape)}; NVFP4 needs [N, K/2] and "
            "[N, K/16]. Export the checkpoint again."
        )
    num_rows, num_columns = weight.shape[0], weight.shape[1] * 2
    decoded = torch.empty((num_rows, num_columns), dtype=dtype)
    for rows in row_blocks(num_rows, num_columns):
        group_scales = weight_scale[rows].to(torch.float32) * weight_scale_2.reshape(())  # [n, K/16]
        codes = torch.stack((weight[rows] & 15, weight[rows] >> 4), dim=-1)  # [n, K/2, 2]
        values = _VALUES[codes.to(torch.int32)].view(*group_scales.shape, GROUP_SIZE)
        decoded[rows] = (values * group_scales.unsqueeze(-1)).view(-1, num_columns).to(dtype)
    return decoded


def row_blocks(num_rows: int, num_columns: int) -> list[slice]:
    """Slices of rows, each of about a million elements, that cover [num_rows, num_columns]."""
    step = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _amax(weight: torch.Tensor) -> torch.Tensor:
    # aminmax allocates nothing of the weight's size, abs().amax() would.
    low, high = torch.aminmax(weight)
    return torch.maximum(-low.float(), high.float())


def _encode_rows(
    weight: torch.Tensor,  # [n, K]
    num_groups: int,
    scale_2: torch.Tensor,  # [] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n, num_groups * 8] uint8 and scales [n, num_groups] float8_e4m3fn of some rows."""
    missing = num_groups * GROUP_SIZE - weight.shape[1]
    groups = torch.nn.functional.pad(weight.float(), (0, missing)).view(-1, num_groups, GROUP_SIZE)
    ideal = groups.abs().amax(-1) / (E2M1_MAX * scale_2)
    ideal[ideal == 0] = 1.0
    scales = ideal.clamp(E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = groups / (scales.to(torch.float32) * scale_2).unsqueeze(-1)
    codes = torch.bucketize(scaled.abs(), _BOUNDS, out_int32=True).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    codes = codes.view(len(weight), -1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales
