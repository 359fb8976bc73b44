# SPDX-License-Identifier: Apache-2.0
"""The drafter's quantization without an engine: names, formats, what is decoded, what vLLM's layers get."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import drafter_config, random_tensors, write_checkpoint
from quantized import compressed_tensors, converted, decode_tensors, linears, quantize_tensors, raw
from transformers import PretrainedConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptLinearMethod, ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticTokenSym
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_lilicorr.checkpoint import nvfp4
from vllm_lilicorr.checkpoint.layout import expected_tensors
from vllm_lilicorr.checkpoint.quantization import Format
from vllm_lilicorr.checkpoint.reader import scan
from vllm_lilicorr.engine import drafter_quantization, seams
from vllm_lilicorr.engine.drafter_quantization import (
    DrafterQuantizationConfig,
    LoadPlan,
    linear_of,
    loadable,
    number_layers,
    stored_quantization,
)
from vllm_lilicorr.engine.shard_scales import ShardScales
from vllm_lilicorr.engine.speculative_config import rewrite_draft_config
from vllm_lilicorr.method.geometry import DrafterGeometry

W4A16, W4A4, FP8, FLOAT = Format.NVFP4_W4A16, Format.NVFP4, Format.FP8, Format.FLOAT
QKV = [f"layers.0.self_attn.{name}_proj" for name in "qkv"]
QKV_LINEAR = "layers.0.self_attn.qkv_proj"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    geometry = DrafterGeometry.from_config(drafter_config(has_own_lm_head=True))
    return random_tensors(expected_tensors(geometry), 3, torch.bfloat16)


def layer(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """A layer of vLLM that only its type is asked of."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


@pytest.mark.parametrize(
    ("module", "linear"),
    [
        ("layers.0.self_attn.q_proj", "layers.0.self_attn.qkv_proj"),
        ("layers.12.self_attn.v_proj", "layers.12.self_attn.qkv_proj"),
        ("layers.3.self_attn.o_proj", "layers.3.self_attn.o_proj"),
        ("layers.3.mlp.up_proj", "layers.3.mlp.gate_up_proj"),
        ("layers.3.mlp.down_proj", "layers.3.mlp.down_proj"),
        ("fc", "fc"),
        ("lm_head", "lm_head"),
        ("lilicorr.layers.0.mlp.up_proj", None),
        ("lilicorr.layers.0.attn.out_proj", None),
        ("layers.0.attention_conv.kernel_projection", None),
        ("layers.0.self_attn.q_norm", None),
        ("embed_tokens", None),
    ],
)
def test_modules_of_vllm(module: str, linear: str | None) -> None:
    """Would catch the head's up_proj taken for a backbone linear, and a convolution served in NVFP4."""
    assert linear_of(module) == linear


@pytest.mark.parametrize(
    ("shards", "on_cpu", "served", "decoded"),
    [
        ((W4A16, W4A16, W4A16), True, W4A16, 0),
        ((W4A4, W4A4, W4A4), True, W4A4, 0),
        ((W4A4, W4A16, W4A4), False, W4A16, 0),  # activations are rounded for all shards or for none
        ((FP8, FP8, FP8), False, FP8, 0),
        ((FP8, FP8, FP8), True, None, 3),
        ((W4A16, FLOAT, W4A16), False, None, 2),
        ((W4A16, FP8, FP8), False, None, 3),
        ((FLOAT, FLOAT, FLOAT), True, None, 0),
    ],
)
def test_fused_shards_are_served_in_one_format(shards, on_cpu: bool, served: Format | None, decoded: int) -> None:
    """Would catch the format of one shard applied to its neighbours: noise where they were stored otherwise."""
    plan = LoadPlan.of(dict(zip(QKV, shards, strict=True)), own_lm_head=False, on_cpu=on_cpu)
    assert plan.served == ({QKV_LINEAR: served} if served else {})
    assert len(plan.decoded) == decoded
    assert len(plan.mixed) == (decoded if len(set(shards)) > 1 else 0)
    # A missing shard reads as float.
    config = {"stored": {m: f for m, f in zip(QKV, shards, strict=True) if f != FLOAT}, "own_lm_head": False}
    if on_cpu:
        assert DrafterQuantizationConfig.from_config(config).plan.served == plan.served


