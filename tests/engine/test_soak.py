# SPDX-License-Identifier: Apache-2.0
"""20,000 sampled draft steps with mixed requests, aborts and preemptions: no error, no leak."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("soak.py")
# oneDNN keeps a compiled primitive for each of the last 1024 matrix shapes, some 20 MiB per 1,000 draft steps of
# any drafter until it is full; without that cache the process keeps its size.
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "PYTHONPATH": str(SCRIPT.parents[1])}
GROWTH_MIB = 16


@pytest.mark.slow
def test_soak(pair, tmp_path) -> None:
    """Catches an invalid token id, state that a finished, aborted or preempted request leaves behind,
    and a buffer that grows with every step."""
    result = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), str(pair.target), str(pair.drafter), "20000", str(result)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["invalid"] == 0
    assert found["drafts"] >= 20_000 and found["accepted"] > 0.3 * found["drafts"]
    assert found["aborted"] > 20 and found["preemptions"] > 20
    settled, *later = found["memory"]
    assert max(later) - settled < GROWTH_MIB, found["memory"]
