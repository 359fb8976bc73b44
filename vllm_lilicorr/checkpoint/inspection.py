# SPDX-License-Identifier: Apache-2.0
"""What a drafter is: dimensions, parameters by part, bytes by dtype, from its headers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_lilicorr.checkpoint.layout import canonical_name
from vllm_lilicorr.checkpoint.quantization import Format, logical_shapes, module_formats
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.method.geometry import DrafterGeometry, is_lilicorr_config

PARTS = ("feature projection", "attention", "MLP", "convolutions", "norms", "correlator head", "LM head", "unread")


@dataclass(frozen=True)
class Inspection:
    """A drafter in numbers.

    Attributes:
        geometry: its dimensions.
        parameters: by part, counted as if nothing were quantized.
        part_bytes: stored bytes by part, scales included.
        dtype_bytes: stored bytes by dtype.
        formats: number of weights by storage format.
    """

    geometry: DrafterGeometry
    parameters: dict[str, int]
    part_bytes: dict[str, int]
    dtype_bytes: dict[str, int]
    formats: dict[Format, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.part_bytes.values())

    @property
    def bytes_per_step(self) -> int:
        """What one draft step reads at least once: every part but the unread one."""
        return self.num_bytes - self.part_bytes.get("unread", 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "geometry": dict(vars(self.geometry)),
            "parameters": self.parameters,
            "part_bytes": self.part_bytes,
            "dtype_bytes": self.dtype_bytes,
            "formats": {form.value: count for form, count in self.formats.items()},
            "bytes_per_draft_step": self.bytes_per_step,
        }


def inspect(folder: Path) -> Inspection:
    """Reads a drafter's headers.

    Raises:
        ValueError: it is no whole checkpoint, or no LiLiCorr drafter.
    """
    checkpoint = Checkpoint.open(folder)
    if not is_lilicorr_config(checkpoint.config):
        raise ValueError(
            f"{folder} is no LiLiCorr drafter (architectures {checkpoint.config.get('architectures')}); only "
            "drafters are inspected. Name the drafter's folder."
        )
    geometry = DrafterGeometry.from_config(checkpoint.config)
    parameters, part_bytes, dtype_bytes = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0), dict[str, int]()
    for name, shape in logical_shapes(checkpoint.tensors).items():
        parameters[_part(name)] += math.prod(shape)
    for stored, entry in checkpoint.tensors.items():
        part_bytes[_part(canonical_name(stored))] += entry.num_bytes
        dtype_bytes[entry.dtype] = dtype_bytes.get(entry.dtype, 0) + entry.num_bytes
    formats: dict[Format, int] = {}
    for form in module_formats(checkpoint.tensors).values():
        formats[form] = formats.get(form, 0) + 1
    used = [part for part in PARTS if part_bytes[part]]
    return Inspection(
        geometry,
        {part: parameters[part] for part in used},
        {part: part_bytes[part] for part in used},
        dict(sorted(dtype_bytes.items())),
        formats,
    )


def _part(name: str) -> str:
    if name.startswith("lilicorr."):
        return "correlator head"
    if name.startswith("lm_head."):
        return "LM head"
    if name.startswith("fc."):
        return "feature projection"
    if "norm" in name:
        return "norms"
    if "_conv." in name:
        return "convolutions"
    if ".self_attn." in name:
        return "attention"
    return "MLP" if ".mlp." in name else "unread"
