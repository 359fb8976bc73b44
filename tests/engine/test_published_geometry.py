# SPDX-License-Identifier: Apache-2.0
"""A drafter of the published size, on a machine as small as ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_it_is_inspected_examined_and_served(tmp_path):
    """Would catch a size, a count or a layer number that only the small pairs have, or a load that takes the
    drafter's memory several times over."""
    script = Path(__file__).with_name("published_pair.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bytes"] == pytest.approx(1.35e9, rel=0.002)
    assert result["exit_code"] == 0
    assert result["tokens"] == 4
    # 1.35 GB of drafter, 1.24 of target, a KV cache of 1 GiB, vLLM itself, and copies while loading.
    assert result["peak_mib"] < 10 * 1024