def test_an_lm_head_is_served_where_it_is_the_drafters() -> None:
    """Would catch a packed LM head loaded into the float one that the target's will replace."""
    for own in (True, False):
        plan = LoadPlan.of({"lm_head": W4A16}, own_lm_head=own, on_cpu=True)
        assert ("lm_head" in plan.served, "lm_head" in plan.decoded) == (own, not own)


@given(first=st.integers(0, 200), index=st.integers(0, 60), part=st.sampled_from(["self_attn.qkv_proj", "mlp.x"]))
def test_layers_are_numbered_after_the_targets(first: int, index: int, part: str) -> None:
    """Would catch exclusions of layer 1 applied to layer 11, and of the target's layers to the drafter's."""
    config = DrafterQuantizationConfig(LoadPlan({}, (), ()), first)
    assert config.checkpoint_name(f"model.layers.{first + index}.{part}") == f"layers.{index}.{part}"
    assert config.checkpoint_name("model.fc") == "fc"
    assert config.checkpoint_name("lm_head") == "lm_head"


def test_methods_are_vllms() -> None:
    """Would catch a float layer read as quantized, numbered from zero, or an FP8 scale that fusion loses."""
    plan = LoadPlan({QKV_LINEAR: W4A16, "layers.0.mlp.down_proj": W4A4, "fc": FP8, "lm_head": W4A16}, (), ())
    config = DrafterQuantizationConfig(plan, first_layer=10)
    linear, lm_head = layer(LinearBase), layer(ParallelLMHead)
    method = config.get_quant_method(linear, "model.layers.10.self_attn.qkv_proj")
    assert isinstance(method, ShardScales) and method.method.spec.activation is None
    method = config.get_quant_method(linear, "model.layers.10.mlp.down_proj")
    assert isinstance(method, ModelOptLinearMethod) and method.spec.activation is not None
    method = config.get_quant_method(linear, "model.fc")
    assert (method.spec.weight, method.spec.activation) == (kFp8StaticTokenSym, kFp8DynamicTokenSym)
    assert isinstance(config.get_quant_method(lm_head, "lm_head"), ModelOptLinearMethod)
    for name in ("model.layers.0.self_attn.qkv_proj", "model.layers.10.mlp.gate_up_proj", "model.layers.11.mlp.x"):
        assert isinstance(config.get_quant_method(linear, name), UnquantizedLinearMethod), name
    assert config.get_quant_method(torch.nn.Identity(), "model.layers.10.self_attn.attn") is None


def test_the_targets_number_of_layers_reaches_the_configuration() -> None:
    """Would catch a drafter numbered from zero, all of whose linears would be float."""
    quantization = {"quant_method": "lilicorr", "stored": {"fc": "nvfp4"}, "own_lm_head": False}
    hf_config = SimpleNamespace(quantization_config=dict(quantization))
    number_layers(hf_config, 37)
    assert DrafterQuantizationConfig.from_config(hf_config.quantization_config).first_layer == 37
    for other in (SimpleNamespace(), SimpleNamespace(quantization_config={"quant_method": "modelopt"})):
        before = dict(vars(other))
        number_layers(other, 37)
        assert vars(other) == before


# What exporters declare, whatever the tensors are: config.json's quantization_config and hf_quant_config.json.
DECLARATIONS = {
    "converted": (converted(ignore=["lm_head"]), None),
    "raw": (raw(exclude=["dflash_module.lilicorr*", "model*", "lm_head"]), None),
    "own file": (None, raw()),
    "nothing": (None, None),
    "everything": (converted("NVFP4"), raw("NVFP4")),
    "compressed-tensors": (compressed_tensors(["lm_head", "re:.*"]), None),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["layers.0.mlp.up_proj"]}, None),
}


