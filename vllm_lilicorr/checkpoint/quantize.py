# SPDX-License-Identifier: Apache-2.0
"""Quantizes a float checkpoint's linears to NVFP4 or FP8, without calibration data.

A drafter is written under the in-tree drafter's names. By default its MLPs, fc and own LM head are quantized, and
attention, convolutions and the correlator head stay as they are, as in the published checkpoint. A dense Qwen3-style
target keeps its names; its MLPs and attention are quantized.

Linears that vLLM fuses share one weight_scale_2, so that the fused product is exact.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_lilicorr.checkpoint import config_files, fp8, nvfp4
from vllm_lilicorr.checkpoint.encoders import Encoder
from vllm_lilicorr.checkpoint.findings import raise_errors, some
from vllm_lilicorr.checkpoint.layout import canonical_name, check_tensors
from vllm_lilicorr.checkpoint.other_files import other_files
from vllm_lilicorr.checkpoint.plan import Part, Plan, PlannedTensor
from vllm_lilicorr.checkpoint.quantization import Format, logical_shapes, module_formats, storage_findings
from vllm_lilicorr.checkpoint.reader import QUANTIZATION_NAME, Checkpoint
from vllm_lilicorr.method.geometry import DrafterGeometry, is_lilicorr_config

FORMATS = (Format.NVFP4_W4A16, Format.NVFP4, Format.FP8)
# Group of linears to the names of its members, without a prefix "model.".
GROUPS = {
    "mlp": re.compile(r"layers\.\d+\.mlp\.(gate|up|down)_proj"),
    "attention": re.compile(r"layers\.\d+\.self_attn\.[qkvo]_proj"),
    "fc": re.compile(r"fc"),
    "lm-head": re.compile(r"lm_head"),
    "convolutions": re.compile(r"layers\.\d+\.(attention|mlp)_conv\.kernel_projection"),
    # What vLLM can hold quantized of the correlator head; not its lattice attention, nor the factors' projections.
    "head": re.compile(
        r"lilicorr\.(token_proj|pass_hidden_proj|context_proj|anchor_out_head|feature_mlp\.down_proj"
        r"|layers\.\d+\.(attn\.out_proj|mlp\.(up|down)_proj))"
    ),
}
DRAFTER_DEFAULT = ("mlp", "fc", "lm-head")
TARGET_DEFAULT = ("mlp", "attention")
# Activations are scaled by input_scale times one E4M3 number per group of 16, between 2**-6 and 448 where E4M3 is
# normal. With 1, activations from 0.1 to 2688 keep their full precision.
INPUT_SCALE = 1.0
_TARGET_LINEAR = re.compile(r"(model\.)?layers\.\d+\.(mlp|self_attn)\.\w+_proj\.weight")


@dataclass(frozen=True)
class QuantizeOptions:
    """What to quantize, and how.

    Attributes:
        format: one of FORMATS.
        quantize: groups to quantize besides the default ones.
        keep: groups to leave as they are.
        input_scale: with Format.NVFP4, every linear's scale of activations.

    Raises:
        ValueError: input_scale is not positive and finite, or the format has none.
    """

    format: Format
    quantize: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    input_scale: float = INPUT_SCALE

    def __post_init__(self) -> None:
        if not 0 < self.input_scale < float("inf"):
            raise ValueError(f"--input-scale {self.input_scale}; activations are divided by it. Use a positive number.")
        if self.input_scale != INPUT_SCALE and self.format is not Format.NVFP4:
            raise ValueError(
                f"--input-scale {self.input_scale}, but {self.format} has no scale of activations. Drop it, or use "
                "--format nvfp4."
            )

    def groups(self, is_drafter: bool) -> list[str]:
        """The groups to quantize.

        Raises:
            ValueError: a group is to be quantized and kept.
        """
        if both := sorted(set(self.quantize) & set(self.keep)):
            raise ValueError(f"{', '.join(both)} is in --quantize and in --keep; it can be in one. Drop one of them.")
        default = DRAFTER_DEFAULT if is_drafter else TARGET_DEFAULT
        return sorted((set(default) | set(self.quantize)) - set(self.keep))


def plan_quantization(source: Checkpoint, options: QuantizeOptions, encoder: Encoder) -> Plan:
    """What `writer.write_checkpoint` has to write. Each part reports its module, format, bytes and relative error.

    Raises:
        ValueError: the checkpoint is broken, quantized already, of an unknown kind, or nothing would be quantized.
    """
    is_drafter = is_lilicorr_config(source.config)
    raise_errors(storage_findings(source.tensors), str(source.folder))
    already = [name for name, form in module_formats(source.tensors).items() if form is not Format.FLOAT]
    if already:
        raise ValueError(
            f"{source.folder} holds {some(already)} as {module_formats(source.tensors)[already[0]]}; only float "
            "weights are quantized. Name the float checkpoint that it was made from."
        )
    names = _written_names(source, is_drafter)
    shapes = linears(source, names)
    chosen = _choose(shapes, options, is_drafter)
    if not chosen:
        raise ValueError(
            f"None of {source.folder}'s linears is to be quantized to {options.format}. Name groups that it has with "
            f"--quantize: {', '.join(GROUPS)}."
        )
    scales = _SharedScales(source, names, chosen)
    parts = [
        _quantized_part(source, stored, name, options, encoder, scales)
        if name.removesuffix(".weight") in chosen and name.endswith(".weight")
        else copied_part(source, stored, name)
        for name, stored in names.items()
    ]
    algorithm = config_files.ALGORITHMS[options.format]
    patterns = config_files.exclusions({module: module in chosen for module in shapes})
    config = config_files.drafter_config(source.config)
    return Plan(
        parts=parts,
        json_files={
            "config.json": config | {"quantization_config": config_files.quantization_config(algorithm, patterns)},
            QUANTIZATION_NAME: config_files.hf_quant_config(algorithm, patterns),
        },
        copies=other_files(source.folder),
        settings={"source": fingerprint(source), "input_scale": options.input_scale},
    )


def fingerprint(source: Checkpoint) -> list[list[Any]]:
    """Name, size and time of change of every file of weights: another checkpoint in the same folder differs."""
    files = sorted({entry.file for entry in source.tensors.values()})
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def copied_part(source: Checkpoint, stored: str, name: str) -> Part:
    """A tensor that is written as it is, under another name perhaps."""
    entry = source.tensors[stored]
    return Part(name, (PlannedTensor(name, entry.dtype, entry.shape),), lambda: ({name: source.read(stored)}, {}))


def _written_names(source: Checkpoint, is_drafter: bool) -> dict[str, str]:
    """Written name to stored name, in the order of the written names."""
    if is_drafter:
        check_tensors(DrafterGeometry.from_config(source.config), logical_shapes(source.tensors))
        return canonical_names(source)
    others = [
        name for name, entry in source.tensors.items()
        if "layers." in name and len(entry.shape) == 2 and not _TARGET_LINEAR.fullmatch(name)
    ]  # fmt: skip
    if others:
        raise ValueError(
            f"{source.folder} holds {some(sorted(others))}; besides LiLiCorr drafters, only dense targets with Qwen3's "
            "names are quantized. Use NVIDIA Model Optimizer's own examples for this model."
        )
    return {name: name for name in sorted(source.tensors)}


def canonical_names(source: Checkpoint) -> dict[str, str]:
    """Canonical name to stored name, sorted.

    Raises:
        ValueError: two tensors have the same canonical name.
    """
    names: dict[str, str] = {}
    for stored in source.tensors:
        name = canonical_name(stored)
        if name in names:
            raise ValueError(
                f"{source.folder} holds {stored!r} and {names[name]!r}, two namings of one tensor. Remove the one that "
                "does not belong to this checkpoint, or export it again."
            )
        names[name] = stored
    return dict(sorted(names.items()))


def linears(source: Checkpoint, names: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Written name to shape of every linear; the token embedding is none."""
    return {
        name.removesuffix(".weight"): source.tensors[stored].shape
        for name, stored in names.items()
        if name.endswith(".weight") and len(source.tensors[stored].shape) == 2 and "embed_tokens" not in name
    }


