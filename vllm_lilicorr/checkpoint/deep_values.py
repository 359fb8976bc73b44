# SPDX-License-Identifier: Apache-2.0
"""Checks of a drafter's values: every tensor is read once, one at a time."""

from collections.abc import Callable, Iterable

import torch

from vllm_lilicorr.checkpoint.findings import Finding, Level, some
from vllm_lilicorr.checkpoint.layout import canonical_name
from vllm_lilicorr.checkpoint.reader import Checkpoint

_EXPORT_AGAIN = "Export the drafter again."
# Linears are initialised near 1 / sqrt(columns) and trained from there.
_PLAUSIBLE_ROW_NORM = (1e-3, 1e3)
_PLAUSIBLE_NORM_WEIGHT = (1e-4, 1e3)
_PLAUSIBLE_SCALE = (1e-12, 1e3)
_MAY_BE_ZERO = (".bias", "_bias", "d2t", "t2d", "k_scale", "v_scale")
_SCALES = ("weight_scale", "weight_scale_2", "input_scale")


def deep_findings(checkpoint: Checkpoint, progress: Callable[[int], None] = lambda num_bytes: None) -> list[Finding]:
    """Looks for values that no trained drafter has.

    Args:
        checkpoint: of a drafter; its tensors are read.
        progress: is told the bytes of each tensor that was read.
    """
    faults: dict[str, list[str]] = {}
    for name, entry in checkpoint.tensors.items():
        if entry.num_bytes and entry.dtype in ("F32", "F16", "BF16", "F64", "F8_E4M3"):
            for fault in _faults(canonical_name(name), checkpoint.read(name)):
                faults.setdefault(fault, []).append(name)
        elif entry.dtype == "U8" and entry.num_bytes and not checkpoint.read(name).any():
            faults.setdefault("zero", []).append(name)
        progress(entry.num_bytes)
    findings = [
        Finding("values", level, f"{some(sorted(names))}: {words}", rule, remedy)
        for fault, (level, words, rule, remedy) in _FAULTS.items()
        if (names := faults.get(fault))
    ]
    if not findings:
        findings.append(Finding("values", Level.OK, f"{len(checkpoint.tensors)} tensors", "finite and plausible"))
    return findings


_FAULTS: dict[str, tuple[Level, str, str, str]] = {
    "nan": (Level.ERROR, "NaN", "no trained weight is NaN", _EXPORT_AGAIN),
    "inf": (Level.ERROR, "infinite values", "no trained weight is infinite", _EXPORT_AGAIN),
    "zero": (Level.ERROR, "zeros only", "a weight of zeros was never written, or lost", _EXPORT_AGAIN),
    "scale": (
        Level.ERROR,
        "a scale is zero, negative or out of all proportion",
        f"scales are positive and lie between {_PLAUSIBLE_SCALE[0]:g} and {_PLAUSIBLE_SCALE[1]:g}",
        "Quantize the drafter again.",
    ),
    "norm": (
        Level.WARNING,
        "values out of all proportion",
        f"rows of trained linears have norms between {_PLAUSIBLE_ROW_NORM[0]:g} and {_PLAUSIBLE_ROW_NORM[1]:g}, "
        f"norm weights a mean size between {_PLAUSIBLE_NORM_WEIGHT[0]:g} and {_PLAUSIBLE_NORM_WEIGHT[1]:g}",
        "Compare them with the trained weights.",
    ),
}


def _faults(
    name: str,
    tensor: torch.Tensor,  # any shape; a float dtype or F8_E4M3
) -> Iterable[str]:
    """Keys of _FAULTS that one tensor shows."""
    values = tensor.float()
    if values.isnan().any():
        yield "nan"
        return
    if values.isinf().any():
        yield "inf"
        return
    if name.endswith(_SCALES):
        low, high = _PLAUSIBLE_SCALE
        # A group of zeros may have any scale, also none; a scale of the whole tensor may not.
        smallest = values.min() if values.numel() == 1 else values.amax()
        if values.min() < 0 or smallest < low or values.max() > high:
            yield "scale"
    elif name.endswith(_MAY_BE_ZERO):
        return
    elif not values.any():
        yield "zero"
    elif tensor.dtype is not torch.float8_e4m3fn:
        if values.dim() == 2:
            (low, high), size = _PLAUSIBLE_ROW_NORM, values.norm(dim=1).mean()
        else:
            (low, high), size = _PLAUSIBLE_NORM_WEIGHT, values.abs().mean()
        if not low <= size <= high:
            yield "norm"
