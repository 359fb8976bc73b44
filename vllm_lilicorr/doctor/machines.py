# SPDX-License-Identifier: Apache-2.0
"""Machines that a pair may be served on: known ones by name, and the present one.

The present one is asked of the driver's own command, never of CUDA: a process that
has initialised CUDA cannot fork workers that use it, and importing torch takes seconds.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vllm_lilicorr.serving.preflight import available_memory_gib

GIB = 2**30
DRIVER_PATIENCE = 10.0  # seconds


@dataclass(frozen=True)
class Machine:
    """One kind of accelerator, or a CPU.

    Attributes:
        name: what the user types, "cpu" for a machine without a GPU.
        title: what people call it.
        capability: CUDA compute capability, None for a CPU.
        memory_gib: memory of one accelerator. As published, so what the driver
            reports is up to 3 % less; of the GB10, as its driver reports it.
        bandwidth: bytes per second that its memory can deliver, as published;
            None where unknown.
        integrated: whether it shares its memory with the operating system.
        is_present: whether this is the machine that runs this program.
    """

    name: str
    title: str
    capability: tuple[int, int] | None
    memory_gib: float
    bandwidth: float | None
    integrated: bool = False
    is_present: bool = False

    def floor_seconds(self, num_bytes: float) -> float | None:
        """Seconds below which `num_bytes` cannot be read once; None where the bandwidth is unknown."""
        return num_bytes / self.bandwidth if self.bandwidth else None


# Bandwidths are the makers' figures: of the SXM modules for H100 and H200, of one GPU of an HGX B200.
KNOWN_MACHINES = {
    machine.name: machine
    for machine in (
        Machine("gb10", "DGX Spark (GB10)", (12, 1), 121.69, 273e9, integrated=True),
        Machine("rtx-pro-6000", "RTX PRO 6000 Blackwell", (12, 0), 96, 1.792e12),
        Machine("h100", "H100", (9, 0), 80, 3.35e12),
        Machine("h200", "H200", (9, 0), 141, 4.8e12),
        Machine("b200", "B200", (10, 0), 180, 8e12),
    )
}
# Words of the driver's product names, "NVIDIA RTX PRO 6000 Blackwell Server Edition" and the like.
_PRODUCT_WORDS = {name: name.replace("-", " ").upper() for name in KNOWN_MACHINES}


def find_machine(name: str) -> Machine:
    """A known machine by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in KNOWN_MACHINES:
        raise ValueError(
            f"{name!r} is not a machine known here; use one of {', '.join(KNOWN_MACHINES)}, "
            "or leave it out and this machine is looked at."
        )
    return KNOWN_MACHINES[name]


def present_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The first GPU that a server started here would see, else the CPU."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    listing = _ask_driver(first) if first not in ("", "-1") else None
    machine = read_listing(listing) if listing else None
    return machine or present_cpu()


def present_cpu() -> Machine:
    """This machine's CPU, on which a CPU build of vLLM runs whatever GPUs there are."""
    return Machine("cpu", "this machine's CPU", None, available_memory_gib(), None, integrated=True, is_present=True)


def read_listing(listing: str) -> Machine | None:
    """A machine from one line of `nvidia-smi --query-gpu=name,compute_cap,memory.total --format=csv`.

    For example "NVIDIA H200, 9.0, 143771 MiB"; a GPU without memory of its own reports
    "[N/A]" there. None for anything else.
    """
    fields = [field.strip() for field in listing.strip().splitlines()[0].split(",")] if listing.strip() else []
    if len(fields) != 3 or not fields[1].replace(".", "", 1).isdecimal():
        return None
    title, (major, _, minor) = fields[0], fields[1].partition(".")
    amount, _, unit = fields[2].partition(" ")
    integrated = not (amount.isdecimal() and unit == "MiB")
    words = title.upper().replace("-", " ").split()
    known = next(
        (KNOWN_MACHINES[name] for name, text in _PRODUCT_WORDS.items() if _contains(words, text.split())), None
    )
    memory_gib = _system_memory_gib() if integrated else int(amount) / 1024
    if known is None:
        known = Machine(title, title, None, memory_gib, None)
    capability = (int(major), int(minor or 0))
    return replace(
        known, title=title, capability=capability, memory_gib=memory_gib, integrated=integrated, is_present=True
    )


def _contains(words: list[str], wanted: list[str]) -> bool:
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words)))


def _system_memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _ask_driver(device: str) -> str | None:
    """One line about one GPU, or None without a driver. `device`: an index or a UUID."""
    command = ["nvidia-smi", "-i", device, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
