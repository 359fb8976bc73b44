# SPDX-License-Identifier: Apache-2.0
"""Where a figure comes from: command, revision, versions, hardware, date."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import vllm_lilicorr
from vllm_lilicorr.serving.installation import VllmMissingError, find_vllm

NOT_INSTALLED = "not installed"


def versions() -> dict[str, str]:
    """Versions of what decides behaviour and speed, without importing any of it."""
    try:
        vllm = find_vllm()
        vllm_text = f"{vllm.version} (distribution {vllm.distribution})"
    except VllmMissingError:
        vllm_text = NOT_INSTALLED
    return {
        "vllm-lilicorr": vllm_lilicorr.__version__,
        "vllm": vllm_text,
        "torch": _distribution_version("torch"),
        "triton": _distribution_version("triton"),
        "transformers": _distribution_version("transformers"),
        "python": platform.python_version(),
    }


def provenance() -> dict[str, object]:
    """What has to stand beside every measured figure."""
    return {
        "command": shlex.join(["lilicorr", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_revision": git_revision(),
        "versions": versions(),
        "hardware": hardware(),
    }


def hardware() -> dict[str, object]:
    """CPU model, cores that this process may use, memory."""
    model = platform.processor() or platform.machine()
    memory_gib = 0.0
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    flags: set[str] = set()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, text = line.partition(":")
            if key.strip() == "model name":
                model = text.strip()
            elif key.strip() == "flags":
                flags = set(text.split())
    if meminfo.is_file():
        memory_gib = int(meminfo.read_text().split()[1]) / 2**20
    instructions = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "instructions": instructions,
        "memory_gib": round(memory_gib, 1),
    }


def git_revision() -> str | None:
    """The commit of the checkout this package lies in, "+changes" if edited, None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        revision = _git(root, "rev-parse", "--short=12", "HEAD")
        return revision + ("+changes" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
