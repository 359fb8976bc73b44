# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a drafter's tensors, in every naming that exports use.

Canonical names are those of vLLM's in-tree drafter. Model Optimizer exports the
head's MLPs as torch.nn.Sequential, so their parts are numbered; backbone names
may carry the prefix "model.".
"""

import re
from collections.abc import Mapping
from typing import Any

from vllm_lilicorr.method.geometry import DrafterGeometry

HEAD_PREFIX = "lilicorr."
# Product that vLLM computes at once, to the linears of a layer that it fuses for it, in its order.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_SEQUENTIAL_NAMES = (
    (re.compile(r"^lilicorr\.feature_mlp\.0\."), "lilicorr.feature_norm."),
    (re.compile(r"^lilicorr\.feature_mlp\.1\."), "lilicorr.feature_mlp.up_proj."),
    (re.compile(r"^lilicorr\.feature_mlp\.3\."), "lilicorr.feature_mlp.down_proj."),
    (re.compile(r"^lilicorr\.layers\.(\d+)\.mlp\.0\."), r"lilicorr.layers.\1.mlp.up_proj."),
    (re.compile(r"^lilicorr\.layers\.(\d+)\.mlp\.2\."), r"lilicorr.layers.\1.mlp.down_proj."),
)
_NUMBERED_NAMES = (
    (re.compile(r"^lilicorr\.feature_norm\."), "lilicorr.feature_mlp.0."),
    (re.compile(r"^lilicorr\.feature_mlp\.up_proj\."), "lilicorr.feature_mlp.1."),
    (re.compile(r"^lilicorr\.feature_mlp\.down_proj\."), "lilicorr.feature_mlp.3."),
    (re.compile(r"^lilicorr\.layers\.(\d+)\.mlp\.up_proj\."), r"lilicorr.layers.\1.mlp.0."),
    (re.compile(r"^lilicorr\.layers\.(\d+)\.mlp\.down_proj\."), r"lilicorr.layers.\1.mlp.2."),
)
# Tensors that some exports carry and that drafting does not read: the embedding
# and the vocabulary maps belong to the target.
_OPTIONAL = re.compile(r"^(embed_tokens\.weight|d2t|t2d|lm_head\.weight|.*\.attention_sink_bias)$")


def canonical_name(name: str) -> str:
    """The in-tree name of a tensor, whatever naming its export used."""
    name = name.removeprefix("model.")
    if not name.startswith(HEAD_PREFIX):
        return name
    for pattern, replacement in _SEQUENTIAL_NAMES:
        name, count = pattern.subn(replacement, name)
        if count:
            break
    return name


def sequential_name(name: str) -> str:
    """The name that torch.nn.Sequential gives a tensor, from its in-tree name; the inverse of canonical_name."""
    for pattern, replacement in _NUMBERED_NAMES:
        name, count = pattern.subn(replacement, name)
        if count:
            break
    return name


def expected_tensors(geometry: DrafterGeometry) -> dict[str, tuple[int, ...]]:
    """Canonical name to shape, for every tensor that an unquantized drafter must have."""
    shapes = _backbone_tensors(geometry)
    shapes.update({HEAD_PREFIX + name: shape for name, shape in _head_tensors(geometry).items()})
    if geometry.has_own_lm_head:
        shapes["lm_head.weight"] = (geometry.vocab_size, geometry.hidden_size)
    return shapes


def _backbone_tensors(geometry: DrafterGeometry) -> dict[str, tuple[int, ...]]:
    hidden, width = geometry.hidden_size, geometry.intermediate_size
    query_width = geometry.num_attention_heads * geometry.head_dim
    kv_width = geometry.num_key_value_heads * geometry.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(geometry.target_layer_ids) * geometry.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(geometry.num_hidden_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_norm.weight": (geometry.head_dim,),
            "self_attn.k_norm.weight": (geometry.head_dim,),
            "mlp.gate_proj.weight": (width, hidden),
            "mlp.up_proj.weight": (width, hidden),
            "mlp.down_proj.weight": (hidden, width),
        }
        projections = {"q_proj": (query_width, hidden), "k_proj": (kv_width, hidden), "v_proj": (kv_width, hidden)}
        projections["o_proj"] = (hidden, query_width)
        for name, (rows, columns) in projections.items():
            layer[f"self_attn.{name}.weight"] = (rows, columns)
            if geometry.attention_bias:
                layer[f"self_attn.{name}.bias"] = (rows,)
        if geometry.conv_kernel_size:
            taps, groups = geometry.conv_kernel_size, hidden // geometry.conv_group_size
            for conv in ("attention_conv", "mlp_conv"):
                layer[f"{conv}.base_kernel"] = (2, taps, hidden)
                layer[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _head_tensors(geometry: DrafterGeometry) -> dict[str, tuple[int, ...]]:
    hidden, width, factors = geometry.hidden_size, geometry.head_width, geometry.factor_dim
    linears = {
        "pass_hidden_proj": (width, hidden),
        "context_proj": (width, hidden),
        "feature_mlp.up_proj": (width, 5),
        "feature_mlp.down_proj": (width, width),
        "factor_input_proj": (width, 3 * width),
        "out_head": (factors, width),
        "in_head": (factors, width),
        "anchor_out_head": (factors, width),
    }
    if hidden != width:
        linears["token_proj"] = (width, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "feature_norm.weight": (5,),
        "feature_norm.bias": (5,),
        "slot_embedding": (1, 1, geometry.num_slots, 1, width),
        "rank_embedding": (1, 1, 1, geometry.top_k, width),
        "relative_slot_bias": (geometry.num_heads, 2 * geometry.block_size - 1),
        "same_slot_bias": (geometry.num_heads,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
    }
    for index in range(geometry.num_layers):
        layer = f"layers.{index}"
        linears[f"{layer}.attn.out_proj"] = (width, width)
        linears[f"{layer}.mlp.up_proj"] = (geometry.mlp_width, width)
        linears[f"{layer}.mlp.down_proj"] = (width, geometry.mlp_width)
        shapes[f"{layer}.attn.in_proj_weight"] = (3 * width, width)
        shapes[f"{layer}.attn.in_proj_bias"] = (3 * width,)
        shapes[f"{layer}.attn_norm.weight"] = (width,)
        shapes[f"{layer}.mlp_norm.weight"] = (width,)
    for name, (rows, columns) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def check_tensors(geometry: DrafterGeometry, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compares a checkpoint's tensors with what the geometry needs.

    Args:
        geometry: of the drafter.
        found: canonical name to logical shape (`quantization.logical_shapes`).

    Raises:
        ValueError: one message that lists every missing, unexpected or wrongly
            shaped tensor with its expected and found shape.
    """
    problems = [
        f"  missing     {name}, expected {list(expected)}" if shape is None
        else f"  unexpected  {name}, found {list(shape)}" if expected is None
        else f"  wrong shape {name}: expected {list(expected)}, found {list(shape)}"
        for name, expected, shape in differences(geometry, found)
    ]  # fmt: skip
    if problems:
        raise ValueError(
            f"The drafter's tensors do not fit its config.json ({len(problems)} differences):\n"
            + "\n".join(sorted(problems))
            + "\nUse the config.json that was exported with these weights, or export the drafter again."
        )


def differences(
    geometry: DrafterGeometry, found: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]]:
    """Name, expected shape and found shape of every tensor that does not fit.

    The expected shape is None for a tensor that should not be there, the found one
    for a tensor that is missing.
    """
    expected = expected_tensors(geometry)
    unfit = [(name, shape, found.get(name)) for name, shape in expected.items() if found.get(name) != shape]
    extra = [(name, None, shape) for name, shape in found.items() if name not in expected and not _OPTIONAL.match(name)]
    return [*unfit, *extra]


def attention_window(config: Mapping[str, Any]) -> dict[str, int]:
    """What to add to dflash_config so that a drafter's sliding layers keep their window.

    transformers' Qwen3 configuration drops a top-level sliding_window where use_sliding_window
    is not set; vLLM then finds none. Empty where nothing needs adding.
    """
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    slides = bool(nested.get("use_swa")) or isinstance(kinds, list) and "sliding_attention" in kinds
    if not slides or nested.get("swa_window_size") or config.get("use_sliding_window") or not isinstance(window, int):
        return {}
    return {"swa_window_size": window}
