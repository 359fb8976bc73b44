# SPDX-License-Identifier: Apache-2.0
"""Drafter folders in the published format: config.json and BF16 model.safetensors."""

import json
from pathlib import Path

from drafter import Drafter
from head import LiLiCorrHead
from safetensors.torch import save_file
from settings import Settings
from torch import Tensor


def drafter_config(s: Settings, with_head: bool) -> dict:
    """The config of a LiLiCorr drafter, or of a plain DFlash one."""
    dflash: dict = {
        "mask_token_id": s.mask_token_id,
        "target_layer_ids": list(s.feature_layers),
        "causal": False,
    }
    if with_head:
        dflash |= {
            "projector_type": "lilicorr",
            "lilicorr_enabled": True,
            "lilicorr_candidate_topk": s.top_k,
            "lilicorr_hidden_size": s.head_hidden_size,
            "lilicorr_num_layers": s.head_num_layers,
            "lilicorr_num_heads": s.head_num_heads,
            "lilicorr_mlp_ratio": s.head_mlp_ratio,
            "lilicorr_factor_dim": s.head_factor_dim,
            "lilicorr_vector_eps": s.head_vector_eps,
            "lilicorr_logit_scale": s.head_logit_scale,
        }
    return {
        "architectures": ["LiLiCorrDraftModel" if with_head else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": s.block_size,
        "dflash_config": dflash,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.drafter_layers,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.drafter_intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": s.rms_norm_eps,
        "vocab_size": s.vocab_size,
        "max_position_embeddings": s.max_position,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": s.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "num_target_layers": s.num_layers,
        "layer_types": ["full_attention"] * s.drafter_layers,
    }


def drafter_tensors(backbone: Drafter, head: LiLiCorrHead | None) -> dict[str, Tensor]:
    """Checkpoint names to BF16 tensors; the embedding stays with the target."""
    tensors = dict(backbone.state_dict())
    if head is not None:
        tensors |= {f"lilicorr.{k}": v for k, v in head.state_dict().items()}
    return {k: v.detach().bfloat16().contiguous() for k, v in tensors.items()}


def export_drafter(folder: Path, backbone: Drafter, head: LiLiCorrHead | None) -> None:
    """Writes the folder of a drafter with or without the head."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = drafter_tensors(backbone, head)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = drafter_config(backbone.settings, with_head=head is not None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
