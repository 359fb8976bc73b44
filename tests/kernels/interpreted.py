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
# Modules beside this one whose functions may be called too.
INSTRUMENTS = ("counting", "op_outputs")


def run_interpreted(calls: list[tuple[str, str, tuple[Any, ...]]], folder: Path) -> list[tuple[Any, tuple[Any, ...]]]:
    """Calls function(*args) of a kernels' module, or of one of INSTRUMENTS, for each of `calls`.

    Returns what each returned, and its arguments afterwards.
    """
    file = folder / "calls.pt"
    torch.save(calls, file)
    paths = (ROOT, ROOT / "tests", ROOT / "tests" / "engine")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, __file__, str(file)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return torch.load(file, weights_only=False)


def interpret_bfloat16() -> None:
    """Gives the interpreter bfloat16 as chips have it: it truncates, and multiplies the bit patterns of matrices."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_cast, plain_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def widened(data: Any) -> Any:
        return (data.astype(np.uint32) << 16).view(np.float32)

    def rounded(data: Any) -> Any:
        bits = np.ascontiguousarray(data).view(np.uint32)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, nearest_even).astype(np.uint16)

    def cast_impl(self, src, dst_type):
        types = (src.dtype.scalar, dst_type.scalar)
        if types == (tl.bfloat16, tl.float32):
            return TensorHandle(widened(src.data), tl.float32)
        if types == (tl.float32, tl.bfloat16):
            return TensorHandle(rounded(src.data), tl.bfloat16)
        return plain_cast(self, src, dst_type)

    def create_dot(self, a, b, d, *options):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (TensorHandle(widened(part.data), tl.float32) for part in (a, b))
        elif a.dtype.scalar == tl.float16:
            a, b = (TensorHandle(part.data.astype(np.float32), tl.float32) for part in (a, b))
        return plain_dot(self, a, b, d, *options)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


def main(file: str) -> None:
    from interpreter import interpret_triton

    interpret_triton()
    interpret_bfloat16()
    results = []
    for module, function, args in torch.load(file, weights_only=False):
        name = module if module in INSTRUMENTS else f"vllm_lilicorr.kernels.{module}"
        returned = getattr(importlib.import_module(name), function)(*args)
        results.append((returned, args))
    torch.save(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
