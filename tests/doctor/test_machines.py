# SPDX-License-Identifier: Apache-2.0
"""Machines by name, and the one that is there."""

import sys
from pathlib import Path

import pytest

from vllm_lilicorr.doctor import machines
from vllm_lilicorr.doctor.machines import KNOWN_MACHINES, find_machine, present_machine, read_listing


@pytest.mark.parametrize(
    ("name", "capability", "integrated"),
    [
        ("gb10", (12, 1), True),
        ("rtx-pro-6000", (12, 0), False),
        ("h100", (9, 0), False),
        ("h200", (9, 0), False),
        ("b200", (10, 0), False),
    ],
)
def test_known_machines(name, capability, integrated):
    """Would catch a card under another's capability: it decides every backend."""
    machine = find_machine(name)
    assert (machine.capability, machine.integrated, machine.is_present) == (capability, integrated, False)


def test_an_unknown_name_is_answered_with_the_known_ones():
    """Would catch a KeyError, or a message without the remedy."""
    with pytest.raises(ValueError, match="'h300' is not a machine known here; use one of gb10, rtx-pro-6000, h100"):
        find_machine("h300")


def test_floor_time_is_bytes_by_bandwidth():
    """Would catch bits for bytes or milliseconds for seconds: 1.35 GB at 273 GB/s are 4.9 ms."""
    assert KNOWN_MACHINES["gb10"].floor_seconds(1.35e9) == pytest.approx(4.945e-3, rel=1e-3)
    assert KNOWN_MACHINES["h200"].floor_seconds(4.8e12) == pytest.approx(1.0)
    assert read_listing("NVIDIA A100, 8.0, 81920 MiB").floor_seconds(1e9) is None


@pytest.mark.parametrize(
    ("listing", "name", "capability", "memory_gib", "integrated"),
    [
        ("NVIDIA H200, 9.0, 143771 MiB\n", "h200", (9, 0), 140.4, False),
        ("NVIDIA H100 80GB HBM3, 9.0, 81559 MiB", "h100", (9, 0), 79.6, False),
        ("NVIDIA GB10, 12.1, [N/A]", "gb10", (12, 1), None, True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 97887 MiB", "rtx-pro-6000", (12, 0), 95.6, False),
        ("NVIDIA B200, 10.0, 183359 MiB", "b200", (10, 0), 179.1, False),
        ("NVIDIA RTX 6000 Ada Generation, 8.9, 49140 MiB", "NVIDIA RTX 6000 Ada Generation", (8, 9), 48.0, False),
        ("NVIDIA GB100, 10.0, 183359 MiB", "NVIDIA GB100", (10, 0), 179.1, False),
    ],
)
def test_the_drivers_listing_is_read(listing, name, capability, memory_gib, integrated):
    """Would catch GB100 taken for GB10, or shared memory read as none."""
    machine = read_listing(listing)
    assert (machine.name, machine.capability, machine.integrated) == (name, capability, integrated)
    assert machine.is_present
    if memory_gib:
        assert machine.memory_gib == pytest.approx(memory_gib, abs=0.1)
    else:
        assert machine.memory_gib > 0.5
    assert (machine.bandwidth is not None) == (name in KNOWN_MACHINES)


@pytest.mark.parametrize("listing", ["", "\n", "No devices were found", "a, b, c", "NVIDIA H200, 9.0"])
def test_anything_else_is_no_gpu(listing):
    """Would catch a crash on the driver's messages."""
    assert read_listing(listing) is None


@pytest.mark.parametrize(
    ("environ", "asked"),
    [({}, "0"), ({"CUDA_VISIBLE_DEVICES": "2,3"}, "2"), ({"CUDA_VISIBLE_DEVICES": ""}, None)],
)
def test_the_first_visible_gpu_is_asked(tmp_path: Path, monkeypatch, environ, asked):
    """Would catch another GPU judged than the one that the server will get; or one where none is visible."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(tmp_path / 'asked')!r}, 'w').write(sys.argv[2])\n"
        "print('NVIDIA H200, 9.0, 143771 MiB')\n"
    )
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = present_machine(environ)
    assert machine.is_present
    assert machine.name == ("cpu" if asked is None else "h200")
    record = tmp_path / "asked"
    assert (record.read_text() if record.is_file() else None) == asked


def test_without_a_driver_the_machine_is_its_cpu(tmp_path: Path, monkeypatch):
    """Would catch a traceback where there is no driver, or one that never answers."""
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = present_machine({})
    assert (machine.name, machine.capability) == ("cpu", None)
    assert machine.memory_gib > 0.1
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    driver.chmod(0o755)
    monkeypatch.setattr(machines, "DRIVER_PATIENCE", 0.3)
    assert present_machine({}).name == "cpu"