@pytest.mark.parametrize("name", DECLARATIONS)
@pytest.mark.parametrize("form", [W4A16, FP8, FLOAT])
def test_tensors_decide_what_vllm_gets(tmp_path, tensors, form: Format, name: str) -> None:
    """Would catch a declaration that reaches vLLM: each of these made it reject or misread a drafter."""
    stored = quantize_tensors(tensors, {module: form for module in linears(tensors) if form is not FLOAT})
    config = drafter_config(has_own_lm_head=True)
    declared, own_file = DECLARATIONS[name]
    if declared is not None:
        config["quantization_config"] = declared
    write_checkpoint(tmp_path, config, stored)
    if own_file is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(own_file))
    before = PretrainedConfig(**config, compression_config=declared)
    before.name_or_path = str(tmp_path)
    after = rewrite_draft_config(lambda c: c, None, before)
    assert not hasattr(after, "compression_config")
    if form is FLOAT:
        assert not hasattr(after, "quantization_config")
    else:
        expected = {module: form.value for module in linears(tensors)}
        assert after.quantization_config == {"quant_method": "lilicorr", "stored": expected, "own_lm_head": True}


def test_a_weight_without_scales_is_an_error(tmp_path, tensors) -> None:
    """Would catch scales of one, or a NaN in vLLM's kernel, for a weight that nothing can decode."""
    stored = quantize_tensors(tensors, {"fc": W4A16})
    del stored["fc.weight_scale_2"]
    write_checkpoint(tmp_path, drafter_config(), stored)
    with pytest.raises(ValueError, match=r"fc has no weight_scale_2: a NVFP4 weight cannot be read without it"):
        stored_quantization(scan(tmp_path)[0], False, on_cpu=True)


def test_what_is_decoded_is_said_once(tmp_path, tensors, caplog) -> None:
    """Would catch silence about memory that nobody expects, and the same line from every layer."""
    modules = {module: FP8 for module in linears(tensors)} | {QKV[0]: W4A16, QKV[1]: W4A16}
    write_checkpoint(tmp_path, drafter_config(), quantize_tensors(tensors, modules))
    drafter_quantization._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "vllm.lilicorr"):
        logging.getLogger("vllm.lilicorr").addHandler(caplog.handler)
        for _ in range(2):
            stored_quantization(scan(tmp_path)[0], False, on_cpu=True)
        logging.getLogger("vllm.lilicorr").removeHandler(caplog.handler)
    said = {record.getMessage() for record in caplog.records}
    assert len(caplog.records) in (2, 4)  # once, or once more by propagation
    mixed, decoded = sorted(said, key=lambda text: "CPU" in text)
    assert ", ".join(sorted(QKV)) in mixed and "decoded to float" in mixed
    assert "on the CPU platform its FP8 weights are decoded" in decoded


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize("per_row", [False, True])
def test_fp8_on_the_cpu_is_decoded(tensors, per_row: bool) -> None:
    """Would catch a scale per row read as one, or the numbers without it."""
    stored = quantize_tensors(tensors, {module: FP8 for module in linears(tensors)}, per_row=per_row, one_scale=False)
    found = loadable(stored, own_lm_head=True, on_cpu=True, dtype=torch.float32)
    assert_equal(found, decode_tensors(stored))


