# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files declare about its quantization, compared with what its tensors are.

Declarations stand in config.json's quantization_config (Model Optimizer's converted
or raw dictionary, compressed-tensors, or plain "fp8") and in hf_quant_config.json.
Exporters write lists of excluded modules that match nothing, or everything, in the
program that reads them; the tensors decide, and a difference is explained.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_lilicorr.checkpoint.findings import Finding, Level, some
from vllm_lilicorr.checkpoint.layout import canonical_name
from vllm_lilicorr.checkpoint.quantization import GROUP_SIZE, Format, Stored, by_canonical_name, module_formats

CHECK = "quantization"
AS_STORED = "the tensors decide, and they are loaded as what they are"


@dataclass(frozen=True)
class Declaration:
    """What a checkpoint's files say about its quantization.

    Attributes:
        source: the file that says it.
        words: its own words, such as "modelopt W4A16_NVFP4".
        format: the format those words mean; None where they mean none of ours.
        group_size: of NVFP4 scales, where it is given.
        exclusions: patterns of modules that are not quantized, as written.
        is_raw: Model Optimizer's own dictionary, which vLLM's parser rejects in config.json.
    """

    source: str
    words: str
    format: Format | None
    group_size: int | None
    exclusions: tuple[str, ...]
    is_raw: bool = False

    def excludes(self, module: str) -> bool:
        """Whether a module (canonical name) is declared as not quantized."""
        return any(_matches(pattern, module) for pattern in self._patterns)

    @property
    def _patterns(self) -> list[str]:
        # An export that wraps the drafter names its parts "dflash_module."; "model*" is the target then.
        wrapped = any(pattern.startswith("dflash_module.") for pattern in self.exclusions)
        return [
            pattern.removeprefix("dflash_module.")
            for pattern in self.exclusions
            if not (wrapped and pattern.startswith("model"))
        ]


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None or re.match(pattern[3:], f"model.{module}") is not None
        except re.error:
            return False
    star = pattern.endswith("*")
    stem = pattern.rstrip("*").removesuffix(".")
    # canonical_name knows tensors: a name is mapped as if a weight followed it.
    mapped = canonical_name(f"{stem}.weight").removesuffix(".weight")
    if module == mapped or module.startswith(f"{mapped}."):
        return True
    return (star and module.startswith(mapped)) or fnmatch.fnmatchcase(module, f"{mapped}*" if star else mapped)


_ALGORITHMS = {
    "NVFP4": Format.NVFP4,
    "W4A16_NVFP4": Format.NVFP4_W4A16,
    "NVFP4_W4A16": Format.NVFP4_W4A16,
    "FP8": Format.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": Format.FP8,
}


