# SPDX-License-Identifier: Apache-2.0
"""Writes a drafter of the published Super-VL geometry with random weights, 1.35 GB, and a target that fits it.

    python tests/published_geometry.py FOLDER

Dimensions as far as the published parts add up: 1.128 billion parameters and an LM head;
MLP, feature projection and LM head in NVFP4 (weight only), everything else BF16.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from pairs import drafter_config, target_config

from vllm_lilicorr.checkpoint.layout import expected_tensors
from vllm_lilicorr.method.geometry import DrafterGeometry

QUANTIZED = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "fc.weight", "lm_head.weight")
VOCAB_SIZE = 131072
TARGET_LAYERS = 88


def config() -> dict[str, Any]:
    parts = ("self_attn", "attention_conv", "mlp_conv")
    ignored = ["lilicorr*", *(f"layers.{layer}.{part}*" for layer in range(5) for part in parts)]
    return drafter_config(
        hidden_size=4096,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=262144,
        sliding_window=8192,
        use_sliding_window=True,
        layer_types=["sliding_attention"] * 5,
        has_own_lm_head=True,
        num_target_layers=TARGET_LAYERS,
        torch_dtype="bfloat16",
        dflash_config={
            "mask_token_id": 1,
            "target_layer_ids": [1, 22, 43, 64, 85],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "lilicorr_hidden_size": 1024,
            "lilicorr_num_heads": 16,
            "lilicorr_factor_dim": 1024,
        },
        quantization_config={
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "group_size": 16,
            "ignore": ignored,
        },
    )  # fmt: skip


def write_published_geometry(folder: Path) -> Path:
    """The drafter's folder; its tensors lie in one file."""
    folder.mkdir(parents=True)
    values = config()
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_tensors(DrafterGeometry.from_config(values)).items():
        tensors |= _random(name, shape, generator)
    _save(tensors, folder / "model.safetensors")
    return folder


def write_fitting_target(folder: Path) -> Path:
    """A Qwen3 target with the published hidden size, vocabulary and depth, and layers as narrow as vLLM takes."""
    from pairs import random_tensors

    folder.mkdir(parents=True)
    values = target_config(
        hidden_size=4096, intermediate_size=32, num_hidden_layers=TARGET_LAYERS, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, vocab_size=VOCAB_SIZE, max_position_embeddings=4096,
        torch_dtype="bfloat16",
    )  # fmt: skip
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, 4096), "model.norm.weight": (4096,)}
    for layer in range(TARGET_LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{norm}.weight": (4096,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}.self_attn.{part}_proj.weight": (32, 4096) for part in "qkv"}
        shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (32,) for part in "qk"}
        shapes |= {f"{prefix}.self_attn.o_proj.weight": (4096, 32), f"{prefix}.mlp.down_proj.weight": (4096, 32)}
        shapes |= {f"{prefix}.mlp.{part}_proj.weight": (32, 4096) for part in ("gate", "up")}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    _save(random_tensors(shapes, 0, torch.bfloat16), folder / "model.safetensors")
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    if name.endswith(QUANTIZED) and not name.startswith("lilicorr."):
        rows, columns = shape
        module = name.removesuffix(".weight")
        # Codes of any kind, and scales near 1: a weight of standard deviation 1 / sqrt(columns).
        scales = 0.75 + 0.5 * torch.rand(rows, columns // 16, generator=generator)
        return {
            name: torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
            f"{module}.weight_scale": scales.to(torch.float8_e4m3fn),
            f"{module}.weight_scale_2": torch.tensor(columns**-0.5 / 3),
        }
    values = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
    if "norm" in name and name.endswith("weight"):
        values = 1 + 0.1 * values
    else:
        values *= shape[-1] ** -0.5 if len(shape) == 2 else 0.02
    return {name: values}


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file)


if __name__ == "__main__":
    print(write_published_geometry(Path(sys.argv[1])))
