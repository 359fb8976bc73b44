# SPDX-License-Identifier: Apache-2.0
"""A drafter's quantization as vLLM gets it: each module as what its tensors are.

What a checkpoint declares is not read for loading: its lists are numbered by the
checkpoint's own layers, vLLM numbers the drafter's after the target's; its patterns name
the trainer's modules; several dialects exist. Instead every linear of the drafter gets
the method of its stored format. The methods are vLLM's own, for Model Optimizer's
formats. Differences from the declaration are told by the checks at start
(checkpoint/declaration.py).

Of a linear that vLLM fuses (q, k and v; gate and up), shards stored in different formats
are decoded at load, and shards with a weight_scale_2 each keep it as a factor of their
outputs. Everything that vLLM or our head computes in float is decoded at load, and on
the CPU platform FP8 too: its kernels depend on the processor's matrix extensions.
"""

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_lilicorr.checkpoint import fp8, nvfp4
from vllm_lilicorr.checkpoint.findings import raise_errors, some
from vllm_lilicorr.checkpoint.layout import FUSED
from vllm_lilicorr.checkpoint.quantization import Format, describe, module_formats, storage_findings
from vllm_lilicorr.checkpoint.reader import Checkpoint

logger = logging.getLogger("vllm.lilicorr")

NAME = "lilicorr"
_PRODUCT = {linear: product for product, linears in FUSED.items() for linear in linears}
_LINEAR = re.compile(r"layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)|fc|lm_head")
_LAYER = re.compile(r"^layers\.(\d+)\.")
# Format to the owning vLLM configuration and its name there. FP8 weights get one scale per row, which fusion
# keeps, and activations are quantized per token.
_METHODS = {
    Format.NVFP4: ("modelopt_fp4", "NVFP4"),
    Format.NVFP4_W4A16: ("modelopt_fp4", "W4A16_NVFP4"),
    Format.FP8: ("modelopt", "FP8_PER_CHANNEL_PER_TOKEN"),
}


def linear_of(module: str) -> str | None:
    """vLLM's linear that holds a checkpoint module: "layers.0.self_attn.q_proj" is in "layers.0.self_attn.qkv_proj".

    None for what is float in vLLM's drafter and in our head.
    """
    if not _LINEAR.fullmatch(module):
        return None
    layer, name = _split(module)
    return layer + _PRODUCT.get(name, name)


def _split(module: str) -> tuple[str, str]:
    """ "layers.0.mlp.up_proj" into "layers.0." and "mlp.up_proj"; an empty first part outside the layers."""
    found = _LAYER.match(module)
    return (found.group(), module[found.end() :]) if found else ("", module)


@dataclass(frozen=True)
class LoadPlan:
    """What becomes of each quantized module.

    Attributes:
        served: vLLM's linear, numbered as in the checkpoint, to the format that vLLM computes with.
        decoded: checkpoint modules that become float when they are loaded.
        mixed: those of `decoded` whose fused neighbours are stored in another format.
    """

    served: Mapping[str, Format]
    decoded: tuple[str, ...]
    mixed: tuple[str, ...]

    @classmethod
    def of(cls, formats: Mapping[str, Format], *, own_lm_head: bool, on_cpu: bool) -> "LoadPlan":
        """The plan for a checkpoint's modules (canonical names) and their formats."""
        linears: dict[str, dict[str, Format]] = {}
        decoded, mixed = [], []
        for module, form in formats.items():
            linear = linear_of(module)
            if linear is not None and (linear != "lm_head" or own_lm_head):
                linears.setdefault(linear, {})[module] = form
            elif form is not Format.FLOAT:
                decoded.append(module)
        served = {}
        for linear, shards in linears.items():
            found = set(shards.values())
            if found <= {Format.NVFP4, Format.NVFP4_W4A16}:
                served[linear] = Format.NVFP4 if found == {Format.NVFP4} else Format.NVFP4_W4A16
            elif found == {Format.FP8} and not on_cpu:
                served[linear] = Format.FP8
            elif found != {Format.FLOAT}:
                quantized = [module for module, form in shards.items() if form is not Format.FLOAT]
                decoded += quantized
                mixed += quantized if len(found) > 1 else []
        return cls(served, tuple(decoded), tuple(mixed))


def stored_quantization(checkpoint: Checkpoint, own_lm_head: bool, on_cpu: bool) -> dict[str, Any] | None:
    """The quantization_config that vLLM gets for a drafter, or None if nothing is quantized.

    Says once which linears are decoded although vLLM could have served them.

    Raises:
        ValueError: a quantized weight cannot be decoded.
    """
    folder = checkpoint.folder
    raise_errors(storage_findings(checkpoint.tensors), f"The drafter {folder}")
    formats = module_formats(checkpoint.tensors)
    stored = {module: form.value for module, form in formats.items() if form is not Format.FLOAT}
    if not stored:
        return None
    plan = LoadPlan.of(formats, own_lm_head=own_lm_head, on_cpu=on_cpu)
    if plan.mixed:
        _warn_once(
            f"The drafter {folder}: {some(sorted(plan.mixed))} are quantized, but linears that vLLM fuses with them "
            "are stored in another format. They are decoded to float, which takes more memory. Quantize q, k and v "
            "alike, and gate and up."
        )
    if on_cpu and Format.FP8 in formats.values():
        _warn_once(f"The drafter {folder}: on the CPU platform its FP8 weights are decoded to the model's dtype.")
    return {"quant_method": NAME, "stored": stored, "own_lm_head": own_lm_head}


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    logger.warning(message)


