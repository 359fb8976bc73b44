# SPDX-License-Identifier: Apache-2.0
"""Makes small random target and drafter checkpoints in the published format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_lilicorr.checkpoint.layout import expected_tensors
from vllm_lilicorr.method.geometry import ARCHITECTURE, DrafterGeometry

VOCAB_SIZE = 512


def target_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a Qwen3 target: 3 layers, hidden 64."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    return config | overrides


def drafter_config(*, dflash_config: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """config.json of a LiLiCorr drafter for `target_config()`: block 8, K 8, head 32 wide."""
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {
            "mask_token_id": 1,
            "target_layer_ids": [0, 2],
            "causal": False,
            "projector_type": "lilicorr",
            "lilicorr_enabled": True,
            "lilicorr_candidate_topk": 8,
            "lilicorr_hidden_size": 32,
            "lilicorr_num_layers": 2,
            "lilicorr_num_heads": 4,
            "lilicorr_mlp_ratio": 2.0,
            "lilicorr_factor_dim": 32,
            "lilicorr_vector_eps": 1e-4,
            "lilicorr_logit_scale": 8.0,
        }
        | (dflash_config or {}),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "num_target_layers": 3,
        "layer_types": ["full_attention", "full_attention"],
    }
    return config | overrides


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Norm weights near one, everything else normal, scaled so that activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            values = 1 + 0.1 * values
        elif len(shape) == 2:
            values = values * shape[-1] ** -0.5
        else:
            values = 0.2 * values
        tensors[name] = values.to(dtype)
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_drafter(folder: Path, config: dict[str, Any], seed: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """A random drafter with exactly the tensors that its config.json needs, in-tree names."""
    shapes = expected_tensors(DrafterGeometry.from_config(config))
    return write_checkpoint(folder, config, random_tensors(shapes, seed, dtype))


def write_target(folder: Path, config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A random Qwen3 target without a tokenizer (use skip_tokenizer_init and token ids)."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    query, key = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (query, hidden),
            f"{layer}.self_attn.k_proj.weight": (key, hidden),
            f"{layer}.self_attn.v_proj.weight": (key, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, query),
            f"{layer}.self_attn.q_norm.weight": (config["head_dim"],),
            f"{layer}.self_attn.k_norm.weight": (config["head_dim"],),
            f"{layer}.mlp.gate_proj.weight": (width, hidden),
            f"{layer}.mlp.up_proj.weight": (width, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, width),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return write_checkpoint(folder, config, random_tensors(shapes, seed, dtype))
