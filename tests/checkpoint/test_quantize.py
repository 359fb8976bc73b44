# SPDX-License-Identifier: Apache-2.0
"""`lilicorr quantize`: what is quantized, how, and what is refused."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects import as_older_export
from pairs import drafter_config, target_config, write_drafter, write_target
from safetensors.torch import load_file, save_file

from vllm_lilicorr.checkpoint import fp8, nvfp4
from vllm_lilicorr.checkpoint.encoders import Encoder, choose_encoder
from vllm_lilicorr.checkpoint.layout import check_tensors, expected_tensors
from vllm_lilicorr.checkpoint.quantization import Format, logical_shapes, module_formats, storage_findings
from vllm_lilicorr.checkpoint.quantize import GROUPS, QuantizeOptions, plan_quantization
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.checkpoint.writer import write_checkpoint
from vllm_lilicorr.method.geometry import DrafterGeometry

CONFIG = drafter_config(has_own_lm_head=True, dflash_config={"conv_kernel_size": 2, "conv_group_size": 16})
DEFAULT = {"fc", "lm_head"} | {f"layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")}
ATTENTION = {f"layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"}
CONVOLUTIONS = {f"layers.{i}.{name}_conv.kernel_projection" for i in (0, 1) for name in ("attention", "mlp")}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 drafter with convolutions and an own LM head, in the older dialect."""
    folder = write_drafter(tmp_path_factory.mktemp("drafter") / "float", CONFIG, dtype=torch.bfloat16)
    (folder / "LICENSE").write_text("a licence")
    (folder / ".hidden").write_text("not a part of it")
    return as_older_export(folder)


def quantize(source: Path, destination: Path, form: Format, **options: Any) -> tuple[Checkpoint, list[dict[str, Any]]]:
    plan = plan_quantization(Checkpoint.open(source), QuantizeOptions(form, **options), Encoder())
    written = write_checkpoint(destination, plan)
    return Checkpoint.open(destination), [report for report in written.reports if report]


def quantized(checkpoint: Checkpoint) -> set[str]:
    return {name for name, form in module_formats(checkpoint.tensors).items() if form is not Format.FLOAT}


@pytest.mark.parametrize("form", [Format.NVFP4_W4A16, Format.NVFP4, Format.FP8])
def test_default_modules_and_their_values(drafter: Path, tmp_path: Path, form: Format) -> None:
    """Would catch a module missed or taken too many, another module's weight, and a wrong error in the report."""
    made, reports = quantize(drafter, tmp_path / "made", form)
    formats = module_formats(made.tensors)
    assert quantized(made) == DEFAULT and {formats[name] for name in DEFAULT} == {form}
    assert storage_findings(made.tensors) == []
    geometry = DrafterGeometry.from_config(made.config)
    check_tensors(geometry, logical_shapes(made.tensors))
    original = write_drafter(tmp_path / "float", CONFIG, dtype=torch.bfloat16)
    floats = load_file(original / "model.safetensors")
    errors = {report["module"]: report["relative_error"] for report in reports}
    assert set(errors) == DEFAULT
    for name in expected_tensors(geometry):
        module = name.removesuffix(".weight")
        if module not in DEFAULT:
            assert torch.equal(made.read(name), floats[name])
            continue
        if form is Format.FP8:
            decoded = fp8.decode(made.read(name), made.read(f"{name}_scale"))
        else:
            decoded = nvfp4.decode(made.read(name), made.read(f"{name}_scale"), made.read(f"{name}_scale_2"))
        error = ((decoded - floats[name].float()).norm() / floats[name].float().norm()).item()
        assert error == pytest.approx(errors[module], rel=1e-4)
        assert error < (0.04 if form is Format.FP8 else 0.13)


def test_written_files(drafter: Path, tmp_path: Path) -> None:
    """Would catch the known defects of real exports: raw dictionary, older names, a licence left behind."""
    made, reports = quantize(drafter, tmp_path / "made", Format.NVFP4_W4A16)
    declared = made.config.pop("quantization_config")
    assert made.config == CONFIG
    assert declared["quant_method"] == "modelopt" and declared["quant_algo"] == "W4A16_NVFP4"
    assert "input_activations" not in declared["config_groups"]["group_0"]
    assert made.hf_quant_config == {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": declared["ignore"],
        },
    }
    assert sorted(path.name for path in made.folder.iterdir()) == [
        "LICENSE", "config.json", "hf_quant_config.json", "model.safetensors"
    ]  # fmt: skip
    assert sum(report["bytes_after"] for report in reports) < 0.3 * sum(report["bytes_before"] for report in reports)


