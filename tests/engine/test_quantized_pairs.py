# SPDX-License-Identifier: Apache-2.0
"""Quantized drafters and targets in an engine: the draft tokens of the decoded weights, whatever is declared.

Every drafter is compared with a float one that holds its decoded weights. Small
random pairs on both runners, then the trained pair, quantized here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, greedy, tokens
from interpreter import run_engines
from pairs import drafter_config, target_config, write_checkpoint, write_drafter, write_target
from quantized import (
    Tensors,
    compressed_tensors,
    converted,
    decode_tensors,
    linears,
    quantize_tensors,
    raw,
    with_prefix,
)
from safetensors.torch import load_file
from test_draft_tokens import (
    VOCAB_SIZE,
    drafts_by_position,
    edit,
    favour_few_tokens,
    random_prompts,
    rename_as_exported,
)

from vllm_lilicorr.checkpoint.quantization import Format
from vllm_lilicorr.engine.cpu_nvfp4 import CpuNvFp4LinearKernel

pytestmark = pytest.mark.slow

W4A16, FP8 = Format.NVFP4_W4A16, Format.FP8
TRAINERS_PATTERNS = ["dflash_module.lilicorr*", "model*", "lm_head"]
# Local numbers: vLLM's drafter starts at layer 3 here, and its layers 0 and 1 are the target's.
FLOAT_IN_FP8 = ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj", "fc")
FLOAT_IN_NVFP4 = ("layers.0.self_attn.k_proj", "layers.1.mlp.up_proj")
# Name: (the weights it holds, config.json's quantization_config, hf_quant_config.json).
DRAFTERS: dict[str, tuple[str, Any, Any]] = {
    "declared": ("nvfp4", converted(ignore=["lilicorr", *FLOAT_IN_NVFP4]), None),
    "misdeclared": ("nvfp4", raw(exclude=TRAINERS_PATTERNS), raw(exclude=TRAINERS_PATTERNS)),
    "compressed-tensors": ("fp8", compressed_tensors(FLOAT_IN_FP8), None),
}
WEIGHTS = ("nvfp4", "fp8")
MISDECLARED = "misdeclared"


def quantized_weights(name: str, tensors: Tensors) -> Tensors:
    """FP8 with float layers; NVFP4 with a scale for each shard, float shards beside quantized ones, a quantized part
    of the correlator and a quantized LM head."""
    modules = linears(tensors)
    if name == "fp8":
        return quantize_tensors(tensors, {module: FP8 for module in modules if module not in FLOAT_IN_FP8})
    modules = [module for module in modules if module not in FLOAT_IN_NVFP4] + ["lilicorr.context_proj", "lm_head"]
    return quantize_tensors(tensors, dict.fromkeys(modules, W4A16), one_scale=False)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("quantized")
    target = write_target(folder / "target", target_config(vocab_size=VOCAB_SIZE, tie_word_embeddings=False))
    edit(target, lambda tensors: favour_few_tokens(tensors, "model.embed_tokens.weight", "lm_head.weight"))
    engines = {}

    def add(name: str, drafter: Path) -> None:
        speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": 7}
        speculative["draft_sample_method"] = "greedy"
        engines[name] = {"target": target, "prompts": random_prompts(), "sampling": {"max_tokens": 14}}
        engines[name]["speculative_config"] = speculative

    stored = {}
    for weights in WEIGHTS:
        config = drafter_config(vocab_size=VOCAB_SIZE, has_own_lm_head=weights == "nvfp4")
        base = load_file(write_drafter(folder / f"{weights} base", config) / "model.safetensors")
        if weights == "nvfp4":
            favour_few_tokens(base, None, "lm_head.weight")
        stored[weights] = quantized_weights(weights, base)
        add(weights, write_checkpoint(folder / weights, config, decode_tensors(stored[weights])))
    for name, (weights, declared, own_file) in DRAFTERS.items():
        config = drafter_config(vocab_size=VOCAB_SIZE, has_own_lm_head=weights == "nvfp4")
        config["quantization_config"] = declared
        tensors = with_prefix(stored[weights]) if name == MISDECLARED else stored[weights]
        drafter = write_checkpoint(folder / name, config, tensors)
        if own_file is not None:
            (drafter / "hf_quant_config.json").write_text(json.dumps(own_file))
        add(name, drafter)
    rename_as_exported(folder / MISDECLARED)
    return engines


@pytest.fixture(scope="module")
def results(engines: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("jobs")
    on_v2 = {MISDECLARED: engines[MISDECLARED]}
    return {"v1": run_engines("v1", "ours", engines, folder), "v2": run_engines("v2", "ours", on_v2, folder)}


@pytest.mark.parametrize(("runner", "name"), [*(("v1", name) for name in DRAFTERS), ("v2", MISDECLARED)])
def test_drafts_are_those_of_the_decoded_weights(results, runner: str, name: str) -> None:
    """Would catch each defect of real exports: a rejected dictionary, float weights read as quantized, shards under
    a neighbour's scale, layers numbered from zero, an LM head of packed bytes."""
    found = drafts_by_position(results[runner][name])
    wanted = drafts_by_position(results["v1"][DRAFTERS[name][0]])
    assert found == wanted and len(wanted) > 10
    assert results[runner][name]["outputs"] == results["v1"]["fp8"]["outputs"]
    assert found != drafts_by_position(results["v1"]["fp8" if DRAFTERS[name][0] == "nvfp4" else "nvfp4"])


