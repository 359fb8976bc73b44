# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own ModelOpt parser makes of the declarations that quantize and convert write."""

from typing import Any

import pytest

from vllm_lilicorr.checkpoint import config_files
from vllm_lilicorr.checkpoint.declaration import declarations
from vllm_lilicorr.checkpoint.quantize import GROUPS

NUM_TARGET_LAYERS, NUM_LAYERS = 36, 3
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEAD = [
    "token_proj", "pass_hidden_proj", "context_proj", "anchor_out_head", "factor_input_proj", "out_head", "in_head",
    "feature_mlp.up_proj", "feature_mlp.down_proj",
    *(f"layers.{i}.{name}" for i in range(2) for name in ("attn.out_proj", "mlp.up_proj", "mlp.down_proj")),
]  # fmt: skip
LINEARS = [
    "fc",
    "lm_head",
    *(f"lilicorr.{name}" for name in HEAD),
    *(f"layers.{i}.self_attn.{name}_proj" for i in range(NUM_LAYERS) for name in "qkvo"),
    *(f"layers.{i}.mlp.{name}_proj" for i in range(NUM_LAYERS) for name in ("gate", "up", "down")),
    *(f"layers.{i}.{name}_conv.kernel_projection" for i in range(NUM_LAYERS) for name in ("attention", "mlp")),
]


def group(*names: str) -> set[str]:
    return {module for module in LINEARS if any(GROUPS[name].fullmatch(module) for name in names)}


CASES = {
    "default": group("mlp", "fc", "lm-head"),
    "attention alone": group("attention"),
    "head alone": group("head"),
    "head and fc, no mlp": group("head", "fc"),
    "everything": group(*GROUPS),
    "mlp without down": {module for module in group("mlp") if "down" not in module},
    "one layer": {module for module in group("mlp", "attention") if module.startswith("layers.1.")},
    "output projections": {module for module in LINEARS if module.endswith("self_attn.o_proj")},
    "lm head alone": {"lm_head"},
}


def runtime_name(module: str) -> str:
    """The name under which vLLM builds a drafter's module: layers after the target's, fused products."""
    head, _, rest = module.partition(".")
    if head == "lm_head":
        return module
    if head != "layers":
        return f"model.{module}"
    index, _, rest = rest.partition(".")
    for fused, members in PACKED.items():
        part, _, last = rest.rpartition(".")
        if last in members:
            rest = f"{part}.{fused}"
    return f"model.layers.{NUM_TARGET_LAYERS + int(index)}.{rest}"


def parse(declared: dict[str, Any]) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models.qwen3_dflash import _add_global_draft_layer_exclusions

    for name in ("modelopt_fp4", "modelopt"):
        parser = get_quantization_config(name)
        if name == "modelopt" or parser.override_quantization_method(declared | {"quant_method": "modelopt"}, None):
            break
    config = parser.from_config(declared)
    config.packed_modules_mapping = PACKED
    _add_global_draft_layer_exclusions(config, NUM_TARGET_LAYERS, NUM_LAYERS)
    return config


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"])
@pytest.mark.parametrize("case", CASES)
def test_vllm_quantizes_exactly_what_is_quantized(case: str, algorithm: str) -> None:
    """Would catch float weights read as codes, or codes as floats: patterns that match too little or too much."""
    is_quantized = {module: module in CASES[case] for module in LINEARS}
    patterns = config_files.exclusions(is_quantized)
    for declared in (
        config_files.quantization_config(algorithm, patterns),
        config_files.hf_quant_config(algorithm, patterns),
    ):
        config = parse(declared)
        assert config.quant_method == algorithm
        found = {module: not config.is_layer_excluded(runtime_name(module)) for module in LINEARS}
        assert found == is_quantized


@pytest.mark.parametrize("case", CASES)
def test_our_reader_agrees(case: str) -> None:
    """Would catch a declaration that our own reader finds contradictory."""
    patterns = config_files.exclusions({module: module in CASES[case] for module in LINEARS})
    declared = config_files.quantization_config("NVFP4", patterns)
    (read,) = declarations({"quantization_config": declared}, None)
    assert {module for module in LINEARS if not read.excludes(module)} == CASES[case]


def test_a_targets_linears_under_its_own_names() -> None:
    """Would catch patterns that suit a drafter only: a target's layers keep their numbers."""
    linears = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    modules = [f"model.layers.{i}.{name}" for i in range(12) for name in linears]
    for quantized in ({name for name in modules if ".mlp." in name}, {name for name in modules if "layers.1." in name}):
        patterns = config_files.exclusions({name: name in quantized for name in modules})
        config = parse(config_files.quantization_config("NVFP4", patterns))
        for name in modules:
            assert config.is_layer_excluded(name) is (name not in quantized), name
        assert config.is_layer_excluded("lm_head")