def test_fused_linears_share_a_scale(drafter: Path, tmp_path: Path) -> None:
    """Would catch gate and up, or q, k and v, mis-scaled by vLLM's fusion, which keeps the largest scale."""
    made, _ = quantize(drafter, tmp_path / "made", Format.NVFP4, quantize=("attention",))
    floats = load_file(write_drafter(tmp_path / "float", CONFIG, dtype=torch.bfloat16) / "model.safetensors")
    for layer in ("layers.0", "layers.1"):
        for names in (("mlp.gate_proj", "mlp.up_proj"), tuple(f"self_attn.{name}_proj" for name in "qkv")):
            (scale,) = {made.read(f"{layer}.{name}.weight_scale_2").item() for name in names}
            largest = max(floats[f"{layer}.{name}.weight"].abs().max().item() for name in names)
            assert scale == pytest.approx(largest / 2688)
        assert made.read(f"{layer}.mlp.down_proj.input_scale").item() == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"quantize": ("attention",)}, DEFAULT | ATTENTION),
        ({"quantize": ("convolutions",)}, DEFAULT | CONVOLUTIONS),
        ({"keep": ("fc", "lm-head")}, DEFAULT - {"fc", "lm_head"}),
        ({"keep": ("mlp",), "quantize": ("attention",)}, {"fc", "lm_head"} | ATTENTION),
    ],
)
def test_groups_are_switched(drafter: Path, tmp_path: Path, options: dict[str, Any], expected: set[str]) -> None:
    """Would catch a switch that does nothing, or one that reaches another group's modules."""
    made, _ = quantize(drafter, tmp_path / "made", Format.NVFP4_W4A16, **options)
    assert quantized(made) == expected


def test_the_heads_small_linear_stays_float(drafter: Path, tmp_path: Path) -> None:
    """Would catch the five features packed into a group of 16: no program reads that."""
    made, _ = quantize(drafter, tmp_path / "made", Format.NVFP4_W4A16, quantize=("head",))
    head = {name for name in quantized(made) if name.startswith("lilicorr.")}
    assert "lilicorr.layers.1.attn.out_proj" in head and "lilicorr.feature_mlp.down_proj" in head
    assert not {"lilicorr.feature_mlp.up_proj", "lilicorr.factor_input_proj", "lilicorr.out_head"} & head


def test_a_tail_that_fills_no_group_stays_float(tmp_path: Path) -> None:
    """Would catch a K that is no multiple of 16 being packed with a filled group, which vLLM refuses to load."""
    source = write_drafter(tmp_path / "float", drafter_config(intermediate_size=72))
    made, _ = quantize(source, tmp_path / "made", Format.NVFP4_W4A16)
    assert "layers.0.mlp.down_proj" not in quantized(made) and "layers.0.mlp.up_proj" in quantized(made)
    assert "*.mlp.down_proj" in made.config["quantization_config"]["ignore"]


def test_a_target_keeps_its_names(tmp_path: Path) -> None:
    """Would catch a target under a drafter's names, or without its tokenizer."""
    source = write_target(tmp_path / "float", target_config(), dtype=torch.bfloat16)
    (source / "tokenizer.json").write_text("{}")
    made, _ = quantize(source, tmp_path / "made", Format.NVFP4)
    floats = load_file(source / "model.safetensors")
    assert {name for name in made.tensors if name.endswith("weight")} == set(floats)
    assert quantized(made) == {name.removesuffix(".weight").removeprefix("model.") for name in floats
                               if "_proj" in name}  # fmt: skip
    assert made.config["quantization_config"]["ignore"] == ["lm_head"]
    assert (made.folder / "tokenizer.json").is_file()


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """Would catch experts or mamba layers left in float under a declaration that says they are not."""
    source = write_target(tmp_path / "float", target_config())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(16, 16)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj\.weight; besides LiLiCorr drafters, only dense"):
        quantize(source, tmp_path / "made", Format.NVFP4)


def test_quantized_checkpoints_are_not_quantized_again(drafter: Path, tmp_path: Path) -> None:
    """Would catch codes taken for weights."""
    quantize(drafter, tmp_path / "once", Format.FP8)
    with pytest.raises(ValueError, match="as fp8; only float weights are quantized"):
        quantize(tmp_path / "once", tmp_path / "twice", Format.NVFP4)


