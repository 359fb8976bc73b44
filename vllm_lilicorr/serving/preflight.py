# SPDX-License-Identifier: Apache-2.0
"""What a machine must have before a server is started on its CPU.

Each check returns problems (they end the run) and remarks (they do not), each one
sentence with the value found, the rule and the remedy.
"""

import os
import platform
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
SERVER_GIB = 4.0


@dataclass
class Findings:
    """Collected problems and remarks."""

    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_machine(findings: Findings, needed_gib: float = SERVER_GIB) -> None:
    """Operating system, instruction set, memory."""
    if platform.system() != "Linux":
        findings.problems.append(
            f"This is {platform.system()}, and vLLM's CPU build used here is for Linux; "
            "use a Linux machine, container or WSL."
        )
        return
    if platform.machine() == "x86_64":
        check_instruction_set(Path("/proc/cpuinfo").read_text(), findings)
    check_memory(available_memory_gib(), findings, needed_gib)


def check_instruction_set(cpuinfo: str, findings: Findings) -> None:
    """vLLM's x86-64 CPU build carries AVX-512 and AVX2 kernels, and none below."""
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    if "avx2" not in flags:
        findings.problems.append(
            "This CPU has neither AVX-512 nor AVX2, and vLLM's CPU build has no kernels "
            "below AVX2; run on a CPU with AVX2 (any server CPU since about 2015)."
        )
    elif "avx512f" not in flags:
        findings.remarks.append(
            "This CPU has no AVX-512: vLLM uses its AVX2 kernels, which work but are slower, "
            "and speed-ups differ from the published ones."
        )


def available_memory_gib() -> float:
    """Memory a new process may take: the kernel's estimate, or the cgroup's limit if lower."""
    available = float("inf")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024 / GIB
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, (int(text) - int(used.read_text())) / GIB)
    return available


def check_memory(available_gib: float, findings: Findings, needed_gib: float = SERVER_GIB) -> None:
    """A server is three processes that import torch and vLLM, and 1 GiB of KV cache."""
    if available_gib < needed_gib:
        findings.problems.append(
            f"{available_gib:.1f} GiB of memory are available, and {needed_gib:.0f} GiB are needed; "
            "close other programs or raise the container's limit."
        )


def busy_cores(seconds: float = 0.5) -> float:
    """How many cores are busy now. The load average would still count an installation just ended."""

    def times() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all, and idle or waiting for a disk

    total, idle = times()
    time.sleep(seconds)
    total_after, idle_after = times()
    passed = total_after - total
    return os.cpu_count() * (1 - (idle_after - idle) / passed) if passed else 0.0


def check_load(busy: float, cores: int, findings: Findings) -> None:
    """Whether others use the cores on which speed is about to be measured."""
    if busy > cores / 4:
        findings.remarks.append(
            f"Other programs keep {busy:.1f} of {cores} cores busy: starting takes longer, and speeds "
            "will be low and noisy; run on a quiet machine to see what speculation gains."
        )


def choose_port(wanted: int | None, host: str = "127.0.0.1") -> int:
    """A port that can be bound on `host`: the wanted one, else any free one.

    Raises:
        ValueError: The wanted port is taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted or 0))
        except OSError as error:
            raise ValueError(
                f"Port {wanted} on {host} cannot be used ({error.strerror}); "
                "name another with --port, or leave it out and a free one is taken."
            ) from None
        return probe.getsockname()[1]
