# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the head against float64, by the checks that run on a device, under Triton's interpreter."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from interpreted import ROOT, run_interpreted

pytest.importorskip("triton")

from vllm_lilicorr.kernels.device_check import close  # noqa: E402
from vllm_lilicorr.kernels.random_step import TINY, Shape  # noqa: E402

LONG = replace(TINY, block_size=16, num_slots=15)
CASES = {
    "one request": (TINY, torch.bfloat16),
    "three requests, 15 slots": (replace(LONG, num_reqs=3, vocab_size=517), torch.bfloat16),
    "fewer slots and candidates": (replace(LONG, num_reqs=3, num_slots=5, top_k=4, vocab_size=2049), torch.float32),
    "one slot, one candidate": (replace(TINY, num_reqs=2, num_slots=1, top_k=1, vocab_size=33), torch.float32),
    "16 candidates": (replace(TINY, trained_top_k=16, top_k=16, vocab_size=2048), torch.float32),
    "rows of 128": (replace(TINY, width=128, num_heads=1, num_factors=256, hidden_size=256), torch.bfloat16),
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    calls = [("device_check", "check", (*case, "cpu", 7 + seed)) for seed, case in enumerate(CASES.values())]
    results = run_interpreted(calls, tmp_path_factory.mktemp("checks"))
    return dict(zip(CASES, (found for found, _ in results), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_agrees_with_float64(findings, case: str) -> None:
    """Would catch a wrong formula, mask, stride or tail, an entry never written, a tie to the higher id."""
    assert len(findings[case]) > 25
    wrong = [finding for finding in findings[case] if not finding.error <= 1]
    assert not wrong


@pytest.mark.slow
def test_published_geometry(tmp_path) -> None:
    """Would catch tiles that are right only where one block holds a row: D 4096, H 1024, V 151,936."""
    shape = Shape()
    calls = [
        ("device_check", "collect", ("check_candidates", replace(shape, num_slots=1), torch.bfloat16, "cpu", 1)),
        (
            "device_check",
            "collect",
            ("check_operations", replace(shape, vocab_size=4099), torch.bfloat16, "cpu", 2),
        ),
    ]
    for found, _ in run_interpreted(calls, tmp_path):
        assert found and not [finding for finding in found if not finding.error <= 1]


def test_a_wrong_entry_is_found() -> None:
    """Would catch a comparison that passes whatever it is given."""
    wanted = torch.randn(50, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert close(wanted.float(), wanted, 1e-5) < 1
    for value in (wanted[3, 4] + 0.1, torch.nan, torch.inf):
        found = wanted.clone()
        found[3, 4] = value
        assert not close(found, wanted, 1e-5) <= 1


def test_the_script_runs(tmp_path) -> None:
    """Would catch a script that fails before its first check; needs torch and triton alone."""
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['safetensors'] = None; sys.argv = ['device_check', '--help']\n"
        "import runpy; runpy.run_module('vllm_lilicorr.kernels.device_check', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--seed" in done.stdout, done.stderr[-2000:]
