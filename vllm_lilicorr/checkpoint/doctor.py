# SPDX-License-Identifier: Apache-2.0
"""Checks of a drafter, and of a drafter with its target, from their headers.

Each check looks at one thing and can be left out by name. None reads a tensor's
values but for the scalar scales of fused linears; `deep_values` reads them all.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_lilicorr.checkpoint import pair
from vllm_lilicorr.checkpoint.declaration import declaration_findings, declarations
from vllm_lilicorr.checkpoint.findings import Finding, Level, some
from vllm_lilicorr.checkpoint.layout import FUSED, attention_window, differences
from vllm_lilicorr.checkpoint.quantization import logical_shapes, storage_findings
from vllm_lilicorr.checkpoint.reader import Checkpoint, scan
from vllm_lilicorr.checkpoint.target_checks import mask_token, target_tensors
from vllm_lilicorr.method.geometry import ARCHITECTURE, DrafterGeometry, is_lilicorr_config

_RIGHT_CONFIG = "Use the config.json that was exported with these weights, or export the drafter again."
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Trained drafters have 1e-4 and 8 to 16; these limits only catch what is out of all proportion.
_PLAUSIBLE_SCALE, _PLAUSIBLE_EPS = (0.5, 200.0), (1e-12, 1e-2)


@dataclass(frozen=True)
class Subject:
    """What is looked at.

    Attributes:
        drafter: the drafter's headers.
        geometry: its dimensions; None where config.json does not give them.
        target: the target's headers, or None where no target was named.
    """

    drafter: Checkpoint
    geometry: DrafterGeometry | None
    target: Checkpoint | None

    @property
    def target_config(self) -> Mapping[str, Any] | None:
        return pair.text_config(self.target.config) if self.target and self.target.config else None


Check = Callable[[Subject], Iterable[Finding]]


def examine(
    drafter: Path, target: Path | Checkpoint | None = None, skip: Iterable[str] = ()
) -> tuple[Subject, list[Finding]]:
    """Runs every check that needs no values.

    Args:
        drafter: its folder.
        target: the target's folder, or its headers where they were read already.
        skip: names of checks to leave out.

    Returns:
        What was looked at, and all findings in the order of the checks.
    """
    left_out = set(skip)
    checkpoint, findings = scan(drafter)
    checkpoint_of_target = target if isinstance(target, Checkpoint) else None
    if isinstance(target, Path):
        checkpoint_of_target, problems = scan(target)
        findings += [
            Finding("target files", problem.level, f"Target: {problem.value}", problem.rule, problem.remedy)
            for problem in problems
        ]
    if not findings:
        count, size = len(checkpoint.tensors), checkpoint.num_bytes / 1e9
        findings.append(Finding("files", Level.OK, f"{count} tensors, {size:.3g} GB", "every file is whole"))
    findings = [finding for finding in findings if finding.check not in left_out]
    geometry, geometry_finding = _read_geometry(checkpoint)
    if geometry_finding and "geometry" not in left_out:
        findings.append(geometry_finding)
    subject = Subject(checkpoint, geometry, checkpoint_of_target)
    for name, check in CHECKS.items():
        if name not in left_out:
            findings += check(subject)
    return subject, findings


def _read_geometry(checkpoint: Checkpoint) -> tuple[DrafterGeometry | None, Finding | None]:
    if not checkpoint.config or not is_lilicorr_config(checkpoint.config):
        return None, None
    try:
        geometry = DrafterGeometry.from_config(checkpoint.config)
    except ValueError as error:
        return None, Finding("geometry", Level.ERROR, str(error), "")
    words = (
        f"block_size {geometry.block_size} ({geometry.num_slots} drafted tokens), {geometry.top_k} candidates, "
        f"{geometry.num_hidden_layers} layers of {geometry.hidden_size}, head of {geometry.num_layers} x "
        f"{geometry.head_width}"
    )
    return geometry, Finding("geometry", Level.OK, words, "consistent in itself")


def architecture(subject: Subject) -> Iterable[Finding]:
    """Content, not a folder's name, makes it a LiLiCorr drafter."""
    config = subject.drafter.config
    if not config:
        return
    named = config.get("architectures")
    if not is_lilicorr_config(config):
        swapped = subject.target is not None and is_lilicorr_config(subject.target.config)
        yield Finding(
            "architecture",
            Level.ERROR,
            f"architectures {named} in config.json",
            f"a LiLiCorr drafter says {ARCHITECTURE!r}, or has projector_type 'lilicorr' in dflash_config",
            "Drafter and target are swapped: name them the other way round." if swapped else "Name a LiLiCorr drafter.",
        )
    elif not isinstance(named, list) or ARCHITECTURE not in named:
        yield Finding(
            "architecture",
            Level.WARNING,
            f"architectures {named} with projector_type 'lilicorr'",
            "an older export: it loads here, and as a plain DFlash drafter, without its correlator, elsewhere",
            "Write it in the newer form with `lilicorr convert`.",
        )
    else:
        yield Finding("architecture", Level.OK, ARCHITECTURE, "a LiLiCorr drafter")


