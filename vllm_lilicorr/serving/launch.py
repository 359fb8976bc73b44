# SPDX-License-Identifier: Apache-2.0
"""The command and environment that start vLLM's own OpenAI server.

`lilicorr serve ARGS` takes what `vllm serve ARGS` takes. What it adds is what has
to be true before Python starts: preloaded libraries on a CPU.
"""

import ctypes.util
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_lilicorr.serving.installation import VllmInstallation, find_vllm
from vllm_lilicorr.serving.speculative_overrides import merge_speculative_overrides

OPENMP_NAMES = ("libiomp", "libomp", "libgomp")


@dataclass(frozen=True)
class LaunchPlan:
    """What is about to be executed.

    Attributes:
        command: The process, word by word.
        environment: Variables that are set or changed for it, nothing else.
        notes: One line each, for the person at the terminal.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """The command as a person would type it into a shell."""
        assignments = [f"{name}={shlex.quote(text)}" for name, text in self.environment.items()]
        return " ".join([*assignments, shlex.join(self.command)])

    def execute(self, environ: Mapping[str, str]) -> None:
        """Replaces this process; never returns."""
        os.execve(self.command[0], self.command, {**environ, **self.environment})


def plan_serve(arguments: list[str], environ: Mapping[str, str]) -> LaunchPlan:
    """Plans `lilicorr serve ARGUMENTS`.

    Raises:
        VllmMissingError: No vLLM is installed.
        ValueError: Speculative options that cannot be merged.
    """
    vllm = find_vllm()
    arguments, merged = merge_speculative_overrides(arguments)
    environment, notes = preload_environment(vllm, environ)
    if merged:
        notes.insert(0, merged)
    return LaunchPlan([*vllm_command(vllm), "serve", *arguments], environment, notes)


def vllm_command(vllm: VllmInstallation) -> list[str]:
    """The words that stand for `vllm` on this installation."""
    if not vllm.has_working_command:
        return [sys.executable, "-m", "vllm_lilicorr.serving.vllm_command"]
    script = Path(sys.executable).with_name("vllm")
    if script.is_file():
        return [str(script)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def preload_environment(vllm: VllmInstallation, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """LD_PRELOAD for a CPU build, put before what the user preloads.

    GNU's OpenMP spins while it waits, so that a busy neighbour on the same cores
    slows a small kernel many times over; Intel's does not. vLLM preloads
    PyTorch's copy of GNU's where it finds no other.

    Returns:
        Variables to set (empty where nothing changes), and notes.
    """
    if not vllm.is_cpu_build or platform.system() != "Linux":
        return {}, []
    preloaded = environ.get("LD_PRELOAD", "")
    added: list[str] = []
    notes: list[str] = []
    if "tcmalloc" not in preloaded:
        allocator = _find_allocator(vllm)
        if allocator:
            added.append(allocator)
    if not any(name in preloaded for name in OPENMP_NAMES) and platform.machine() == "x86_64":
        openmp = Path(sys.prefix, "lib", "libiomp5.so")
        if openmp.is_file():
            added.append(str(openmp))
        else:
            notes.append(
                f"{openmp} not found, so Intel's OpenMP is not preloaded and drafting is slower "
                "on busy cores; pip install intel-openmp in this environment."
            )
    if not added:
        return {}, notes
    return {"LD_PRELOAD": ":".join([*added, *filter(None, [preloaded])])}, notes


def _find_allocator(vllm: VllmInstallation) -> str | None:
    """tcmalloc as bundled with vLLM, of this environment, or of the system; it is optional."""
    for folder in (vllm.package / "libs", Path(sys.prefix, "lib")):
        for pattern in ("libtcmalloc_minimal*.so*", "libtcmalloc.so*"):
            for found in sorted(folder.glob(pattern)):
                return str(found)
    return ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
