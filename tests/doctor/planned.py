# SPDX-License-Identifier: Apache-2.0
"""Planned servers of the published pair's dimensions, for rules that need no files."""

import shlex
from typing import Any

from vllm_lilicorr.doctor.engine_arguments import parse_engine_arguments
from vllm_lilicorr.doctor.machines import KNOWN_MACHINES, Machine
from vllm_lilicorr.doctor.planned_server import PlannedServer
from vllm_lilicorr.method.geometry import DrafterGeometry

CPU = Machine("cpu", "this machine's CPU", None, 16, None, True)
DRAFTER: dict[str, Any] = {
    "architectures": ["LiLiCorrDraftModel"],
    "model_type": "qwen3",
    "block_size": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "dflash_config": {
        "mask_token_id": 9,
        "target_layer_ids": [1, 22, 43, 64, 85],
        "causal": False,
        "projector_type": "lilicorr",
        "lilicorr_candidate_topk": 8,
        "lilicorr_hidden_size": 1024,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 8,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": 1024,
        "lilicorr_vector_eps": 1e-4,
        "lilicorr_logit_scale": 8.0,
    },
}
HYBRID_TARGET: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEMEM*",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}
DENSE_TARGET: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}


def planned(
    words: str = "",
    machine: str | Machine = "h200",
    drafter: dict[str, Any] | None = None,
    target: dict[str, Any] | None = DENSE_TARGET,
    **fields: Any,
) -> PlannedServer:
    """A server from words as for `vllm serve`; `drafter`: keys that differ from DRAFTER."""
    config = DRAFTER | (drafter or {})
    config["dflash_config"] = DRAFTER["dflash_config"] | (drafter or {}).get("dflash_config", {})
    return PlannedServer(
        parse_engine_arguments(shlex.split(words)),
        machine if isinstance(machine, Machine) else KNOWN_MACHINES[machine],
        DrafterGeometry.from_config(config),
        config,
        target,
        **fields,
    )
