# SPDX-License-Identifier: Apache-2.0
"""A LiLiCorr checkpoint with its head taken away."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_lilicorr.measure.plain_dflash import write_plain_dflash


def write_drafter(folder, prefix=""):
    """A checkpoint in two shards: backbone and head."""
    folder.mkdir()
    config = {
        "architectures": ["LiLiCorrDraftModel"],
        "block_size": 8,
        "dflash_config": {"mask_token_id": 1, "projector_type": "lilicorr", "lilicorr_candidate_topk": 8},
    }
    (folder / "config.json").write_text(json.dumps(config))
    backbone = {f"{prefix}fc.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)}
    save_file(backbone, folder / "model-00001-of-00002.safetensors")
    save_file({f"{prefix}lilicorr.out_head.weight": torch.ones(2, 2)}, folder / "model-00002-of-00002.safetensors")
    return backbone


@pytest.mark.parametrize("prefix", ["", "model."])
def test_only_the_backbone_is_left(tmp_path, prefix):
    """Head tensors left in make vLLM refuse the checkpoint; a lost backbone tensor, too."""
    backbone = write_drafter(tmp_path / "lilicorr", prefix)
    folder = write_plain_dflash(tmp_path / "lilicorr", tmp_path / "dflash")
    tensors = load_file(folder / "model.safetensors")
    assert list(tensors) == list(backbone)
    assert torch.equal(tensors[f"{prefix}fc.weight"], backbone[f"{prefix}fc.weight"])
    assert tensors[f"{prefix}fc.weight"].dtype == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 1}
    assert config["block_size"] == 8


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    """Comparing a DFlash drafter with itself."""
    write_drafter(tmp_path / "d")
    (tmp_path / "d" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="no LiLiCorr drafter"):
        write_plain_dflash(tmp_path / "d", tmp_path / "out")
