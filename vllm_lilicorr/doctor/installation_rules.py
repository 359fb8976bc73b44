# SPDX-License-Identifier: Apache-2.0
"""Checks of the installed vLLM, read from its sources: importing it takes seconds."""

import ast
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_lilicorr.checkpoint.findings import Finding, Level, some
from vllm_lilicorr.engine.options import KEY
from vllm_lilicorr.engine.seams import CONFIG_SEAMS, CPU_SEAMS, TESTED_VERSIONS, V1_SEAMS, V2_SEAMS, is_tested
from vllm_lilicorr.engine.seams import mismatches as seam_mismatches
from vllm_lilicorr.serving.installation import VllmInstallation, VllmMissingError, find_vllm
from vllm_lilicorr.settings import Settings

PLUGIN_NAME = "lilicorr"


def check_installation(speculative: Mapping[str, Any] = MappingProxyType({})) -> list[Finding]:
    """Version and seams of the installed vLLM, whether it loads this plugin, and whether it knows the keys.

    Args:
        speculative: a speculative config, keys with underscores.
    """
    try:
        vllm = find_vllm()
    except VllmMissingError as error:
        return [Finding("vLLM", Level.WARNING, str(error), "")]
    return [*_check_version(vllm), *_check_plugin(), *_check_keys(speculative, vllm.package)]


def _check_version(vllm: VllmInstallation) -> Iterable[Finding]:
    value = f"vLLM {vllm.version}"
    rule = f"tested with {', '.join(TESTED_VERSIONS)}"
    if not is_tested(vllm.version):
        yield Finding(
            "vLLM",
            Level.ERROR,
            value,
            f"{rule}; with any other the plugin leaves vLLM as it is",
            "Install a tested version, or a vllm-lilicorr that knows this one.",
        )
        return
    seams = CONFIG_SEAMS + ((V1_SEAMS + CPU_SEAMS) if vllm.is_cpu_build else V2_SEAMS)
    if problems := seam_mismatches(seams, vllm.package):
        yield Finding(
            "vLLM",
            Level.ERROR,
            f"{value}: {some(problems)}",
            "this installation differs from the release that was tested, so the plugin leaves vLLM as it is",
            "Install the release again, unchanged.",
        )
    else:
        yield Finding("vLLM", Level.OK, value, f"{rule}; all {len(seams)} seams fit")


def _check_plugin() -> Iterable[Finding]:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        yield Finding(
            "plugin",
            Level.ERROR,
            f"VLLM_PLUGINS={allowed}",
            f"vLLM loads the plugins of this list only, and {PLUGIN_NAME} is not in it",
            f"Add {PLUGIN_NAME} to it, or unset it.",
        )
    try:
        if Settings.from_environment().disable:
            yield Finding(
                "plugin", Level.ERROR, "LILICORR_DISABLE=1", "it leaves vLLM as it is", "Unset LILICORR_DISABLE."
            )
    except ValueError as error:
        yield Finding("plugin", Level.ERROR, str(error), "")


def _check_keys(speculative: Mapping[str, Any], package: Path) -> Iterable[Finding]:
    known = speculative_keys(package) | {KEY}
    for key in sorted(speculative.keys() - known):
        close = difflib.get_close_matches(key, known, n=1)
        yield Finding(
            "speculative config",
            Level.ERROR,
            f"The key {key!r}",
            "this vLLM has no such key and refuses to start with it",
            f"Did you mean {close[0]!r}?" if close else "Leave it out.",
        )


def speculative_keys(package: Path) -> set[str]:
    """Fields of vLLM's SpeculativeConfig in the sources at `package`."""
    tree = ast.parse((package / "config" / "speculative.py").read_text(encoding="utf-8"))
    return {
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "SpeculativeConfig"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
