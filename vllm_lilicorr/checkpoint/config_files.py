# SPDX-License-Identifier: Apache-2.0
"""config.json and hf_quant_config.json as vLLM's in-tree drafter reads them.

config.json's quantization_config has the converted form (quant_method "modelopt", quant_algo, config_groups, ignore);
hf_quant_config.json has Model Optimizer's own (producer, quantization). Both list what is not quantized.

vLLM matches those patterns against names that end in the checkpoint's, with the drafter's layers numbered after the
target's, and with q/k/v and gate/up under the name of their fused product. So patterns carry no layer number where
all layers agree, begin with a star, and name the fused products too.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_lilicorr.checkpoint.layout import FUSED, attention_window
from vllm_lilicorr.checkpoint.quantization import GROUP_SIZE, Format
from vllm_lilicorr.method.geometry import ARCHITECTURE, is_lilicorr_config

# quant_algo of Model Optimizer and vLLM.
NVFP4, NVFP4_W4A16 = "NVFP4", "W4A16_NVFP4"
FP8_STATIC, FP8_ROWS = "FP8", "FP8_PER_CHANNEL_PER_TOKEN"
ALGORITHMS = {Format.NVFP4: NVFP4, Format.NVFP4_W4A16: NVFP4_W4A16, Format.FP8: FP8_ROWS}
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # the release whose format is written
_LAYER = re.compile(r"^(model\.)?layers\.\d+\.")
_HEAD = "lilicorr."


def fused_group(module: str) -> tuple[str, ...]:
    """The modules that vLLM fuses with this one, itself included, in its order; just itself if none."""
    layer = _LAYER.match(module)
    if layer:
        rest = module[layer.end() :]
        for names in FUSED.values():
            if rest in names:
                return tuple(layer.group() + name for name in names)
    return (module,)


def drafter_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A LiLiCorr drafter's config.json in today's dialect: its architecture's name, block_size at top level.

    Any quantization_config is left out: `quantization_config` makes the new one.
    """
    written = {name: value for name, value in config.items() if name != "quantization_config"}
    if not is_lilicorr_config(config):
        return written
    written["architectures"] = [ARCHITECTURE]
    nested = dict(config.get("dflash_config") or {}) | attention_window(config)
    block_size = nested.pop("block_size", config.get("block_size"))
    return written | {"block_size": block_size, "dflash_config": nested}


def quantization_config(algorithm: str, exclusions: Iterable[str]) -> dict[str, Any]:
    """config.json's quantization_config in the converted form."""
    if algorithm in (NVFP4, NVFP4_W4A16):
        numbers: dict[str, Any] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE}
        inputs = numbers
    else:
        numbers = {"dynamic": False, "num_bits": 8, "type": "float"}
        inputs = numbers
    if algorithm == FP8_ROWS:
        numbers = numbers | {"strategy": "channel"}
        inputs = {"dynamic": True, "num_bits": 8, "type": "float", "strategy": "token"}
    group: dict[str, Any] = {"weights": numbers, "targets": ["Linear"]}
    if algorithm != NVFP4_W4A16:
        group["input_activations"] = inputs
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        "ignore": list(exclusions),
        "producer": _PRODUCER,
    }


def hf_quant_config(algorithm: str, exclusions: Iterable[str]) -> dict[str, Any]:
    """hf_quant_config.json in Model Optimizer's own form."""
    quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    if algorithm in (NVFP4, NVFP4_W4A16):
        quantization["group_size"] = GROUP_SIZE
    return {"producer": _PRODUCER, "quantization": quantization | {"exclude_modules": list(exclusions)}}


def exclusions(is_quantized: Mapping[str, bool]) -> list[str]:
    """Patterns that exclude the modules that are not quantized, and no others.

    Args:
        is_quantized: every linear of the checkpoint by name, the LM head included.
    """
    kept = {name for name, quantized in is_quantized.items() if not quantized}
    patterns: set[str] = {"lm_head"} if "lm_head" not in is_quantized else set()
    head = {name for name in is_quantized if name.startswith(_HEAD)}
    if head and head <= kept:
        patterns.add(f"*{_HEAD}*")
    # The head has layers too: a star before the backbone's would reach them.
    any_layer = "*." if head <= kept else "model.layers.*."
    families: dict[str, set[str]] = {}
    for name in is_quantized:
        if name not in head or not head <= kept:
            families.setdefault(_LAYER.sub("*", name), set()).add(name)
    for family, members in families.items():
        if not family.startswith("*"):
            patterns |= {family if family == "lm_head" else f"*{family}" for _ in members & kept}
        elif members <= kept:
            patterns |= _with_fused(any_layer, family[1:])
        else:
            # vLLM adds the number of the drafter's first layer where nothing stands before "layers".
            for name in members & kept:
                patterns |= _with_fused(name.removesuffix(family[1:]), family[1:])
    attention = {f"{any_layer}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")}
    if attention <= patterns:
        patterns = patterns - attention | {f"{any_layer}self_attn.*"}
    return sorted(patterns)


def _with_fused(prefix: str, rest: str) -> set[str]:
    fused = {product for product, names in FUSED.items() if rest in names}
    return {prefix + name for name in {rest} | fused}