def tensors(subject: Subject) -> Iterable[Finding]:
    """Names and shapes against the geometry, in any naming."""
    if subject.geometry is None or not subject.drafter.tensors:
        return
    found = logical_shapes(subject.drafter.tensors)
    missing, unexpected, misshapen = [], [], []
    for name, expected, shape in differences(subject.geometry, found):
        if shape is None:
            missing.append(f"{name} {list(expected or ())}")
        elif expected is None:
            unexpected.append(f"{name} {list(shape)}")
        else:
            misshapen.append(f"{name}: expected {list(expected)}, found {list(shape)}")
    rules = (
        (missing, "missing", "config.json needs them"),
        (unexpected, "unexpected", "config.json has no place for them"),
        (misshapen, "of another shape", "config.json says otherwise"),
    )
    for names, what, rule in rules:
        if names:
            value = f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {some(sorted(names))}"
            yield Finding("tensors", Level.ERROR, value, rule, _RIGHT_CONFIG)
    if not (missing or unexpected or misshapen):
        yield Finding("tensors", Level.OK, f"{len(found)} tensors", "names and shapes are those of config.json")


def storage(subject: Subject) -> Iterable[Finding]:
    """Dtypes, and the scales that quantized weights need."""
    if subject.drafter.tensors:
        yield from storage_findings(subject.drafter.tensors)


def quantization(subject: Subject) -> Iterable[Finding]:
    """What the files declare against what the tensors are."""
    drafter = subject.drafter
    if drafter.tensors:
        stated = declarations(drafter.config, drafter.hf_quant_config)
        yield from declaration_findings(stated, drafter.tensors)


def fused_scales(subject: Subject) -> Iterable[Finding]:
    """q/k/v and gate/up become one product each in vLLM, which keeps one weight_scale_2."""
    if subject.geometry is None:
        return
    stored = {name.removeprefix("model."): name for name in subject.drafter.tensors}
    unequal = []
    for index in range(subject.geometry.num_hidden_layers):
        for product, modules in FUSED.items():
            names = [f"layers.{index}.{module}.weight_scale_2" for module in modules]
            scales = {
                subject.drafter.read_scalar(stored[name])
                for name in names
                if name in stored
                and (entry := subject.drafter.tensors[stored[name]]).dtype == "F32"
                and entry.num_bytes == 4
            }
            if len(scales) > 1:
                unequal.append(f"layers.{index}.{product}")
    if unequal:
        yield Finding(
            "fused scales",
            Level.WARNING,
            f"The linears of {some(unequal)} have different weight_scale_2",
            "exact here; stock vLLM fuses them under the largest and scales the others wrongly, without an error",
            "Write them with one scale with `lilicorr convert`.",
        )


