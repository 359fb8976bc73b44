# SPDX-License-Identifier: Apache-2.0
"""How each linear of a drafter is stored: what its tensors are decides.

Formats: NVFP4 as written by NVIDIA Model Optimizer (weight U8 [N, K/2], weight_scale
F8_E4M3 [N, K/16], weight_scale_2 F32 scalar, and input_scale F32 scalar where
activations are quantized too); FP8 as written by it or by compressed-tensors
(weight F8_E4M3 [N, K], weight_scale scalar or one per row).
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_lilicorr.checkpoint.findings import Finding, Level
from vllm_lilicorr.checkpoint.layout import canonical_name
from vllm_lilicorr.checkpoint.reader import torch_dtypes

if TYPE_CHECKING:
    import torch

GROUP_SIZE = 16
FLOAT_DTYPES = ("F32", "F16", "BF16")
_COMPANIONS = ("weight_scale", "weight_scale_2", "input_scale", "weight_scale_inv", "k_scale", "v_scale")
_MAPS = ("d2t", "t2d")
_FLOATS = "F32, F16 or BF16"
CHECK = "storage"
_EXPORT_AGAIN = "Export or quantize the drafter again."


_Problem = tuple[str, str]  # value, rule
_Expected = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]  # dtypes, shapes


class Format(StrEnum):
    """How a linear's weight is stored, and whether its input is quantized too."""

    FLOAT = "float"
    FP8 = "fp8"
    NVFP4_W4A16 = "nvfp4-w4a16"
    NVFP4 = "nvfp4"

    @property
    def is_nvfp4(self) -> bool:
        return self in (Format.NVFP4, Format.NVFP4_W4A16)


class Stored(Protocol):
    """What is known of a tensor without reading it: a headers.TensorEntry, or anything like it."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Description(NamedTuple):
    """What is known of a tensor in memory."""

    dtype: str
    shape: tuple[int, ...]


def describe(tensors: "Mapping[str, torch.Tensor]") -> dict[str, Stored]:
    """Dtype and shape of tensors in memory, in the words of the file format."""
    words = {dtype: word for word, dtype in torch_dtypes().items()}
    return {name: Description(words[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def module_formats(tensors: Mapping[str, Stored]) -> dict[str, Format]:
    """Canonical module name to format, for every module that has a `weight`.

    Args:
        tensors: stored or canonical name to dtype and shape.
    """
    canonical = by_canonical_name(tensors)
    formats = {}
    for name, entry in canonical.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not module:
            continue
        if entry.dtype == "U8":
            formats[module] = Format.NVFP4 if f"{module}.input_scale" in canonical else Format.NVFP4_W4A16
        elif entry.dtype == "F8_E4M3":
            formats[module] = Format.FP8
        else:
            formats[module] = Format.FLOAT
    return formats


def logical_shapes(tensors: Mapping[str, Stored]) -> dict[str, tuple[int, ...]]:
    """Canonical name to shape as if nothing were quantized: packed weights unpacked, scales left out."""
    formats = module_formats(tensors)
    shapes = {}
    for stored, entry in tensors.items():
        name = canonical_name(stored)
        module, _, kind = name.rpartition(".")
        if kind in _COMPANIONS:
            continue
        packed = kind == "weight" and len(entry.shape) == 2 and formats[module].is_nvfp4
        shapes[name] = (entry.shape[0], 2 * entry.shape[1]) if packed else entry.shape
    return shapes


def by_canonical_name(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    return {canonical_name(name): entry for name, entry in tensors.items()}


def storage_findings(tensors: Mapping[str, Stored]) -> list[Finding]:
    """Errors for every tensor whose dtype is unknown, and for scales that are missing, wrong or left over."""
    canonical = by_canonical_name(tensors)
    formats = module_formats(tensors)
    problems: list[_Problem] = []
    for module, form in formats.items():
        weight = canonical[f"{module}.weight"]
        companions = {kind: canonical[name] for kind in _COMPANIONS if (name := f"{module}.{kind}") in canonical}
        if form is Format.FLOAT:
            problems += _float_problems(module, weight, companions)
        elif len(weight.shape) != 2:
            problems.append(
                (f"{module}.weight is {weight.dtype} of shape {list(weight.shape)}", "only matrices are quantized")
            )
        else:
            problems += (_nvfp4_problems if form.is_nvfp4 else _fp8_problems)(module, weight.shape, companions)
    for name, entry in canonical.items():
        kind = name.rpartition(".")[2]
        if kind != "weight" and kind not in _COMPANIONS and name not in _MAPS and entry.dtype not in FLOAT_DTYPES:
            problems.append((f"{name} is {entry.dtype}", f"only weights are quantized; this must be {_FLOATS}"))
    return [Finding(CHECK, Level.ERROR, value, rule, _EXPORT_AGAIN) for value, rule in problems]


def _float_problems(module: str, weight: Stored, found: Mapping[str, Stored]) -> Iterable[_Problem]:
    if weight.dtype not in FLOAT_DTYPES:
        yield f"{module}.weight is {weight.dtype}", f"weights are {_FLOATS}, U8 (NVFP4) or F8_E4M3 (FP8)"
    elif left_over := sorted(set(found) & {"weight_scale", "weight_scale_2", "weight_scale_inv"}):
        yield f"{module} has {', '.join(left_over)}, and its weight is {weight.dtype}", "a float weight has no scales"


def _nvfp4_problems(module: str, packed: tuple[int, ...], found: Mapping[str, Stored]) -> Iterable[_Problem]:
    rows, columns = packed[0], 2 * packed[1]
    if columns % GROUP_SIZE:
        yield f"{module}.weight has {columns} columns", f"NVFP4 scales groups of {GROUP_SIZE}"
        return
    expected: dict[str, _Expected] = {
        "weight_scale": (("F8_E4M3",), ((rows, columns // GROUP_SIZE),)),
        "weight_scale_2": (("F32",), ((), (1,))),
    }
    if "input_scale" in found:
        expected["input_scale"] = (("F32",), ((), (1,)))
    yield from _compare(module, expected, found, "NVFP4")


def _fp8_problems(module: str, shape: tuple[int, ...], found: Mapping[str, Stored]) -> Iterable[_Problem]:
    if "weight_scale_inv" in found:
        yield f"{module} has weight_scale_inv", "FP8 with a scale per block is not read here"
        return
    expected: dict[str, _Expected] = {
        "weight_scale": (FLOAT_DTYPES, ((), (1,), (shape[0], 1), (shape[0],))),
    }
    if "input_scale" in found:
        expected["input_scale"] = (FLOAT_DTYPES, ((), (1,)))
    yield from _compare(module, expected, found, "FP8")


def _compare(
    module: str, expected: Mapping[str, _Expected], found: Mapping[str, Stored], what: str
) -> Iterable[_Problem]:
    for kind, (dtypes, shapes) in expected.items():
        if kind not in found:
            yield f"{module} has no {kind}", f"a {what} weight cannot be read without it"
        elif found[kind].dtype not in dtypes:
            yield f"{module}.{kind} is {found[kind].dtype}", f"{what} needs {dtypes[0]}"
        elif found[kind].shape not in shapes:
            yield f"{module}.{kind} has shape {list(found[kind].shape)}", f"its weight needs {list(shapes[0])}"
