# SPDX-License-Identifier: Apache-2.0
"""Makes model_optimizer.safetensors: weights and what NVIDIA Model Optimizer encodes them as, on a CPU.

    pip install torch==2.13.0 nvidia-modelopt==0.47.0 safetensors
    python tests/checkpoint/golden/make_golden.py

torch is a CPU build, and the environment is not vLLM's: the two want different setuptools.

Every case is quantized by mtq.quantize and packed by Model Optimizer's own exporter. Only the case whose K is no
multiple of 16 calls its NVFP4QTensor directly, because the exporter refuses such a weight.

Tensors: CASE/input [N, K] as given, CASE/weight, CASE/weight_scale, CASE/weight_scale_2, CASE/input_scale as
exported (those that the format has), CASE/activation [M, K] where activations were calibrated.
"""

import copy
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import save_file

FILE = Path(__file__).parent / "model_optimizer.safetensors"
GROUP = 16


def export(
    weight: torch.Tensor,
    preset: dict[str, Any],
    amax: float | None = None,
    activation: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Quantizes one Linear and packs it as Model Optimizer's checkpoint exporter does.

    Args:
        amax: the tensor's largest magnitude as the quantizer believes it, for weights that share a scale or
            exceed it.
        activation: an input to calibrate with.
    """
    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype))
    model[0].weight.data.copy_(weight)
    loop = None if activation is None else (lambda module: module(activation))
    model = mtq.quantize(model.eval(), copy.deepcopy(preset), forward_loop=loop)
    linear = model[0]
    if amax is not None:
        linear.weight_quantizer.amax = torch.tensor(amax)
    _export_quantized_weight(linear, weight.dtype)
    names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    return {name: getattr(linear, name).detach() for name in names if getattr(linear, name, None) is not None}


def ties() -> torch.Tensor:
    """weight_scale_2 is 1. Groups of scale 1 hold every value halfway between two codes, and its neighbours."""
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below, above = torch.nextafter(halfway, torch.zeros(7)), torch.nextafter(halfway, torch.full((7,), 9.0))
    rows = [torch.cat((sign * values, torch.tensor([6.0, 0.0, -6.0, 3.0, -0.5, 1.0, 4.0, 2.0, -1.5])))
            for values in (halfway, below, above) for sign in (1, -1)]  # fmt: skip
    rows.append(torch.full((GROUP,), 2688.0))
    return torch.stack(rows)


def zeros() -> torch.Tensor:
    """A group of zeros, one of negative zeros, one of both, and small negative values that round to zero."""
    weight = torch.randn(8, 64)
    weight[0, :16] = 0.0
    weight[1, 16:32] = -0.0
    weight[2, :16] = torch.tensor([0.0, -0.0] * 8)
    weight[3, 1::2] = -1e-4
    weight[4, :48] = -0.0
    return weight


def tiny_groups() -> torch.Tensor:
    """Groups whose ideal scale is small for E4M3: normal, subnormal, below its smallest number."""
    weight = torch.randn(24, 32)
    return weight * torch.logspace(0, -7, 24)[:, None]


def main() -> None:
    torch.manual_seed(0)
    a16, a4 = mtq.W4A16_NVFP4_CFG, mtq.NVFP4_DEFAULT_CFG
    fp8, rows = mtq.FP8_DEFAULT_CFG, mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG
    normal = torch.randn(32, 96) * 0.03
    outliers = torch.randn(16, 64) * torch.randn(16, 1).mul(2).exp()
    activation = torch.randn(12, 96)
    made: dict[str, dict[str, torch.Tensor]] = {}

    def add(name: str, weight: torch.Tensor, preset: dict[str, Any], **options: Any) -> None:
        made[name] = {"input": weight} | export(weight, preset, **options)
        if options.get("activation") is not None:
            made[name]["activation"] = options["activation"]

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        word = str(dtype).removeprefix("torch.")
        add(f"nvfp4-w4a16/normal {word}", normal.to(dtype), a16)
        add(f"nvfp4-w4a16/outliers {word}", outliers.to(dtype), a16)
        add(f"fp8/normal {word}", normal.to(dtype), fp8, activation=activation.to(dtype))
        add(f"fp8/outliers {word}", outliers.to(dtype), fp8)
        add(f"fp8-rows/normal {word}", normal.to(dtype), rows)
        add(f"fp8-rows/outliers {word}", outliers.to(dtype), rows)
    add("nvfp4-w4a16/ties", ties(), a16)
    add("nvfp4-w4a16/zeros", zeros(), a16)
    add("nvfp4-w4a16/zeros bfloat16", zeros().bfloat16(), a16)
    add("nvfp4-w4a16/tiny groups", tiny_groups(), a16)
    add("nvfp4-w4a16/saturation", normal, a16, amax=float(normal.abs().amax()) / 5)
    add("nvfp4-w4a16/shared scale", normal, a16, amax=float(normal.abs().amax()) * 3)
    add("nvfp4/normal bfloat16", normal.bfloat16(), a4, activation=activation.bfloat16())
    add("nvfp4/normal float32", normal, a4, activation=activation)
    tail = torch.randn(6, 40)
    packed, scale, scale_2 = NVFP4QTensor.quantize(tail.clone(), GROUP)
    made["nvfp4-w4a16/tail"] = {
        "input": tail, "weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2
    }  # fmt: skip
    tensors = {
        f"{case}/{name}": tensor.clone().contiguous() for case, group in made.items() for name, tensor in group.items()
    }
    metadata = {"producer": f"modelopt {modelopt.__version__}, torch {torch.__version__}, cpu"}
    save_file(tensors, FILE, metadata=metadata)
    print(f"{len(made)} cases, {FILE.stat().st_size} bytes: {metadata['producer']}")


if __name__ == "__main__":
    main()
