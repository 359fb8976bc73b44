# SPDX-License-Identifier: Apache-2.0
"""The small target and drafter that come with this package."""

from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tiny-pair"


@dataclass(frozen=True)
class Pair:
    """Checkpoint folders.

    Attributes:
        target: The model whose output is served.
        drafter: Its LiLiCorr drafter.
        dflash_alone: A plain DFlash drafter trained by itself, or None.
    """

    target: Path
    drafter: Path
    dflash_alone: Path | None = None


def find_pair(target: Path | None = None, drafter: Path | None = None) -> Pair:
    """The embedded pair, or the folders named instead.

    Raises:
        ValueError: Only one of the two is named, or a folder holds no checkpoint.
    """
    if (target is None) != (drafter is None):
        raise ValueError("--target and --drafter belong together; name both or neither.")
    alone = ASSETS / "drafter-dflash" if target is None else None
    pair = Pair(
        target or ASSETS / "target",
        drafter or ASSETS / "drafter",
        alone if alone and (alone / "config.json").is_file() else None,
    )
    for folder in (pair.target, pair.drafter):
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} holds no config.json; name folders with checkpoints by "
                "--target and --drafter, or reinstall the package for the embedded pair."
            )
    return pair
