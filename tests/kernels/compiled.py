# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for NVIDIA chips on a machine that has none, and reads what they need.

python tests/kernels/compiled.py        prints the table of docs/performance.md
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_lilicorr.kernels import (
    attention,
    candidates,
    edges,
    encode,
    factors,
    linear,
    linear_pair,
    project,
    walk,
)

# Shared memory that one program may ask for, in bytes, by compute capability: CUDA C++ Programming Guide,
# "Maximum amount of shared memory per thread block".
SHARED_MEMORY = {90: 232448, 100: 232448, 120: 101376, 121: 101376}

# Published geometry: D, H, F, A, MLP width.
HIDDEN, WIDTH, FACTORS, NUM_HEADS, MLP_WIDTH = 4096, 1024, 1024, 8, 2048
# One row per slot of one request, one request's nodes, and a batch's nodes: each has its own tiles.
ROWS = {"slots": 7, "request": 56, "batch": 896}


@dataclass(frozen=True)
class Build:
    """A kernel as a launcher would ask for it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs: registers and bytes of stack per thread (stack above 0: spilled), and
    bytes of shared memory per program."""

    registers: int
    stack: int
    shared: int


def builds() -> Iterator[Build]:
    """Every kernel of the head with the block sizes that its launcher picks at the published geometry."""

    def build(name: str, kernel: Any, block: dict[str, int], **constants: Any) -> Build:
        sizes = {key: value for key, value in block.items() if key.startswith("BLOCK")}
        return Build(name, kernel, constants | sizes, block["num_warps"], block.get("num_stages", 3))

    yield build("partial_candidates", candidates._partial_candidates_kernel, {"num_warps": 8, "BLOCK": 2048}, TOP_K=8)
    yield build("merge_parts", candidates._merge_parts_kernel, {"num_warps": 4, "BLOCK_PARTS": 64}, TOP_K=8)
    for rows in ("slots", "batch"):
        sizes = {"HIDDEN": HIDDEN, "WIDTH": WIDTH, "TOP_K": 8, "BLOCK_PARTS": 64, "BLOCK_H": 128}
        yield build(f"project, {rows}", project._project_kernel, linear.tiles(ROWS[rows], torch.bfloat16), **sizes)
    for rows in ("request", "batch"):
        block = linear.tiles(ROWS[rows], torch.bfloat16)
        yield build(f"encode, {rows}", encode._encode_kernel, block, WIDTH=WIDTH)
        yield build(f"linear_pair, {rows}", linear_pair._linear_pair_kernel, block, WIDTH=WIDTH)
        for name, norm, silu, residual, width in (
            ("norm", True, False, False, WIDTH),
            ("norm, SiLU", True, True, False, WIDTH),
            ("residual", False, False, True, MLP_WIDTH),
            ("plain", False, False, False, WIDTH),
        ):
            options = {"WIDTH": width, "NORM": norm, "SILU": silu, "RESIDUAL": residual}
            yield build(f"linear ({name}), {rows}", linear._linear_kernel, block, **options)
        yield build(
            f"factors, {rows}", factors._factors_kernel, factors.factor_tiles(ROWS[rows], torch.bfloat16), WIDTH=WIDTH
        )
    block = {
        "num_warps": 4,
        "num_stages": 2,
        "BLOCK_Q": attention.BLOCK_Q,
        "BLOCK_N": attention.BLOCK_N,
        "BLOCK_D": 128,
    }
    dims = {"NUM_HEADS": NUM_HEADS, "HEAD_DIM": WIDTH // NUM_HEADS}
    yield build("lattice_attention", attention._attention_kernel, block, **dims)
    for expected_length in (False, True):
        name = "expected length" if expected_length else "greedy"
        block = {"num_warps": 4, "BLOCK_S": 16, "BLOCK_K": 8, "BLOCK_F": 256}
        options = {"FACTORS": FACTORS, "EXPECTED_LENGTH": expected_length}
        yield build(f"score_and_walk ({name})", edges._edges_kernel, block, **options)
        block = {"num_warps": 1, "BLOCK_S": 16, "BLOCK_K": 8}
        yield build(f"walk ({name})", walk._walk_kernel, block, EXPECTED_LENGTH=expected_length)


def _type(name: str) -> str:
    kind = name.removesuffix("_ptr")
    if kind == name:
        return "fp32" if name in ("eps", "impossible", "last_rank", "scale", "logit_scale", "vector_eps") else "i32"
    if kind in ("keys", "candidate_ids", "draft_tokens"):
        return "*i64"
    if kind in ("partitions", "log_probs", "edge_logits", "feature_weight", "feature_bias"):
        return "*fp32"
    return {"arrived": "*i32", "anchor_valid": "*i1", "is_valid": "*i1"}.get(kind, "*bf16")


def binary_for(build: Build, capability: int) -> Any:
    """Compiles for one chip; bf16 weights and logits, addresses and strides multiples of 16 as in serving."""
    names = build.kernel.arg_names
    types = {name: "constexpr" if name in build.constants else _type(name) for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name.endswith(("_ptr", "_stride", "_cols")) and types[name] != "constexpr"
    }
    constants = {(names.index(name),): value for name, value in build.constants.items()}
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": True}
    source = ASTSource(build.kernel, types, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_for(build: Build, capability: int) -> Resources:
    """What a kernel needs on one chip."""
    binary = binary_for(build, capability)
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Resources(registers, stack, binary.metadata.shared)


def main() -> None:
    print("| kernel | " + " | ".join(f"sm_{capability}" for capability in SHARED_MEMORY) + " |")
    print("|---|" + "---|" * len(SHARED_MEMORY))
    for build in builds():
        cells = []
        for capability in SHARED_MEMORY:
            needs = compile_for(build, capability)
            cells.append(f"{needs.registers} / {needs.stack} / {needs.shared / 1024:.1f}")
        print(f"| {build.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