def test_contradictory_groups_and_nothing_to_do(drafter: Path, tmp_path: Path) -> None:
    """Would catch a switch that silently loses, and a checkpoint that is declared quantized and is not."""
    with pytest.raises(ValueError, match="fc is in --quantize and in --keep"):
        quantize(drafter, tmp_path / "made", Format.NVFP4, quantize=("fc",), keep=("fc",))
    with pytest.raises(ValueError, match="None of .* is to be quantized"):
        quantize(drafter, tmp_path / "made", Format.NVFP4, keep=("fc", "mlp", "lm-head"))


def test_input_scale(drafter: Path, tmp_path: Path) -> None:
    """Would catch an option that is ignored, or activations divided by zero."""
    made, _ = quantize(drafter, tmp_path / "made", Format.NVFP4, input_scale=0.25)
    assert {made.read(name).item() for name in made.tensors if name.endswith("input_scale")} == {0.25}
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="activations are divided by it"):
            QuantizeOptions(Format.NVFP4, input_scale=scale)
    with pytest.raises(ValueError, match="nvfp4-w4a16 has no scale of activations"):
        QuantizeOptions(Format.NVFP4_W4A16, input_scale=0.25)


def test_a_broken_weight_is_named(tmp_path: Path) -> None:
    """Would catch NaN being quantized, or an error that does not say where."""
    source = write_drafter(tmp_path / "float", drafter_config())
    tensors = load_file(source / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.\w+_proj\.weight: The weight holds NaN"):
        quantize(source, tmp_path / "made", Format.NVFP4)
    assert not (tmp_path / "made").exists()


def test_every_group_is_offered_by_the_command() -> None:
    """Would catch a group that the command line does not know: it is parsed before torch is imported."""
    from vllm_lilicorr.cli import QUANTIZED_GROUPS

    assert set(QUANTIZED_GROUPS) == set(GROUPS)


def test_model_optimizer_is_used_where_it_is_installed(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch an encoder "auto" that never calls Model Optimizer, or calls it with the wrong scales.

    A stand-in with Model Optimizer's names encodes by our functions and counts; the real one is compared by bytes in
    test_golden_bytes.py.
    """
    calls: list[str] = []

    class NVFP4QTensor:
        @staticmethod
        def get_weights_scaling_factor(weight, block_size, scale_2):
            assert block_size == 16
            return nvfp4.encode(weight, scale_2).weight_scale, scale_2

    def to_quantized_weight(weight, scale, quantization, scale_2=None, block_size=None):
        calls.append(quantization)
        if quantization == "fp8_pc_pt":
            return fp8.encode(weight, scale).weight
        return nvfp4.encode(weight, scale_2).weight

    names = ("modelopt", "modelopt.torch", "modelopt.torch.export", "modelopt.torch.quantization")
    for name in (*names, "modelopt.torch.export.quant_utils", "modelopt.torch.quantization.qtensor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["modelopt"].__version__ = "0.47.0"
    sys.modules["modelopt.torch.quantization.qtensor"].NVFP4QTensor = NVFP4QTensor
    utils = sys.modules["modelopt.torch.export.quant_utils"]
    utils.to_quantized_weight = to_quantized_weight
    utils.QUANTIZATION_W4A16_NVFP4, utils.QUANTIZATION_FP8_PC_PT = "w4a16_nvfp4", "fp8_pc_pt"
    encoder = choose_encoder("auto")
    assert encoder.name == "modelopt 0.47.0"
    for form, word in ((Format.NVFP4, "w4a16_nvfp4"), (Format.FP8, "fp8_pc_pt")):
        calls.clear()
        plan = plan_quantization(Checkpoint.open(drafter), QuantizeOptions(form), encoder)
        write_checkpoint(tmp_path / f"theirs {form}", plan)
        assert calls == [word] * len(DEFAULT)
        quantize(drafter, tmp_path / f"ours {form}", form)
        theirs, ours = (tmp_path / f"{who} {form}" / "model.safetensors" for who in ("theirs", "ours"))
        assert theirs.read_bytes() == ours.read_bytes()


def test_model_optimizer_is_asked_for_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a silent fallback where the user asked for Model Optimizer, or a traceback."""
    monkeypatch.setitem(sys.modules, "modelopt", None)
    assert choose_encoder("auto").name == "builtin"
    with pytest.raises(ValueError, match=r"cannot be imported .* Install vllm-lilicorr\[modelopt\]"):
        choose_encoder("modelopt")


def test_the_drafter_is_in_the_older_dialect(drafter: Path) -> None:
    """Would catch a test drafter that is in today's dialect already: nothing would be proved by it."""
    config = json.loads((drafter / "config.json").read_text())
    assert "block_size" not in config and config["architectures"] == ["DFlashDraftModel"]