def number_layers(hf_config: Any, first_layer: int) -> None:
    """Tells the drafter's quantization which number its first layer has in vLLM: the target's number of layers."""
    stated = getattr(hf_config, "quantization_config", None)
    if isinstance(stated, dict) and stated.get("quant_method") == NAME:
        stated["first_layer"] = first_layer


def loadable(
    tensors: Mapping[str, torch.Tensor],  # by canonical name
    *,
    own_lm_head: bool,
    on_cpu: bool,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """The tensors that vLLM's linears and our head take: decoded modules in `dtype`, the scales of served ones."""
    formats = module_formats(describe(tensors))
    plan = LoadPlan.of(formats, own_lm_head=own_lm_head, on_cpu=on_cpu)
    result = dict(tensors)
    for module, stored in formats.items():
        if stored is Format.FLOAT:
            _keep(result, module, ())
        elif module == "lm_head" and not own_lm_head:  # the target's is used
            _keep(result, module, ())
            del result["lm_head.weight"]
        elif module in plan.decoded:
            result[f"{module}.weight"] = _decode(tensors, module, stored, dtype)
            _keep(result, module, ())
        elif stored is Format.FP8:
            rows = tensors[f"{module}.weight"].shape[0]
            scale = tensors[f"{module}.weight_scale"].float().reshape(-1)
            result[f"{module}.weight_scale"] = scale.expand(rows).contiguous()
            _keep(result, module, ("weight_scale",))
        else:
            with_input = plan.served[linear_of(module)] is Format.NVFP4
            _keep(result, module, ("weight_scale", "weight_scale_2", *(["input_scale"] if with_input else [])))
    return result


def _keep(tensors: dict[str, torch.Tensor], module: str, kept: Iterable[str]) -> None:
    """Drops a module's scales except `kept`."""
    for kind in {"weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"} - set(kept):
        tensors.pop(f"{module}.{kind}", None)


def _decode(tensors: Mapping[str, torch.Tensor], module: str, stored: Format, dtype: torch.dtype) -> torch.Tensor:
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if stored is Format.FP8:
        return fp8.decode(weight, scale, dtype)
    return nvfp4.decode(weight, scale, tensors[f"{module}.weight_scale_2"], dtype)


@register_quantization_config(NAME)
class DrafterQuantizationConfig(QuantizationConfig):
    """vLLM's view of `stored_quantization`: the method of each linear of the drafter."""

    def __init__(self, plan: LoadPlan, first_layer: int) -> None:
        super().__init__()
        self.plan = plan
        self.first_layer = first_layer

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DrafterQuantizationConfig":
        from vllm.platforms import current_platform

        stored = {module: Format(form) for module, form in config["stored"].items()}
        plan = LoadPlan.of(
            _with_float_shards(stored), own_lm_head=config["own_lm_head"], on_cpu=current_platform.is_cpu()
        )
        return cls(plan, config.get("first_layer", 0))

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # of vLLM's NVFP4 and FP8 linears

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None) -> str | None:
        """The tensors decide, whatever `quantization` the speculative config names."""
        return NAME if hf_quant_cfg.get("quant_method") == NAME else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        linear = self.checkpoint_name(prefix)
        form = self.plan.served.get(linear)
        if form is None:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        owner, algorithm = _METHODS[form]
        config = {"quant_method": owner, "quant_algo": algorithm, "group_size": nvfp4.GROUP_SIZE, "ignore": []}
        method = get_quantization_config(owner).from_config(config).get_quant_method(layer, prefix)
        if form is not Format.FP8 and _split(linear)[1] in FUSED:
            from vllm_lilicorr.engine.shard_scales import ShardScales

            return ShardScales(method)
        return method

    def checkpoint_name(self, prefix: str) -> str:
        """vLLM's name of a module, "model.layers.37.mlp.down_proj", numbered as in the checkpoint."""
        name = prefix.removeprefix("model.")
        return _LAYER.sub(lambda match: f"layers.{int(match[1]) - self.first_layer}.", name)


def _with_float_shards(stored: Mapping[str, Format]) -> dict[str, Format]:
    """Formats with the float shards that stand beside quantized ones in fused linears."""
    formats = dict(stored)
    for module in stored:
        layer, name = _split(module)
        for shard in FUSED.get(_PRODUCT.get(name, ""), ()):
            formats.setdefault(layer + shard, Format.FLOAT)
    return formats
