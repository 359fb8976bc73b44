# SPDX-License-Identifier: Apache-2.0
"""Fused NVFP4 linears whose shards were quantized with a weight_scale_2 each, computed exactly.

vLLM's fused linear keeps one weight_scale_2, the largest. A shard with a smaller one
comes out too large by the quotient, so its columns of the output are multiplied back.
"""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method


@register_weight_loader_v2_supported_method
class ShardScales(LinearMethodBase):
    """vLLM's NVFP4 method of a fused linear, and a factor for each of its shards.

    Args:
        method: vLLM's method; it registers weight_scale_2 [num_shards].
    """

    def __init__(self, method: LinearMethodBase) -> None:
        self.method = method

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        self.method.create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        scales = layer.weight_scale_2.data  # [num_shards] float32
        largest = scales.max()
        factors = None
        if (scales != largest).any():
            widths = torch.tensor(layer.logical_widths, device=scales.device)
            factors = (scales / largest).repeat_interleave(widths)  # [N]
            scales.fill_(largest)
        layer.register_buffer("shard_factors", factors, persistent=False)
        self.method.process_weights_after_loading(layer)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,  # [..., K]
        bias: torch.Tensor | None = None,  # [N]
    ) -> torch.Tensor:
        if layer.shard_factors is None:
            return self.method.apply(layer, x, bias)
        out = self.method.apply(layer, x)
        scaled = (out * layer.shard_factors).to(out.dtype)
        return scaled if bias is None else scaled + bias
