# SPDX-License-Identifier: Apache-2.0
"""Rewrites a test drafter as older programs export it."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from vllm_lilicorr.checkpoint.layout import sequential_name


def as_older_export(folder: Path) -> Path:
    """Numbered names, the prefix "model.", the older architecture's name and block_size in dflash_config, in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {f"model.{sequential_name(name)}": tensor for name, tensor in tensors.items()}
    save_file({name.replace("model.lm_head.", "lm_head."): tensor for name, tensor in renamed.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    config["dflash_config"]["block_size"] = config.pop("block_size")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
