# SPDX-License-Identifier: Apache-2.0
"""Who encodes weights: NVIDIA Model Optimizer where it is installed, or this package. The bytes are the same."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from vllm_lilicorr.checkpoint import fp8, nvfp4

AUTO, MODELOPT, BUILTIN = "auto", "modelopt", "builtin"
ENCODERS = (AUTO, MODELOPT, BUILTIN)
TESTED = "0.47"  # the release that the golden bytes were made with


@dataclass(frozen=True)
class Encoder:
    """Encodes with this package.

    Attributes:
        name: of the encoder, with its version.
    """

    name: str = BUILTIN

    def nvfp4(
        self,
        weight: torch.Tensor,  # [N, K] float, K a multiple of 16
        weight_scale_2: torch.Tensor,  # [] float32
    ) -> nvfp4.EncodedNvfp4:
        return nvfp4.encode(weight, weight_scale_2)

    def fp8(
        self,
        weight: torch.Tensor,  # [N, K] float
        weight_scale: torch.Tensor,  # [N] float32
    ) -> fp8.EncodedFp8:
        return fp8.encode(weight, weight_scale)


@dataclass(frozen=True)
class ModelOptimizer(Encoder):
    """Encodes with the packing functions of Model Optimizer's exporter, some rows at a time.

    Attributes:
        quant_utils: modelopt.torch.export.quant_utils.
        qtensor: modelopt.torch.quantization.qtensor.
    """

    quant_utils: Any = None
    qtensor: Any = None

    def nvfp4(self, weight: torch.Tensor, weight_scale_2: torch.Tensor) -> nvfp4.EncodedNvfp4:
        blocks = []
        for rows in nvfp4.row_blocks(*weight.shape):
            block = weight[rows].clone()  # it may be scaled in place
            scale, _ = self.qtensor.NVFP4QTensor.get_weights_scaling_factor(block, nvfp4.GROUP_SIZE, weight_scale_2)
            packed = self.quant_utils.to_quantized_weight(
                block, scale, self.quant_utils.QUANTIZATION_W4A16_NVFP4, weight_scale_2, nvfp4.GROUP_SIZE
            )
            blocks.append((packed, scale))
        packed, scale = (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
        return nvfp4.EncodedNvfp4(packed, scale, weight_scale_2)

    def fp8(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> fp8.EncodedFp8:
        blocks = [
            self.quant_utils.to_quantized_weight(
                weight[rows], weight_scale[rows], self.quant_utils.QUANTIZATION_FP8_PC_PT
            )
            for rows in nvfp4.row_blocks(*weight.shape)
        ]
        return fp8.EncodedFp8(torch.cat(blocks), weight_scale)


def choose_encoder(name: str) -> Encoder:
    """The encoder of that name; "auto" is Model Optimizer where it can be imported, else this package.

    Raises:
        ValueError: Model Optimizer is asked for and cannot be imported.
    """
    if name == BUILTIN:
        return Encoder()
    try:
        modelopt = importlib.import_module("modelopt")
        quant_utils = importlib.import_module("modelopt.torch.export.quant_utils")
        qtensor = importlib.import_module("modelopt.torch.quantization.qtensor")
    except ImportError as error:
        if name == AUTO:
            return Encoder()
        raise ValueError(
            f"--encoder modelopt, but NVIDIA Model Optimizer cannot be imported ({error}). Install "
            "vllm-lilicorr[modelopt], or use --encoder builtin: it gives the same bytes."
        ) from None
    return ModelOptimizer(f"modelopt {modelopt.__version__}", quant_utils, qtensor)
