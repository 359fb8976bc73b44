# SPDX-License-Identifier: Apache-2.0
"""Rewrites any drafter that this package accepts into the form that stock vLLM or SGLang loads.

Values stay as they are. Two kinds of scales are written anew: those of NVFP4 linears that vLLM fuses get one
weight_scale_2, and FP8 linears without an input_scale get one weight_scale per row, which is exact. What other
programs compute in float, such as the correlator's factors, is decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_lilicorr.checkpoint import config_files, fp8, nvfp4
from vllm_lilicorr.checkpoint.findings import raise_errors, some
from vllm_lilicorr.checkpoint.layout import check_tensors, sequential_name
from vllm_lilicorr.checkpoint.other_files import other_files
from vllm_lilicorr.checkpoint.plan import Part, Plan, PlannedTensor
from vllm_lilicorr.checkpoint.quantization import Format, logical_shapes, module_formats, storage_findings
from vllm_lilicorr.checkpoint.quantize import GROUPS, canonical_names, copied_part, fingerprint, linears
from vllm_lilicorr.checkpoint.reader import QUANTIZATION_NAME, Checkpoint
from vllm_lilicorr.method.geometry import DrafterGeometry, is_lilicorr_config

VLLM, SGLANG = "vllm", "sglang"
_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
_Made = tuple[dict[str, torch.Tensor], dict[str, Any]]  # tensors by name, and what to report


def plan_conversion(source: Checkpoint, program: str = VLLM) -> Plan:
    """What `writer.write_checkpoint` has to write. Each part whose scales change reports its relative error.

    Args:
        program: "vllm" writes the in-tree drafter's names; "sglang" the numbered ones of torch.nn.Sequential, which
            its drafter has.

    Raises:
        ValueError: not a LiLiCorr drafter, broken, or quantized in two formats; or only in part of a fused product.
    """
    if not is_lilicorr_config(source.config):
        raise ValueError(
            f"{source.folder} is no LiLiCorr drafter (architectures {source.config.get('architectures')}); only "
            "drafters are converted. Name the drafter's folder."
        )
    raise_errors(storage_findings(source.tensors), str(source.folder))
    check_tensors(DrafterGeometry.from_config(source.config), logical_shapes(source.tensors))
    names, stored = canonical_names(source), module_formats(source.tensors)
    _refuse_mixed_products(source, stored)
    formats = {module: form if _stays_quantized(module) else Format.FLOAT for module, form in stored.items()}
    decoded = {module: form for module, form in stored.items() if formats[module] is not form}
    conversion = _Conversion(source, names, formats, decoded, _algorithm(source, names, formats), program)
    json_files: dict[str, Mapping[str, Any]] = {"config.json": config_files.drafter_config(source.config)}
    if algorithm := conversion.algorithm:
        patterns = config_files.exclusions(
            {module: formats[module] is not Format.FLOAT for module in linears(source, names)}
        )
        declared = config_files.quantization_config(algorithm, patterns)
        json_files["config.json"] = json_files["config.json"] | {"quantization_config": declared}
        json_files[QUANTIZATION_NAME] = config_files.hf_quant_config(algorithm, patterns)
    settings = {"source": fingerprint(source), "program": program}
    return Plan(conversion.parts(), json_files, other_files(source.folder), settings)


def _stays_quantized(module: str) -> bool:
    return any(pattern.fullmatch(module) for pattern in GROUPS.values())


def _algorithm(source: Checkpoint, names: Mapping[str, str], formats: Mapping[str, Format]) -> str | None:
    """The one quant_algo that all quantized linears can be declared as; None where none is quantized."""
    fp8 = [module for module, form in formats.items() if form is Format.FP8]
    fp4 = [module for module, form in formats.items() if form.is_nvfp4]
    if fp8 and fp4:
        raise ValueError(
            f"{source.folder} holds {some(fp8)} as FP8 and {some(fp4)} as NVFP4; a converted checkpoint has one "
            "format. Quantize the float checkpoint again with `lilicorr quantize`."
        )
    # Weights alone can be read without input scales; activations are quantized only if every linear has one.
    have_input_scale = all(f"{module}.input_scale" in names for module in fp8 + fp4)
    if fp4:
        return config_files.NVFP4 if have_input_scale else config_files.NVFP4_W4A16
    if not fp8:
        return None
    shapes = [source.tensors[names[f"{module}.weight_scale"]].shape for module in fp8]
    one_scale = all(shape in ((), (1,)) for shape in shapes)
    return config_files.FP8_STATIC if have_input_scale and one_scale else config_files.FP8_ROWS


def _refuse_mixed_products(source: Checkpoint, formats: Mapping[str, Format]) -> None:
    """Raises ValueError where one of the linears that vLLM fuses is quantized and another is float."""
    for module, form in formats.items():
        fused = [name for name in config_files.fused_group(module) if name in formats]
        floats = [name for name in fused if formats[name] is Format.FLOAT]
        if form is not Format.FLOAT and floats:
            raise ValueError(
                f"{source.folder} holds {module} as {form} and {some(floats)} as float; other programs compute them as "
                "one product of one format. Quantize the float checkpoint again with `lilicorr quantize`."
            )


@dataclass(frozen=True)
class _Conversion:
    """One checkpoint on its way.

    Attributes:
        names: canonical name to stored name.
        formats: canonical module to the format that is written.
        decoded: canonical modules that are stored quantized and written in float, with their stored format.
        algorithm: quant_algo of the written checkpoint; None for float.
        program: whose names are written.
    """

    source: Checkpoint
    names: Mapping[str, str]
    formats: Mapping[str, Format]
    decoded: Mapping[str, Format]
    algorithm: str | None
    program: str

    def parts(self) -> list[Part]:
        parts = []
        for name, stored in self.names.items():
            module, _, kind = name.rpartition(".")
            form = self.formats.get(module, Format.FLOAT)
            if module in self.decoded and kind in ("weight", *_SCALES):
                if kind == "weight":
                    parts.append(self._decoded_part(module))
                continue
            if form is not Format.FLOAT and kind == "weight":
                parts.append(self._nvfp4_part(module) if form.is_nvfp4 else self._fp8_part(module))
            elif form is Format.FLOAT or kind not in _SCALES:
                parts.append(copied_part(self.source, stored, self._written(name)))
        return parts

    def _written(self, name: str) -> str:
        return sequential_name(name) if self.program == SGLANG else name

    def _planned(self, module: str, kind: str, dtype: str, shape: tuple[int, ...]) -> PlannedTensor:
        # Only whole tensor names are mapped, so a scale is named after its weight.
        stem = self._written(f"{module}.weight").removesuffix("weight")
        return PlannedTensor(stem + kind, dtype, shape)

    def _shape(self, module: str, kind: str) -> tuple[int, ...]:
        return self.source.tensors[self.names[f"{module}.{kind}"]].shape

    def _read(self, module: str, kind: str) -> torch.Tensor:
        return self.source.read(self.names[f"{module}.{kind}"])

    def _largest(self, module: str, kind: str) -> torch.Tensor:
        """[] float32, of the linears that vLLM fuses with this one: it keeps the largest."""
        fused = [name for name in config_files.fused_group(module) if self.formats.get(name) is self.formats[module]]
        return torch.stack([self._read(name, kind).float().reshape(()) for name in fused]).amax()

    def _decoded_part(self, module: str) -> Part:
        form, packed = self.decoded[module], self._shape(module, "weight")
        shape = (packed[0], 2 * packed[1]) if form.is_nvfp4 else packed
        tensor = self._planned(module, "weight", "BF16", shape)

        def make() -> _Made:
            weight, scale = self._read(module, "weight"), self._read(module, "weight_scale")
            if form.is_nvfp4:
                exact = nvfp4.decode(weight, scale, self._read(module, "weight_scale_2"))
            else:
                exact = fp8.decode(weight, scale)
            made = exact.bfloat16()
            norm = exact.norm().item()
            return {tensor.name: made}, {
                "module": module,
                "format": "float",
                "change": f"decoded from {form}",
                "relative_error": (made.float() - exact).norm().item() / norm if norm else 0.0,
            }

        return Part(module, (tensor,), make)

    def _nvfp4_part(self, module: str) -> Part:
        tensors = [
            self._planned(module, "weight", "U8", self._shape(module, "weight")),
            self._planned(module, "weight_scale", "F8_E4M3", self._shape(module, "weight_scale")),
            self._planned(module, "weight_scale_2", "F32", ()),
        ]
        if self.algorithm == config_files.NVFP4:
            tensors.append(self._planned(module, "input_scale", "F32", ()))

        def make() -> _Made:
            kinds = ("weight", "weight_scale", "weight_scale_2")
            stored = nvfp4.EncodedNvfp4(*(self._read(module, kind) for kind in kinds))
            common = self._largest(module, "weight_scale_2")
            made, error = rescale(stored, common)
            values = [*made]
            if self.algorithm == config_files.NVFP4:
                values.append(self._largest(module, "input_scale"))
            report: dict[str, Any] = {}
            if error is not None:
                report = {
                    "module": module,
                    "format": str(self.formats[module]),
                    "change": f"weight_scale_2 {stored.weight_scale_2.item():.3e} to {common.item():.3e}",
                    "relative_error": error,
                }
            return {tensor.name: value for tensor, value in zip(tensors, values, strict=True)}, report

        return Part(module, tuple(tensors), make)

    def _fp8_part(self, module: str) -> Part:
        shape = self._shape(module, "weight")
        per_row = self.algorithm == config_files.FP8_ROWS
        tensors = [
            self._planned(module, "weight", "F8_E4M3", shape),
            self._planned(module, "weight_scale", "F32", shape[:1] if per_row else ()),
        ]
        if not per_row:
            tensors.append(self._planned(module, "input_scale", "F32", ()))

        def make() -> _Made:
            scale = self._read(module, "weight_scale").float().reshape(-1)  # [1] or [N]
            values = [self._read(module, "weight"), scale.expand(shape[0]) if per_row else scale.reshape(())]
            if not per_row:
                values.append(self._largest(module, "input_scale"))
            return {tensor.name: value for tensor, value in zip(tensors, values, strict=True)}, {}

        return Part(module, tuple(tensors), make)


def rescale(stored: nvfp4.EncodedNvfp4, weight_scale_2: torch.Tensor) -> tuple[nvfp4.EncodedNvfp4, float | None]:
    """An NVFP4 weight under another weight_scale_2, and its relative error against the stored one.

    The ratio goes into weight_scale, rounded to E4M3, and the codes stay: exact where the ratio is a power of two.
    To encode again would choose the same scale and codes, except where an exporter's group does not reach code 6.

    Returns:
        The weight, and the error; None where the scale was the same already.
    """
    scale_2 = weight_scale_2.reshape(())
    if torch.equal(stored.weight_scale_2.reshape(()), scale_2):
        return stored._replace(weight_scale_2=scale_2), None
    folded = stored.weight_scale.float() * (stored.weight_scale_2.reshape(()) / scale_2)
    # A group of scale zero is zeros, whatever its codes; any other keeps a scale.
    folded = torch.where(folded == 0, 0.0, folded.clamp(nvfp4.E4M3_SMALLEST, nvfp4.E4M3_MAX))
    made = stored._replace(weight_scale=folded.to(torch.float8_e4m3fn), weight_scale_2=scale_2)
    return made, _difference(stored, made)


def _difference(before: nvfp4.EncodedNvfp4, after: nvfp4.EncodedNvfp4) -> float:
    """Norm of the difference of two encoded weights over the first one's norm; 0 for zeros."""
    difference = norm = 0.0
    num_rows, num_bytes = before.weight.shape
    for rows in nvfp4.row_blocks(num_rows, 2 * num_bytes):
        old, new = (nvfp4.decode(e.weight[rows], e.weight_scale[rows], e.weight_scale_2) for e in (before, after))
        difference += (new - old).double().square().sum().item()
        norm += old.double().square().sum().item()
    return (difference / norm) ** 0.5 if norm else 0.0