def _choose(shapes: Mapping[str, tuple[int, ...]], options: QuantizeOptions, is_drafter: bool) -> set[str]:
    """The linears to quantize. A group whose K cannot be split into whole groups of 16 stays as it is."""
    patterns = [GROUPS[group] for group in options.groups(is_drafter)]
    return {
        name
        for name, shape in shapes.items()
        if any(pattern.fullmatch(name.removeprefix("model.")) for pattern in patterns)
        and (options.format is Format.FP8 or shape[1] % nvfp4.GROUP_SIZE == 0)
    }


class _SharedScales:
    """weight_scale_2 of NVFP4 linears: one for all that are fused. Computed when first asked for."""

    def __init__(self, source: Checkpoint, names: Mapping[str, str], chosen: set[str]) -> None:
        self._source, self._names, self._chosen = source, names, chosen
        self._of_group = functools.cache(self._compute)

    def __call__(self, module: str) -> torch.Tensor:
        return self._of_group(tuple(name for name in config_files.fused_group(module) if name in self._chosen))

    def _compute(self, modules: tuple[str, ...]) -> torch.Tensor:
        scales = (nvfp4.tensor_scale(self._source.read(self._names[f"{module}.weight"])) for module in modules)
        return torch.stack(list(scales)).amax()


def _quantized_part(
    source: Checkpoint,
    stored: str,
    name: str,
    options: QuantizeOptions,
    encoder: Encoder,
    scales: _SharedScales,
) -> Part:
    module = name.removesuffix(".weight")
    rows, columns = source.tensors[stored].shape
    if options.format is Format.FP8:
        tensors = [PlannedTensor(name, "F8_E4M3", (rows, columns)), PlannedTensor(f"{name}_scale", "F32", (rows,))]
    else:
        tensors = [
            PlannedTensor(name, "U8", (rows, columns // 2)),
            PlannedTensor(f"{name}_scale", "F8_E4M3", (rows, columns // nvfp4.GROUP_SIZE)),
            PlannedTensor(f"{name}_scale_2", "F32", ()),
        ]
    if options.format is Format.NVFP4:
        tensors.append(PlannedTensor(f"{module}.input_scale", "F32", ()))

    def make() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        try:
            # The scale first: it reads the weight too, and only one large tensor is to be in memory.
            scale_2 = None if options.format is Format.FP8 else scales(module)
            weight = source.read(stored)
            encoded: Any = (
                encoder.fp8(weight, fp8.row_scales(weight)) if scale_2 is None else encoder.nvfp4(weight, scale_2)
            )
        except ValueError as error:
            raise ValueError(f"{stored}: {error}") from None
        made = {f"{module}.{kind}": tensor for kind, tensor in encoded._asdict().items()}
        if options.format is Format.NVFP4:
            made[f"{module}.input_scale"] = torch.tensor(options.input_scale)
        report = {
            "module": module,
            "format": str(options.format),
            "shape": [rows, columns],
            "bytes_before": source.tensors[stored].num_bytes,
            "bytes_after": sum(tensor.num_bytes for tensor in tensors),
            "relative_error": relative_error(weight, encoded),
        }
        return made, report

    return Part(module, tuple(tensors), make)


def relative_error(
    weight: torch.Tensor,  # [N, K] float
    encoded: nvfp4.EncodedNvfp4 | fp8.EncodedFp8,
) -> float:
    """Norm of the difference between a weight and what it is decoded to, over the weight's norm; 0 for zeros."""
    difference = norm = 0.0
    for rows in nvfp4.row_blocks(*weight.shape):
        original = weight[rows].float()
        if isinstance(encoded, nvfp4.EncodedNvfp4):
            decoded = nvfp4.decode(encoded.weight[rows], encoded.weight_scale[rows], encoded.weight_scale_2)
        else:
            scale = encoded.weight_scale[rows] if encoded.weight_scale.ndim else encoded.weight_scale
            decoded = fp8.decode(encoded.weight[rows], scale)
        difference += (decoded - original).double().square().sum().item()
        norm += original.double().square().sum().item()
    return (difference / norm) ** 0.5 if norm else 0.0
