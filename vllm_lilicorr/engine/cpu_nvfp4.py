# SPDX-License-Identifier: Apache-2.0
"""NVFP4 linears on vLLM's CPU platform, for target and drafter: out = x W^T + b.

W [N, K] stays packed in memory (format: checkpoint/nvfp4.py) and is decoded a block of
rows at a time, in float32 and then in x's dtype, inside the product; the decoded block
is thrown away. Beside the packed bytes a layer keeps four scalars, and a product works
in DECODED_BYTES at most. LILICORR_CPU_NVFP4=decoded decodes once, at load: more memory,
faster products.

Where the checkpoint quantizes activations (W4A4), x is rounded to NVFP4 first, row by
row in groups of 16: a group's scale is e4m3(min(448, g * amax / 6)) with g the
reciprocal of input_scale, its values are rounded to E2M1, halfway to the even code, and
become E2M1 * scale / g. This is what vLLM's own emulation computes.
"""

import torch
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.platforms import current_platform

from vllm_lilicorr.checkpoint.nvfp4 import E2M1_MAX, E4M3_MAX, GROUP_SIZE, decode
from vllm_lilicorr.settings import Settings

_BLOCK_ELEMENTS = 1 << 18
# Of each element of a block: half an index in int32, the value in float32, and in x's dtype.
DECODED_BYTES = _BLOCK_ELEMENTS * (2 + 4 + 4)
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The largest magnitude that still rounds to each code: halfway values take the even one.
_HALFWAY = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_BOUNDS = torch.where(torch.arange(7) % 2 == 1, torch.nextafter(_HALFWAY, torch.zeros(7)), _HALFWAY)


def _value_pairs() -> torch.Tensor:
    """[256] int64: the bits of the two float32 values of every byte. One lookup gives both."""
    values = torch.cat((_MAGNITUDES, -_MAGNITUDES))
    codes = torch.arange(256)
    return torch.stack((values[codes & 15], values[codes >> 4]), dim=-1).view(torch.int64).view(-1)


_PAIRS = _value_pairs()


def round_activations(
    x: torch.Tensor,  # [M, K] float32, bfloat16 or float16; K a multiple of 16
    input_global_scale_inv: torch.Tensor,  # [] float32: 1 / input_scale
) -> torch.Tensor:
    """x as an NVFP4 product with quantized activations sees it: [M, K] of x's dtype."""
    groups = x.float().view(x.shape[0], -1, GROUP_SIZE)
    amax = groups.abs().amax(-1, keepdim=True)
    scale = (input_global_scale_inv * (amax * (1 / E2M1_MAX))).clamp(max=E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn).float()  # [M, K/16, 1]
    step = scale / input_global_scale_inv
    # A scale that rounds to zero makes a group of zeros.
    scaled = groups * torch.where(scale == 0, 0.0, 1 / (scale * (1 / input_global_scale_inv)))
    codes = torch.bucketize(scaled.abs(), _BOUNDS, out_int32=True)
    rounded = _MAGNITUDES[codes].copysign(scaled)
    return (rounded * step).view_as(x).to(x.dtype)


def _decode_rows(
    weight: torch.Tensor,  # [n, K/2] uint8
    weight_scale: torch.Tensor,  # [n, K/16] float8_e4m3fn
    weight_global_scale: torch.Tensor,  # [] float32
    dtype: torch.dtype,
) -> torch.Tensor:
    """[n, K] of `dtype`, the values of checkpoint/nvfp4.py's decode at about five times its speed."""
    scales = weight_scale.float() * weight_global_scale
    pairs = _PAIRS.index_select(0, weight.reshape(-1).int())  # [n * K/2]
    values = pairs.view(torch.float32).view(*scales.shape, GROUP_SIZE)
    return values.mul_(scales.unsqueeze(-1)).view(len(weight), -1).to(dtype)


def nvfp4_linear(
    x: torch.Tensor,  # [M, K] float32, bfloat16 or float16
    weight: torch.Tensor,  # [N, K/2] uint8
    weight_scale: torch.Tensor,  # [N, K/16] float8_e4m3fn
    weight_global_scale: torch.Tensor,  # [] float32
    input_global_scale_inv: torch.Tensor | None = None,  # [] float32
) -> torch.Tensor:
    """x times the decoded weight: [M, N] of x's dtype. With the last argument, x is rounded to NVFP4 first."""
    if input_global_scale_inv is not None:
        x = round_activations(x, input_global_scale_inv)
    num_rows, num_columns = weight.shape[0], weight.shape[1] * 2
    out = x.new_empty(x.shape[0], num_rows)
    step = max(1, _BLOCK_ELEMENTS // num_columns)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        block = _decode_rows(weight[rows], weight_scale[rows], weight_global_scale, x.dtype)
        out[:, rows] = torch.nn.functional.linear(x, block)
    return out


# An operation of its own: compiled graphs keep one node, whatever the number of blocks.
_library = torch.library.Library("lilicorr", "FRAGMENT")
_library.define(
    "nvfp4_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_global_scale, "
    "Tensor? input_global_scale_inv) -> Tensor"
)
_library.impl("nvfp4_linear", nvfp4_linear, "CPU")


@torch.library.register_fake("lilicorr::nvfp4_linear")
def _(x, weight, weight_scale, weight_global_scale, input_global_scale_inv):
    return x.new_empty(x.shape[0], weight.shape[0])


class CpuNvFp4LinearKernel(NvFp4LinearKernel):
    """vLLM's NVFP4 linear kernel for its CPU platform, with quantized activations and without."""

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self._decode_once = Settings.from_environment().cpu_nvfp4 == "decoded"
        self._dtype = torch.get_default_dtype()  # the model's, while its layers are built

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if current_platform.is_cpu() else (False, "requires the CPU platform.")

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keeps the layer packed, or replaces its weight by the decoded one [N, K] of the model's dtype."""
        if not self._decode_once:
            return
        decoded = decode(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data, self._dtype)
        layer.weight = torch.nn.Parameter(decoded, requires_grad=False)
        del layer.weight_scale

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,  # [..., K]
        bias: torch.Tensor | None = None,  # [N]
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        input_scale = getattr(layer, "input_global_scale_inv", None)
        if self._decode_once:
            rows = rows if input_scale is None else round_activations(rows, input_scale)
            out = torch.nn.functional.linear(rows, layer.weight)
        else:
            out = torch.ops.lilicorr.nvfp4_linear(
                rows, layer.weight, layer.weight_scale, layer.weight_global_scale, input_scale
            )
        out = out if bias is None else out + bias
        return out.view(*x.shape[:-1], -1)