NUM_PROMPTS, MAX_TOKENS = 64, 40


@pytest.fixture(scope="module")
def trained(pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The trained pair's halves, their linears in NVFP4."""
    folder, made = tmp_path_factory.mktemp("trained"), {}
    for name, source in (("target", pair.target), ("drafter", pair.drafter)):
        config = json.loads((source / "config.json").read_text())
        stored = load_file(source / "model.safetensors")
        forms = [Format.NVFP4_W4A16, Format.NVFP4] if name == "drafter" else [Format.NVFP4_W4A16]
        for form in forms:
            quantized = quantize_tensors(stored, dict.fromkeys(linears(stored), form))
            algorithm = "NVFP4" if form is Format.NVFP4 else "W4A16_NVFP4"
            config["quantization_config"] = converted(algorithm, ignore=["lm_head"])
            made[f"{name} {form}"] = write_checkpoint(folder / f"{name}-{form}", config, quantized)
    return made


@pytest.fixture(scope="module")
def float32_allowed():
    """vLLM lists the dtypes of its GPU kernels; in bfloat16 tokens would differ by batch size alone."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelOptNvFp4Config, "get_supported_act_dtypes", lambda self: [torch.float32, torch.bfloat16])
        yield


def test_an_nvfp4_pair_serves(lilicorr_engine, trained, prompts, float32_allowed, record_property) -> None:
    """Would catch a quantized drafter whose acceptance collapses without a word, and one that changes the output."""
    chosen, params = prompts[:NUM_PROMPTS], greedy(MAX_TOKENS)
    counters = lilicorr_engine.counters
    before = (counters.drafts, counters.accepted)
    lilicorr_engine.generate(chosen, params)
    lengths = {"float": 1 + (counters.accepted - before[1]) / (counters.drafts - before[0])}
    with Engine(trained["target nvfp4-w4a16"]) as engine:
        expected = tokens(engine.generate(chosen, params))
    for drafter in ("drafter nvfp4-w4a16", "drafter nvfp4"):
        with Engine(trained["target nvfp4-w4a16"], trained[drafter]) as engine:
            assert tokens(engine.generate(chosen, params)) == expected, drafter
            lengths[drafter] = 1 + engine.counters.accepted / engine.counters.drafts
            models = {"target": engine.runner.model, drafter: engine.proposer.model}
            for name, model in models.items():
                assert packed_layers(model), name
                check_memory(model, trained[f"{name} nvfp4-w4a16" if name == "target" else name])
    record_property("tokens per step", lengths)
    assert min(lengths.values()) > lengths["float"] - 0.15, lengths


def packed_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    kernels = [getattr(getattr(layer, "quant_method", None), "kernel", None) for layer in model.modules()]
    methods = [getattr(getattr(layer, "quant_method", None), "method", None) for layer in model.modules()]
    kernels += [getattr(method, "kernel", None) for method in methods]
    return [kernel for kernel in kernels if isinstance(kernel, CpuNvFp4LinearKernel)]


def check_memory(model: torch.nn.Module, checkpoint: Path) -> None:
    """The quantized linears take no more than the checkpoint's packed bytes and 64 bytes each for scalars."""
    stored = load_file(checkpoint / "model.safetensors")
    kinds = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    packed = sum(
        stored[name].nbytes for module in linears(stored) for kind in kinds if (name := f"{module}.{kind}") in stored
    )
    layers = [layer for layer in model.modules() if getattr(layer, "weight", torch.empty(0)).dtype is torch.uint8]
    tensors = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert 0.99 * packed < sum(storages.values()) <= packed + 64 * len(layers), (sum(storages.values()), packed)
