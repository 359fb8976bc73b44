# SPDX-License-Identifier: Apache-2.0
"""Runs kernels under Triton's interpreter, in a process of its own: it must be chosen before Triton is imported.

python tests/kernels/interpreted.py CALLS.pt
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(calls: list[tuple[str, str, tuple[Any, ...]]], folder: Path) -> list[tuple[Any, tuple[Any, ...]]]:
    """Calls module.function(*args) for each of `calls`; what it returned, and the arguments afterwards."""
    file = folder / "calls.pt"
    torch.save(calls, file)
    paths = (ROOT, ROOT / "tests" / "engine")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, __file__, str(file)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return torch.load(file)


def main(file: str) -> None:
    from interpreter import interpret_triton

    interpret_triton()
    results = []
    for module, function, args in torch.load(file):
        returned = getattr(importlib.import_module(f"vllm_lilicorr.kernels.{module}"), function)(*args)
        results.append((returned, args))
    torch.save(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
