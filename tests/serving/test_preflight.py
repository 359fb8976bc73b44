# SPDX-License-Identifier: Apache-2.0
"""Messages about a machine on which a server would fail."""

import os
import socket
import subprocess
import sys

import pytest

from vllm_lilicorr.serving.preflight import (
    Findings,
    busy_cores,
    check_instruction_set,
    check_load,
    check_memory,
    choose_port,
)


def cpuinfo(*flags: str) -> str:
    return f"processor : 0\nflags\t\t: fpu {' '.join(flags)}\nmodel name : x\n"


@pytest.mark.parametrize(
    ("flags", "problem", "remark"),
    [
        (("avx2", "avx512f"), False, False),
        (("avx2",), False, True),
        (("avx",), True, False),
    ],
)
def test_instruction_sets(flags, problem, remark):
    """Refusing AVX2, for which vLLM ships kernels; or an illegal instruction without AVX2."""
    findings = Findings()
    check_instruction_set(cpuinfo(*flags), findings)
    assert bool(findings.problems) == problem
    assert bool(findings.remarks) == remark


def test_flags_are_whole_words():
    """`avx2` found inside another flag's name."""
    findings = Findings()
    check_instruction_set(cpuinfo("not_avx2", "avx512f_x"), findings)
    assert findings.problems


def test_little_memory_is_a_problem():
    """The kernel killing the server in the middle of loading."""
    findings = Findings()
    check_memory(1.5, findings)
    assert "1.5 GiB of memory are available" in findings.problems[0]
    check_memory(8.0, enough := Findings())
    assert not enough.problems


def test_a_busy_machine_is_a_remark():
    """Figures taken beside other programs and believed."""
    check_load(1.6, 2, findings := Findings())
    assert "1.6 of 2 cores" in findings.remarks[0] and not findings.problems
    check_load(0.4, 2, quiet := Findings())
    assert not quiet.remarks


def test_busy_cores_sees_a_busy_core():
    """Idle time read from the wrong column: a loaded machine would look quiet."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert 0.2 < busy_cores(1.0) <= os.cpu_count()
    finally:
        busy.kill()
        busy.wait()


def test_a_taken_port_is_named():
    """vLLM's traceback half a minute later."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"Port {port} on 127.0.0.1 cannot be used"):
            choose_port(port)


def test_without_a_wish_a_free_port_is_taken():
    """A fixed default that another server already has."""
    port = choose_port(None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))
