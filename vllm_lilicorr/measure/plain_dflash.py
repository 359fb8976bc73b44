# SPDX-License-Identifier: Apache-2.0
"""A LiLiCorr checkpoint without its head: the same backbone, drafted with plain DFlash.

What is left when the correlator is taken away, slot-wise argmax, is what its gain
is measured against.
"""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

HEAD_PREFIXES = ("lilicorr.", "model.lilicorr.")


def write_plain_dflash(drafter: Path, destination: Path) -> Path:
    """Copies `drafter` to `destination` as a plain DFlash checkpoint.

    Args:
        drafter: Folder with config.json and *.safetensors of a LiLiCorr drafter.
        destination: Folder to make.

    Returns:
        `destination`.

    Raises:
        ValueError: The checkpoint has no LiLiCorr head.
    """
    config = json.loads((drafter / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    dflash = config.get("dflash_config", {})
    config["dflash_config"] = {
        key: value for key, value in dflash.items() if not key.startswith("lilicorr_") and key != "projector_type"
    }
    destination.mkdir(parents=True)
    (destination / "config.json").write_text(json.dumps(config, indent=2))

    dropped = 0
    tensors = {}
    for shard in sorted(drafter.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                if name.startswith(HEAD_PREFIXES):
                    dropped += 1
                else:
                    tensors[name] = weights.get_tensor(name)
    if not dropped:
        raise ValueError(f"{drafter} has no tensors named {HEAD_PREFIXES[0]}*; it is no LiLiCorr drafter.")
    save_file(tensors, destination / "model.safetensors")
    return destination
