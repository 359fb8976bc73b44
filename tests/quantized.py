# SPDX-License-Identifier: Apache-2.0
"""Quantized copies of the small checkpoints, in the forms and with the defects that exporters write."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_lilicorr.checkpoint import fp8, nvfp4
from vllm_lilicorr.checkpoint.layout import canonical_name
from vllm_lilicorr.checkpoint.quantization import Format, describe, module_formats

Tensors = dict[str, torch.Tensor]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# config_groups as Model Optimizer converts them, and as compressed-tensors writes FP8.
_NVFP4_WEIGHTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_FP8_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def linears(tensors: Iterable[str]) -> list[str]:
    """The linears of a drafter's backbone, or of a target's layers, among a checkpoint's tensors."""
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight") or name == "fc.weight"]
    return [module for module in modules if module == "fc" or ("layers." in module and "lilicorr." not in module)]


def quantize_tensors(
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, Format],  # the others stay as they are
    *,
    one_scale: bool = True,
    per_row: bool = False,
    input_scale: float = 0.02,
) -> Tensors:
    """The tensors with some modules quantized.

    Args:
        one_scale: linears that vLLM fuses share their weight_scale_2 or weight_scale.
        per_row: FP8 weights have a scale for each row, as compressed-tensors writes them.
        input_scale: of modules in Format.NVFP4.
    """
    result = dict(tensors)
    for module, form in modules.items():
        weight = tensors[f"{module}.weight"].float()
        parent, _, name = module.rpartition(".")
        shards = next((group for group in FUSED if name in group), (name,)) if one_scale else (name,)
        together = [tensors[f"{parent}.{shard}.weight" if parent else f"{shard}.weight"].float() for shard in shards]
        if form is Format.FP8:
            scale = weight.abs().amax(1, keepdim=True) / 448 if per_row else fp8.tensor_scale(*together)
            result[f"{module}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
            result[f"{module}.weight_scale"] = scale
            continue
        encoded = nvfp4.encode(weight, nvfp4.tensor_scale(*together))
        result |= {f"{module}.{kind}": tensor for kind, tensor in encoded._asdict().items()}
        if form is Format.NVFP4:
            result[f"{module}.input_scale"] = torch.tensor(input_scale)
    return result


def decode_tensors(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """What the tensors stand for, all in float."""
    result = dict(tensors)
    for module, form in module_formats(describe(tensors)).items():
        parts = [result.pop(f"{module}.{kind}", None) for kind in ("weight_scale", "weight_scale_2", "input_scale")]
        weight = result[f"{module}.weight"]
        if form is Format.FP8:
            result[f"{module}.weight"] = fp8.decode(weight, parts[0])
        elif form.is_nvfp4:
            result[f"{module}.weight"] = nvfp4.decode(weight, parts[0], parts[1])
    return result


def converted(algorithm: str = "W4A16_NVFP4", ignore: Iterable[str] = ()) -> dict[str, Any]:
    """quantization_config as Model Optimizer converts it for vLLM."""
    activations = _NVFP4_WEIGHTS if algorithm == "NVFP4" else None
    group = {"weights": _NVFP4_WEIGHTS, "input_activations": activations, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def raw(algorithm: str = "W4A16_NVFP4", exclude: Iterable[str] = ()) -> dict[str, Any]:
    """Model Optimizer's own dictionary, hf_quant_config.json; some exports put it into config.json too."""
    fields = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": list(exclude)}
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": fields}


def compressed_tensors(ignore: Iterable[str] = ()) -> dict[str, Any]:
    """quantization_config of an FP8 checkpoint as compressed-tensors writes it."""
    group = {"weights": _FP8_WEIGHTS, "input_activations": _FP8_ACTIVATIONS, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def with_prefix(tensors: Mapping[str, torch.Tensor], prefix: str = "model.") -> Tensors:
    """Backbone names under a prefix; the head's and the LM head's stay."""
    return {
        name if canonical_name(name).startswith(("lilicorr.", "lm_head.")) else prefix + name: tensor
        for name, tensor in tensors.items()
    }
