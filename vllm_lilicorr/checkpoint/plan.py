# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is to be written: its tensors in parts, each made when its turn comes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_lilicorr.checkpoint.headers import DTYPE_BITS

if TYPE_CHECKING:
    import torch


class PlannedTensor(NamedTuple):
    """A tensor to be written: dtype in the file format's words, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        size = DTYPE_BITS[self.dtype] // 8
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Part:
    """Tensors that are made together, such as a linear's weight and its scales.

    Attributes:
        name: of the part, unique in its checkpoint.
        tensors: what `make` gives.
        make: reads, computes and returns the tensors by name, and what to report of them.
    """

    name: str
    tensors: tuple[PlannedTensor, ...]
    make: Callable[[], "tuple[Mapping[str, torch.Tensor], dict[str, Any]]"]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Plan:
    """A whole checkpoint to be written.

    Attributes:
        parts: of the weights.
        json_files: name to content, config.json among them.
        copies: files that are taken over as they are.
        settings: whatever else decides the bytes; a run goes on only with what was begun with the same.
    """

    parts: Sequence[Part]
    json_files: Mapping[str, Mapping[str, Any]]
    copies: Sequence[Path] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True)
class Written:
    """What was written: the reports of all parts in their order, and how many files an earlier run had finished."""

    reports: list[dict[str, Any]]
    num_files: int
    num_reused: int
