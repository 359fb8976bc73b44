# SPDX-License-Identifier: Apache-2.0
"""Tile registers on CPUs that have them."""

import subprocess
import sys
from pathlib import Path

import pytest

ASK_THE_KERNEL = """
import ctypes, sys
from vllm_lilicorr.plugin import register
if sys.argv[1] == "register":
    register()
SYS_ARCH_PRCTL, ARCH_GET_XCOMP_PERM, TILE_DATA = 158, 0x1022, 18
mask = ctypes.c_uint64()
assert ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(mask)) == 0
print(mask.value >> TILE_DATA & 1)
"""


@pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AMX")
def test_a_process_with_the_plugin_may_use_amx_tiles():
    """An illegal instruction in vLLM's bfloat16 attention at the first request."""

    def allowed(mode: str) -> str:
        command = [sys.executable, "-c", ASK_THE_KERNEL, mode]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]

    assert allowed("nothing") == "0", "leave is given without asking: allow_amx_tiles can go"
    assert allowed("register") == "1"