def declarations(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> list[Declaration]:
    """Every declaration that the two files hold, config.json's first."""
    found = []
    declared = config.get("quantization_config")
    if isinstance(declared, Mapping) and declared:
        found.append(_declaration("config.json", declared))
    if hf_quant_config:
        found.append(_declaration("hf_quant_config.json", hf_quant_config))
    return [declaration for declaration in found if declaration]


def _declaration(source: str, value: Mapping[str, Any]) -> Declaration | None:
    raw = value.get("quantization")
    fields: Mapping[str, Any] = raw if isinstance(raw, Mapping) else value
    algorithm = str(fields.get("quant_algo") or "").upper()
    method = str(value.get("quant_method") or ("modelopt" if algorithm else "")).lower()
    exclusions = next(
        (fields[key] for key in ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")
         if isinstance(fields.get(key), list)), [])  # fmt: skip
    weights, activations = _first_group(fields.get("config_groups"))
    if algorithm:
        form = _ALGORITHMS.get(algorithm)
    elif method == "fp8":
        form = Format.FP8
    else:
        form = _scheme_format(weights, activations)
    if not (algorithm or method):
        return None
    group_size = fields.get("group_size", weights.get("group_size"))
    return Declaration(
        source=source,
        words=f"{method} {algorithm}".strip(),
        format=form,
        group_size=group_size if isinstance(group_size, int) else None,
        exclusions=tuple(str(pattern) for pattern in exclusions),
        is_raw=source == "config.json" and isinstance(raw, Mapping),
    )


def _first_group(groups: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    group = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    if not isinstance(group, Mapping):
        return {}, {}
    weights, activations = group.get("weights"), group.get("input_activations")
    return (weights if isinstance(weights, Mapping) else {}), (activations if isinstance(activations, Mapping) else {})


def _scheme_format(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> Format | None:
    if weights.get("type") != "float":
        return None
    if weights.get("num_bits") == 8:
        return Format.FP8
    if weights.get("num_bits") == 4:
        return Format.NVFP4 if activations else Format.NVFP4_W4A16
    return None


def declaration_findings(found: Iterable[Declaration], tensors: Mapping[str, Stored]) -> list[Finding]:
    """Compares declarations with what the tensors are.

    Args:
        found: from `declarations`.
        tensors: stored name to dtype and shape.
    """
    formats = module_formats(tensors)
    stored = by_canonical_name(tensors)
    linears = {name for name in formats if name != "embed_tokens" and _can_be_quantized(stored[f"{name}.weight"].shape)}
    quantized = {name for name in formats if formats[name] is not Format.FLOAT}
    findings: list[Finding] = []
    found = list(found)
    if quantized and not found:
        findings.append(
            Finding(
                CHECK,
                Level.WARNING,
                f"{some(sorted(quantized))} are stored as {_words(formats, quantized)}, and no file declares it",
                "they are loaded as what they are; other programs will misread them",
                "Write a declaration with `lilicorr convert`.",
            )
        )
    for declaration in found:
        findings += _compare_declaration(declaration, formats, linears, quantized)
    if not findings:
        words = _words(formats, quantized) if quantized else "float"
        findings.append(
            Finding(
                CHECK,
                Level.OK,
                f"{len(quantized)} of {len(formats)} weights are quantized ({words})",
                "tensors and declaration agree" if found else "none is declared",
            )  # fmt: skip
        )
    return findings


def _can_be_quantized(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] % GROUP_SIZE == 0


def _compare_declaration(
    declaration: Declaration, formats: Mapping[str, Format], linears: set[str], quantized: set[str]
) -> Iterable[Finding]:
    where = declaration.source

    def warn(value: str, rule: str) -> Finding:
        return Finding(CHECK, Level.WARNING, value, rule, "Write it right with `lilicorr convert`.")

    if declaration.format is None:
        yield warn(f"{where} declares {declaration.words!r}", "this is none of NVFP4, W4A16 NVFP4 and FP8; the "
                   "tensors decide how they are loaded")  # fmt: skip
        return
    if declaration.is_raw:
        yield warn(f"{where} holds Model Optimizer's own dictionary ({declaration.words})",
                   "it is understood here, but stock vLLM answers with \"Unknown ModelOpt quant algo\"")  # fmt: skip
    if declaration.group_size not in (None, GROUP_SIZE) and declaration.format.is_nvfp4:
        yield warn(f"{where} declares group_size {declaration.group_size}", f"NVFP4 scales groups of {GROUP_SIZE}")
    other = {name for name in quantized if formats[name] is not declaration.format}
    if other:
        yield warn(f"{where} declares {declaration.format}, but {some(sorted(other))} "
                   f"{'is' if len(other) == 1 else 'are'} {_words(formats, other)}",
                   AS_STORED)  # fmt: skip
    listed = {name for name in quantized if declaration.excludes(name)}
    if listed:
        yield warn(f"{where} lists {some(sorted(listed))} as not quantized, but the weights are "
                   f"{_words(formats, listed)}", AS_STORED)  # fmt: skip
    unlisted = {name for name in linears - quantized if not declaration.excludes(name)}
    if unlisted:
        yield warn(f"{where} declares {some(sorted(unlisted))} as {declaration.format}, but the weights are float",
                   "they are loaded as float; a program that believes the file reads noise")  # fmt: skip


def _words(formats: Mapping[str, Format], modules: Iterable[str]) -> str:
    return ", ".join(sorted({formats[module].value for module in modules}))
