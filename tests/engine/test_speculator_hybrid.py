# SPDX-License-Identifier: Apache-2.0
"""A hybrid target of NemotronH's kind (mamba, attention and MLP layers) with a LiLiCorr drafter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import run_engines
from pairs import drafter_config, random_tensors, write_checkpoint, write_drafter

pytestmark = pytest.mark.slow

VOCAB_SIZE = 32
LAYERS = ("linear_attention", "full_attention", "mlp", "linear_attention")


def hybrid_config() -> dict[str, Any]:
    """config.json of a NemotronH target, hidden 64."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "layers_block_type": list(LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }


def write_hybrid_target(folder: Path) -> Path:
    config = hybrid_config()
    hidden, width = config["hidden_size"], config["intermediate_size"]
    query, key = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    heads = config["mamba_num_heads"]
    inner, state = heads * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    mixers = {
        "linear_attention": {
            "in_proj.weight": (2 * inner + 2 * state + heads, hidden),
            "conv1d.weight": (inner + 2 * state, 1, config["conv_kernel"]),
            "conv1d.bias": (inner + 2 * state,),
            "A_log": (heads,),
            "D": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        },
        "full_attention": {
            "q_proj.weight": (query, hidden),
            "k_proj.weight": (key, hidden),
            "v_proj.weight": (key, hidden),
            "o_proj.weight": (hidden, query),
        },
        "mlp": {"up_proj.weight": (width, hidden), "down_proj.weight": (hidden, width)},
    }
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (VOCAB_SIZE, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (VOCAB_SIZE, hidden),
    }
    for index, kind in enumerate(LAYERS):
        shapes[f"backbone.layers.{index}.norm.weight"] = (hidden,)
        shapes |= {f"backbone.layers.{index}.mixer.{name}": shape for name, shape in mixers[kind].items()}
    tensors = random_tensors(shapes, seed=0, dtype=torch.float32)
    # Tokens 2 to 6 have the highest logits, so that part of the drafts is accepted.
    tensors["lm_head.weight"][2:7] *= 3
    return write_checkpoint(folder, config, tensors)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each target without speculation and with LiLiCorr."""
    folder = tmp_path_factory.mktemp("hybrid")
    drafter = write_drafter(folder / "drafter", drafter_config(vocab_size=VOCAB_SIZE))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (5, 40)]
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": 7, "draft_sample_method": "greedy"}
    base = {"target": write_hybrid_target(folder / "target"), "prompts": prompts, "sampling": {"max_tokens": 12}}
    return {
        "no-speculation": base | {"speculative_config": None},
        "lilicorr": base | {"speculative_config": speculative, "may_fail": True},
    }


def test_drafts_and_serves_the_targets_tokens_on_v2(engines, tmp_path: Path) -> None:
    """Catches mamba states that keep rejected tokens, and drafter layers read through another cache group."""
    ours = run_engines("v2", "ours", engines, tmp_path)
    oracle = run_engines("v2", "in-tree", {"lilicorr": engines["lilicorr"]}, tmp_path)["lilicorr"]
    result = ours["lilicorr"]
    assert result["error"] is None, result["error"]
    assert result["outputs"] == ours["no-speculation"]["outputs"]
    by_position = {(draft["request"], draft["anchor_position"]): draft["tokens"] for draft in result["drafts"]}
    assert by_position == {(draft["request"], draft["anchor_position"]): draft["tokens"] for draft in oracle["drafts"]}
    # Every step commits a token: fewer steps than tokens means accepted drafts.
    assert len(by_position) < sum(len(tokens) for tokens in result["outputs"])


def test_v1_refuses_before_weights_are_read(engines, tmp_path: Path) -> None:
    """Catches output that changes with rejected drafts, or an assertion deep in vLLM in place of a reason."""
    (engines["lilicorr"]["target"] / "model.safetensors").unlink()
    result = run_engines("v1", "ours", {"lilicorr": engines["lilicorr"]}, tmp_path)["lilicorr"]
    assert "ValueError: The target" in result["error"]
    assert "has recurrent layers, but speculation on them needs Model Runner V2" in result["error"]
