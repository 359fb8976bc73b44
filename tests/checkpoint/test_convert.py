# SPDX-License-Identifier: Apache-2.0
"""`lilicorr convert`: names, declaration and scales change; values do not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects import as_older_export
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import drafter_config, target_config, write_drafter, write_target
from safetensors.torch import load_file, save_file

from vllm_lilicorr.checkpoint import fp8, nvfp4
from vllm_lilicorr.checkpoint.convert import plan_conversion, rescale
from vllm_lilicorr.checkpoint.layout import canonical_name, expected_tensors, sequential_name
from vllm_lilicorr.checkpoint.quantization import Format, module_formats, storage_findings
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.checkpoint.writer import write_checkpoint
from vllm_lilicorr.method.geometry import DrafterGeometry

CONFIG = drafter_config(has_own_lm_head=True)
RAW = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["dflash_module.lilicorr.feature_mlp*", "model*", "lm_head"],
    },
}


def is_mlp(name: str) -> bool:
    return name.startswith("layers.") and ".mlp." in name or name in ("fc.weight", "lm_head.weight")


def write_encoded(folder: Path, encode: Any, quantization_config: dict[str, Any] | None) -> Path:
    """A drafter in the older dialect whose MLPs, fc and LM head were encoded each by itself."""
    write_drafter(folder, CONFIG, dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if is_mlp(name):
            scale = 3.7 if "up_proj" in name else 1.0
            encoded = encode(tensor * scale)
            tensors |= {f"{name.removesuffix('weight')}{kind}": made for kind, made in encoded.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = CONFIG | ({"quantization_config": quantization_config} if quantization_config else {})
    (folder / "config.json").write_text(json.dumps(config))
    return as_older_export(folder)


def convert(source: Path, destination: Path, program: str = "vllm") -> tuple[Checkpoint, list[dict[str, Any]]]:
    written = write_checkpoint(destination, plan_conversion(Checkpoint.open(source), program))
    return Checkpoint.open(destination), [report for report in written.reports if report]


def stored(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {canonical_name(name): checkpoint.read(name) for name in checkpoint.tensors}


def decoded(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if weight.dtype == torch.uint8:
        return nvfp4.decode(weight, scale, tensors[f"{module}.weight_scale_2"])
    return fp8.decode(weight, scale)


def test_float_drafter_gets_todays_dialect(tmp_path: Path) -> None:
    """Would catch a name, a value or a key of the configuration lost on the way."""
    source = as_older_export(write_drafter(tmp_path / "old", CONFIG, dtype=torch.bfloat16))
    made, reports = convert(source, tmp_path / "made")
    assert reports == [] and made.config == CONFIG and made.hf_quant_config is None
    assert set(made.tensors) == set(expected_tensors(DrafterGeometry.from_config(CONFIG)))
    for name, tensor in stored(Checkpoint.open(source)).items():
        assert torch.equal(made.read(name), tensor)


def test_sglang_gets_numbered_names(tmp_path: Path) -> None:
    """Would catch in-tree names written for SGLang, whose head has numbered ones and refuses others."""
    made, _ = convert(write_drafter(tmp_path / "old", CONFIG), tmp_path / "made", "sglang")
    assert {"lilicorr.feature_mlp.0.bias", "lilicorr.layers.1.mlp.2.weight", "fc.weight"} <= set(made.tensors)
    assert not any("feature_norm" in name or "lilicorr.layers.0.mlp.up_proj" in name for name in made.tensors)
    back, _ = convert(made.folder, tmp_path / "back")
    assert set(back.tensors) == set(expected_tensors(DrafterGeometry.from_config(CONFIG)))


@given(st.sampled_from(sorted(expected_tensors(DrafterGeometry.from_config(CONFIG)))), st.booleans(), st.booleans())
def test_names_map_back(name: str, numbered: bool, prefixed: bool) -> None:
    """Would catch two mappings of names that are not inverse to each other."""
    exported = sequential_name(name) if numbered else name
    assert canonical_name(f"model.{exported}" if prefixed else exported) == name


@pytest.mark.parametrize("encode", [nvfp4.encode, fp8.encode])
def test_what_others_compute_in_float_is_decoded(tmp_path: Path, encode: Any) -> None:
    """Would catch a quantized factor projection kept: stock vLLM reads its packed bytes as numbers, or refuses it."""
    folder = write_drafter(tmp_path / "old", CONFIG, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    module = "lilicorr.out_head"
    encoded = encode(tensors.pop(f"{module}.weight"))._asdict()
    save_file(tensors | {f"{module}.{kind}": made for kind, made in encoded.items()}, folder / "model.safetensors")
    made, reports = convert(folder, tmp_path / "made")
    after = stored(made)
    assert torch.equal(after[f"{module}.weight"], decoded(stored(Checkpoint.open(folder)), module).bfloat16())
    assert set(after) == set(expected_tensors(DrafterGeometry.from_config(CONFIG)))
    assert [report["change"] for report in reports] == [f"decoded from {module_formats_of(folder, module)}"]
    assert "quantization_config" not in made.config


def module_formats_of(folder: Path, module: str) -> str:
    return module_formats(Checkpoint.open(folder).tensors)[module].value


def test_nvfp4_with_unequal_scales(tmp_path: Path) -> None:
    """Would catch the raw dictionary kept, fused linears with two scales, and values that changed unreported."""
    source = write_encoded(tmp_path / "old", lambda weight: nvfp4.encode(weight)._asdict(), RAW)
    made, reports = convert(source, tmp_path / "made")
    before, after = stored(Checkpoint.open(source)), stored(made)
    assert storage_findings(made.tensors) == []
    changed = {report["module"]: report["relative_error"] for report in reports}
    assert set(changed) == {"layers.0.mlp.gate_proj", "layers.1.mlp.gate_proj"}
    for module, form in module_formats(made.tensors).items():
        if form is Format.FLOAT:
            assert torch.equal(before[f"{module}.weight"], after[f"{module}.weight"])
        elif module in changed:
            old, new = decoded(before, module), decoded(after, module)
            assert ((new - old).norm() / old.norm()).item() == pytest.approx(changed[module], rel=1e-4)
            assert 0 < changed[module] < 0.05
        else:
            assert torch.equal(decoded(before, module), decoded(after, module))
    for layer in (0, 1):
        gate, up = (after[f"layers.{layer}.mlp.{name}_proj.weight_scale_2"] for name in ("gate", "up"))
        assert torch.equal(gate, up) and gate.shape == ()
    declared = made.config["quantization_config"]
    assert (declared["quant_method"], declared["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert declared["ignore"] == ["*.self_attn.*", "*lilicorr.*"]


@pytest.mark.parametrize("some_lack_it", [False, True])
def test_input_scales(tmp_path: Path, some_lack_it: bool) -> None:
    """Would catch W4A4 declared where a linear has no input_scale: vLLM reads uninitialised memory."""
    scales = iter(range(1, 100))

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        number = float(next(scales))
        given = {} if some_lack_it and number == 3 else {"input_scale": torch.tensor([number])}
        return nvfp4.encode(weight)._asdict() | given

    made, _ = convert(write_encoded(tmp_path / "old", encode, RAW), tmp_path / "made")
    assert made.config["quantization_config"]["quant_algo"] == ("W4A16_NVFP4" if some_lack_it else "NVFP4")
    found = {name: made.read(name) for name in made.tensors if name.endswith("input_scale")}
    assert bool(found) is not some_lack_it
    if found:
        gate, up = (found[f"layers.0.mlp.{name}_proj.input_scale"] for name in ("gate", "up"))
        assert torch.equal(gate, up) and gate.shape == ()


FP8_KINDS = (
    "one scale",
    "one scale and input_scale",
    "per row",
    "per row, two dimensions, bf16",
    "some per row, all with input_scale",
)


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_fp8(tmp_path: Path, kind: str) -> None:
    """Would catch an FP8 weight whose scale is lost, or declared static without an input_scale."""

    counter = iter(range(100))

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        per_row = kind.startswith("per row") or (kind.startswith("some") and next(counter) % 2)
        made = fp8.encode(weight, fp8.row_scales(weight) if per_row else None)._asdict()
        if "input_scale" in kind:
            made["input_scale"] = torch.tensor(0.5)
        if "two dimensions" in kind:
            made["weight_scale"] = made["weight_scale"][:, None].bfloat16()
        return made

    declared = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["layers.0.self_attn.q_proj"]}
    source = write_encoded(tmp_path / "old", encode, declared)
    made, reports = convert(source, tmp_path / "made")
    assert reports == [] and storage_findings(made.tensors) == []
    before, after = stored(Checkpoint.open(source)), stored(made)
    static = kind == "one scale and input_scale"
    assert made.config["quantization_config"]["quant_algo"] == ("FP8" if static else "FP8_PER_CHANNEL_PER_TOKEN")
    for module, form in module_formats(made.tensors).items():
        if form is Format.FP8:
            scale = after[f"{module}.weight_scale"]
            assert scale.dtype == torch.float32
            assert scale.shape == (() if static else (len(after[f"{module}.weight"]),))
            assert torch.equal(decoded(before, module), decoded(after, module))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from((1.0, 2.0, 4.0, 1.5, 1.01, 3.3, 100.0)))
def test_rescaling(seed: int, factor: float) -> None:
    """Would catch a ratio folded the wrong way round, and a power of two that is not exact."""
    weight = torch.randn((8, 64), generator=torch.Generator().manual_seed(seed))
    first = nvfp4.encode(weight)
    made, error = rescale(first, first.weight_scale_2 * factor)
    old, new = nvfp4.decode(*first), nvfp4.decode(*made)
    assert torch.equal(made.weight_scale_2, first.weight_scale_2 * factor)
    if factor == 1:
        assert error is None
    if factor in (1, 2, 4):
        assert torch.equal(old, new)
    else:
        assert ((new - old).norm() / old.norm()).item() == pytest.approx(error, abs=1e-6)
        assert error < 0.04


def test_two_formats_are_refused(tmp_path: Path) -> None:
    """Would catch FP8 weights under a declaration of NVFP4."""
    counter = iter(range(100))

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return (nvfp4 if next(counter) % 2 else fp8).encode(weight)._asdict()

    with pytest.raises(ValueError, match="as FP8 and .* as NVFP4; a converted checkpoint has one format"):
        convert(write_encoded(tmp_path / "old", encode, None), tmp_path / "made")


def test_half_a_product_is_refused(tmp_path: Path) -> None:
    """Would catch packed gate projections that a program which fuses gate and up reads as float."""
    source = write_drafter(tmp_path / "old", CONFIG)
    tensors = load_file(source / "model.safetensors")
    made = nvfp4.encode(tensors.pop("layers.1.mlp.gate_proj.weight"))._asdict()
    save_file(tensors | {f"layers.1.mlp.gate_proj.{k}": t for k, t in made.items()}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"gate_proj as nvfp4-w4a16 and layers.1.mlp.up_proj as float"):
        convert(source, tmp_path / "made")


def test_a_group_of_scale_zero_stays_zeros() -> None:
    """Would catch weights that appear where an exporter wrote a scale of zero."""
    stored = nvfp4.encode(torch.randn(4, 32))
    stored.weight_scale[1, 1] = 0
    made, _ = rescale(stored, stored.weight_scale_2 * 3)
    assert not nvfp4.decode(*made)[1, 16:].any()
    assert nvfp4.decode(*made)[1, :16].any()


def test_two_namings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    """Would catch one of two different tensors being dropped silently."""
    source = write_drafter(tmp_path / "old", CONFIG)
    tensors = load_file(source / "model.safetensors")
    tensors["model.fc.weight"] = tensors["fc.weight"] + 1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match="two namings of one tensor"):
        convert(source, tmp_path / "made")


def test_targets_are_refused(tmp_path: Path) -> None:
    """Would catch a target rewritten as if it were a drafter."""
    with pytest.raises(ValueError, match="is no LiLiCorr drafter"):
        convert(write_target(tmp_path / "target", target_config()), tmp_path / "made")