def attention(subject: Subject) -> Iterable[Finding]:
    """Layer types, windows and the RoPE layout."""
    geometry, config = subject.geometry, subject.drafter.config
    if geometry is None:
        return
    nested = config.get("dflash_config") or {}
    kinds = config.get("layer_types")
    sliding = bool(nested.get("use_swa"))
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != geometry.num_hidden_layers:
            found = len(kinds) if isinstance(kinds, list) else kinds
            yield Finding(
                "attention",
                Level.ERROR,
                f"layer_types has {found} entries",
                f"the drafter has {geometry.num_hidden_layers} layers",
                _RIGHT_CONFIG,
            )
            return
        unknown = sorted({str(kind) for kind in kinds} - set(_LAYER_TYPES))
        if unknown:
            yield Finding(
                "attention", Level.ERROR, f"layer_types has {some(unknown)}", f"known are {some(list(_LAYER_TYPES))}",
                _RIGHT_CONFIG,
            )  # fmt: skip
            return
        sliding = sliding or "sliding_attention" in kinds
        if len(set(kinds)) > 1:
            yield Finding(
                "attention",
                Level.WARNING,
                "layer_types mixes full and sliding attention",
                "only Model Runner V2 runs that; a CPU runs V1, which refuses it",
                "On CUDA, start vLLM with VLLM_USE_V2_MODEL_RUNNER=1.",
            )
    window = nested.get("swa_window_size", config.get("sliding_window"))
    if sliding and not (isinstance(window, int) and window > 0):
        yield Finding(
            "attention",
            Level.ERROR,
            f"sliding_window {window!r}",
            "sliding attention needs a window, as sliding_window or as dflash_config.swa_window_size",
            _RIGHT_CONFIG,
        )
    elif attention_window(config):
        yield Finding(
            "attention",
            Level.WARNING,
            f"sliding_window {window} without use_sliding_window",
            "the window is read here; stock vLLM does not see it and refuses the drafter",
            "Write it in the form that all read with `lilicorr convert`.",
        )
    elif config.get("is_neox_style") is False:
        yield Finding(
            "attention",
            Level.WARNING,
            "is_neox_style false",
            "drafters are trained with the neox layout as a rule, and the wrong layout costs acceptance without an "
            "error",
            "Compare it with the training configuration.",
        )
    else:
        yield Finding("attention", Level.OK, f"window {window}" if sliding else "full attention", "layers are known")


def head_constants(subject: Subject) -> Iterable[Finding]:
    """A wrong logit_scale or vector_eps fails without an error."""
    if subject.geometry is None:
        return
    bounds = {
        "lilicorr_logit_scale": (subject.geometry.logit_scale, *_PLAUSIBLE_SCALE),
        "lilicorr_vector_eps": (subject.geometry.vector_eps, *_PLAUSIBLE_EPS),
    }
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            yield Finding(
                "head constants",
                Level.WARNING,
                f"{name} {value:g}",
                f"trained drafters lie between {low:g} and {high:g}; a wrong value costs acceptance without an error",
                "Compare it with the training configuration.",
            )


def _with_target(check: Callable[[DrafterGeometry, Subject, Mapping[str, Any]], Iterable[Finding]]) -> Check:
    def run(subject: Subject) -> Iterable[Finding]:
        if subject.geometry is not None and (target := subject.target_config):
            yield from check(subject.geometry, subject, target)

    return run


CHECKS: dict[str, Check] = {
    "architecture": architecture,
    "tensors": tensors,
    "storage": storage,
    "quantization": quantization,
    "fused scales": fused_scales,
    "attention": attention,
    "head constants": head_constants,
    "target dimensions": _with_target(lambda geometry, subject, target: pair.dimension_findings(geometry, target)),
    "target layers": _with_target(
        lambda geometry, subject, target: pair.layer_findings(geometry, subject.drafter.config, target)
    ),
    "vocabulary": _with_target(lambda geometry, subject, target: pair.vocabulary_findings(geometry, target)),
    "mask token": _with_target(lambda geometry, subject, target: mask_token(geometry, subject.target)),
    "target tensors": _with_target(lambda geometry, subject, target: target_tensors(geometry, subject.target, target)),
}
# What is left out where the files do not hold the weights that will be used.
WEIGHT_CHECKS = ("files", "tensors", "storage", "quantization", "fused scales")