@pytest.mark.parametrize("per_row", [False, True])
def test_fp8_elsewhere_has_a_scale_for_each_row(tensors, per_row: bool) -> None:
    """Would catch q, k and v under the largest of their scales, and an input_scale that no layer takes."""
    stored = quantize_tensors(tensors, {module: FP8 for module in linears(tensors)}, per_row=per_row, one_scale=False)
    stored["fc.input_scale"] = torch.tensor(0.5)
    stored["layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    found = loadable(stored, own_lm_head=True, on_cpu=False, dtype=torch.bfloat16)
    assert "fc.input_scale" not in found and "layers.0.self_attn.k_proj.k_scale" not in found
    for module in linears(tensors):
        weight, scale = found[f"{module}.weight"], found[f"{module}.weight_scale"]
        assert weight.dtype == torch.float8_e4m3fn and scale.shape == (len(weight),)
        assert torch.equal(weight.float() * scale[:, None], decode_tensors(stored)[f"{module}.weight"])


def test_what_no_linear_of_vllm_serves_is_decoded(tensors) -> None:
    """Would catch packed bytes in our head, or in a fused linear whose other shards are float."""
    modules = {QKV[1]: W4A16, "lilicorr.layers.0.attn.out_proj": W4A16, "lilicorr.pass_hidden_proj": FP8, "fc": W4A4}
    stored = quantize_tensors(tensors, modules)
    found = loadable(stored, own_lm_head=True, on_cpu=True, dtype=torch.float32)
    wanted = decode_tensors(stored) | {name: stored[name] for name in stored if name.startswith("fc.")}
    assert_equal(found, wanted)
    # A neighbour without input_scale leaves activations alone, so none is left to load.
    stored = quantize_tensors(tensors, {QKV[0]: W4A4, QKV[1]: W4A16, QKV[2]: W4A4})
    found = loadable(stored, own_lm_head=True, on_cpu=True, dtype=torch.float32)
    assert not any(name.endswith("input_scale") for name in found)
    assert found.keys() == {name for name in stored if not name.endswith("input_scale")}


def test_a_foreign_lm_head_is_left_out(tensors) -> None:
    """Would catch an LM head of an export that the drafter does not use, packed or not, at the wrong shape."""
    stored = quantize_tensors(tensors, {"lm_head": W4A16})
    found = loadable(stored, own_lm_head=False, on_cpu=True, dtype=torch.float32)
    assert not any(name.startswith("lm_head") for name in found)


@pytest.mark.parametrize("form", [W4A16, W4A4])
def test_shards_keep_their_own_scale(monkeypatch, form: Format) -> None:
    """Would catch what vLLM does: the largest weight_scale_2 for all shards, here 40 times too large for one."""
    from vllm.model_executor import parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    seams.install_cpu_nvfp4()
    widths = [48, 16, 16]
    weights = [torch.randn(width, 64) * size for width, size in zip(widths, (1.0, 40.0, 3.0), strict=True)]
    encoded = [nvfp4.encode(weight) for weight in weights]
    algorithm = "NVFP4" if form is W4A4 else "W4A16_NVFP4"

    def built(exact: bool) -> torch.nn.Module:
        linear = layer(LinearBase)
        method = ModelOptNvFp4Config(algorithm, True, None, []).get_quant_method(linear, "qkv_proj")
        linear.quant_method = ShardScales(method) if exact else method
        with set_current_vllm_config(VllmConfig()):
            linear.quant_method.create_weights(linear, 64, widths, 64, 80, torch.float32, weight_loader=None)
        linear.weight.data.copy_(torch.cat([part.weight for part in encoded]))
        linear.weight_scale.data.copy_(torch.cat([part.weight_scale.float() for part in encoded]))
        linear.weight_scale_2.data.copy_(torch.stack([part.weight_scale_2 for part in encoded]))
        if form is W4A4:
            linear.input_scale.data.fill_(0.01)
        linear.quant_method.process_weights_after_loading(linear)
        return linear

    x, bias = torch.randn(5, 64), torch.randn(80)
    exact, stock = built(True), built(False)
    seen = x
    if form is W4A4:
        from vllm_lilicorr.engine.cpu_nvfp4 import round_activations

        seen = round_activations(x, exact.input_global_scale_inv)
    wanted = torch.cat([seen @ nvfp4.decode(*part).T for part in encoded], dim=-1)
    # Outputs of some hundreds, summed and scaled in another order.
    close = {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(exact.quant_method.apply(exact, x), wanted, **close)
    torch.testing.assert_close(exact.quant_method.apply(exact, x, bias), wanted + bias, **close)
    wrong = stock.quant_method.apply(stock, x)
    assert (wrong[:, :48] - wanted[:, :48]).abs().max() > 10, "vLLM keeps the scales: the factors can go"


def test_equal_scales_cost_nothing(monkeypatch) -> None:
    """Would catch a multiplication by one in every step of every clean drafter."""
    made = layer(LinearBase)
    made.register_parameter("weight_scale_2", torch.nn.Parameter(torch.full((3,), 0.5)))
    made.logical_widths = [4, 2, 2]
    calls = []
    inner = SimpleNamespace(
        process_weights_after_loading=lambda layer: calls.append(layer.weight_scale_2.tolist()),
        apply=lambda layer, x, bias=None: calls.append(bias) or x,
    )
    method = ShardScales(inner)
    method.process_weights_after_loading(made)
    x, bias = torch.randn(2, 8), torch.randn(8)
    assert method.apply(made, x, bias) is x
    assert calls[0] == [0.5] * 3 and calls[1] is bias
