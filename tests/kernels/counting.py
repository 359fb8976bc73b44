# SPDX-License-Identifier: Apache-2.0
"""Counts launches and bytes of a draft step, from logits to draft tokens, at the published geometry.

python tests/kernels/counting.py [R ...]        prints the table of docs/performance.md

The kernels run under Triton's interpreter, which sees every load and store of every
program. Bytes of weights, logits and gathered rows count once, as a chip reads them from
memory; what programs load again of them, and what kernels hand to each other, is served by
the L2 cache and is counted apart. The plain head beside it is method/head.py in eager
PyTorch, the in-tree formulation: an operation is a launch that reads its arguments and
writes its result.
"""

import bisect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "engine")]

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

PUBLISHED = {"hidden_size": 4096, "block_size": 8, "vocab_size": 151936, "dtype": torch.bfloat16}
PUBLISHED_HEAD = {"lilicorr_hidden_size": 1024, "lilicorr_num_heads": 8, "lilicorr_factor_dim": 1024}


@dataclass
class Count:
    """Of one draft step.

    Attributes:
        launches: kernels in the order of their launches.
        first_bytes: of the step's inputs and weights, each byte counted once.
        again_bytes: of the same, loaded again by other programs.
        between_bytes: loaded of what earlier kernels of the step had stored.
        stored_bytes: stored.
    """

    launches: list[str] = field(default_factory=list)
    first_bytes: int = 0
    again_bytes: int = 0
    between_bytes: int = 0
    stored_bytes: int = 0


@contextmanager
def counted_kernels(inputs: list[torch.Tensor]) -> Iterator[Count]:
    """Counts interpreted kernels; `inputs` are all tensors that exist before the step."""
    import numpy as np
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    count = Count()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in inputs}
    begins = sorted(storages)
    seen = {begin: np.zeros(storages[begin], dtype=np.bool_) for begin in begins}
    plain = (InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store, GridExecutor.__call__)

    def load(self, ptrs, mask, *rest, **named):
        values = plain[0](self, ptrs, mask, *rest, **named)
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64)
        size = values.data.dtype.itemsize
        if addresses.size:
            begin = begins[max(0, bisect.bisect_right(begins, int(addresses.flat[0])) - 1)]
            if begin <= addresses.flat[0] < begin + storages[begin]:
                places = addresses - begin
                first = places[~seen[begin][places]]
                seen[begin][first] = True
                num_first = np.unique(first).size * size
                count.first_bytes += num_first
                count.again_bytes += addresses.size * size - num_first
            else:
                count.between_bytes += addresses.size * size
        return values

    def store(self, ptrs, value, mask, *rest):
        count.stored_bytes += int(np.broadcast_to(mask.data, ptrs.data.shape).sum()) * value.data.dtype.itemsize
        return plain[1](self, ptrs, value, mask, *rest)

    def launch(self, *args, **named):
        count.launches.append(self.fn.__name__.strip("_").removesuffix("_kernel"))
        return plain[2](self, *args, **named)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
    GridExecutor.__call__ = launch
    try:
        yield count
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store, GridExecutor.__call__ = plain


class CountedOperations(TorchDispatchMode):
    """Counts the operations that would be a launch each on a device: those whose result is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in given}
        is_view = made and all(tensor.untyped_storage().data_ptr() in storages for tensor in made)
        in_place = func.__name__.split(".")[0].endswith("_")
        if made and (in_place or not is_view) and "empty" not in func.__name__:
            self.launches.append(func.__name__)
            # A gather reads as much of its table as it writes.
            read = made if func.__name__.startswith("embedding") else given
            self.num_bytes += sum(_bytes(tensor) for tensor in [*read, *made])
        return result


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor shows, expanded ones once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * tensor.element_size()


@dataclass
class Step:
    """A head and the inputs of one draft step, random."""

    geometry: Any
    weights: dict[str, torch.Tensor]
    token_embedding: torch.Tensor
    inputs: tuple[torch.Tensor, ...]  # logits, drafter states, anchors, validity

    @classmethod
    def make(cls, num_reqs: int, dtype: torch.dtype, seed: int = 0, **overrides: Any) -> "Step":
        from pairs import drafter_config, random_tensors

        from vllm_lilicorr.checkpoint.layout import HEAD_PREFIX, expected_tensors
        from vllm_lilicorr.method.geometry import DrafterGeometry

        dflash = {key: overrides.pop(key) for key in list(overrides) if key.startswith("lilicorr_")}
        geometry = DrafterGeometry.from_config(drafter_config(dflash_config=dflash, **overrides))
        shapes = {
            name.removeprefix(HEAD_PREFIX): shape
            for name, shape in expected_tensors(geometry).items()
            if name.startswith(HEAD_PREFIX)
        }
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        rows, width = num_reqs * geometry.num_slots, geometry.hidden_size
        valid = torch.arange(num_reqs) % 2 == 0
        inputs = (3 * normal(rows, geometry.vocab_size), normal(rows, width), normal(num_reqs, width), valid)
        embedding = normal(geometry.vocab_size, width)
        return cls(geometry, random_tensors(shapes, seed, dtype), embedding, inputs)

    def fused(self, max_table_bytes: int = 1 << 30) -> Any:
        from vllm_lilicorr.kernels.head import FusedHead, HeadConstants

        g = self.geometry
        constants = HeadConstants(g.num_heads, g.top_k, g.rms_norm_eps, g.logit_scale, g.vector_eps)
        return FusedHead(self.weights, constants, self.token_embedding, len(self.inputs[2]), max_table_bytes)

    def plain(self) -> Callable[[], torch.Tensor]:
        """The same step in plain PyTorch, up to draft tokens."""
        from vllm_lilicorr.kernels.reference import partial_candidates
        from vllm_lilicorr.method.head import LiLiCorrHead
        from vllm_lilicorr.method.lattice import finite_log_probs, possible_edges
        from vllm_lilicorr.method.walks import greedy_walk

        g = self.geometry
        head = LiLiCorrHead(g).to(self.token_embedding.dtype)
        head.load_state_dict(self.weights)
        head.prepare()
        logits, hidden, anchor, valid = self.inputs
        shape = (len(anchor), g.num_slots, g.top_k)

        def step() -> torch.Tensor:
            values, ids, partition = partial_candidates(logits, g.top_k)
            log_probs, ids = finite_log_probs(values - partition).view(shape), ids.view(shape)
            embeddings = torch.nn.functional.embedding(ids, self.token_embedding)
            edge_logits = head(embeddings, log_probs, hidden.view(*shape[:2], -1), anchor, valid)
            path = greedy_walk(possible_edges(edge_logits, log_probs))
            return ids.gather(2, path[:, :, None])[:, :, 0]

        return step

    def floor_bytes(self) -> int:
        """Every weight of the head once, and the logits once."""
        return sum(map(_bytes, self.weights.values())) + _bytes(self.inputs[0])


def count_fused(step: Step, max_table_bytes: int = 1 << 30) -> tuple[Count, torch.Tensor]:
    """What the kernels launch and load in a step, and its draft tokens [R, S]."""
    head = step.fused(max_table_bytes)
    prepared = [value for value in vars(head).values() if isinstance(value, torch.Tensor)]
    tokens = torch.zeros(len(step.inputs[2]), step.geometry.num_slots, dtype=torch.int64)
    with counted_kernels([*step.weights.values(), *prepared, *step.inputs, step.token_embedding]) as count:
        head.draft(tokens, *step.inputs, step.geometry.top_k)
    return count, tokens


def count_plain(step: Step) -> CountedOperations:
    """What plain PyTorch launches in a step; the walk with it."""
    plain = step.plain()
    with torch.inference_mode(), CountedOperations() as operations:
        plain()
    return operations


def report(num_reqs: int, seed: int, max_table_bytes: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Counts and draft tokens of one random step, by the kernels and by plain PyTorch; fp32."""
    step = Step.make(num_reqs, torch.float32, seed, **overrides)
    count, tokens = count_fused(step, max_table_bytes)
    with torch.inference_mode():
        plain_tokens = step.plain()()
    return {
        "launches": count.launches,
        "loaded_of_floor": (count.first_bytes + count.again_bytes) / step.floor_bytes(),
        "tokens": tokens,
        "plain_tokens": plain_tokens,
        "plain_launches": len(count_plain(step).launches),
    }


def main(*sizes: str) -> None:
    from interpreted import interpret_bfloat16
    from interpreter import interpret_triton

    interpret_triton()
    interpret_bfloat16()
    print("| R | path | launches | MB from memory | of the floor | MB loaded again | MB between kernels | MB stored |")
    print("|---|---|---|---|---|---|---|---|")
    for num_reqs in map(int, sizes or ("1", "3", "16")):
        step = Step.make(num_reqs, **PUBLISHED, **PUBLISHED_HEAD)
        floor = step.floor_bytes()
        count, _ = count_fused(step)
        parts = (count.again_bytes, count.between_bytes, count.stored_bytes)
        cells = " | ".join(f"{part / 1e6:.1f}" for part in parts)
        share = f"{count.first_bytes / 1e6:.1f} | {count.first_bytes / floor:.2f}"
        print(f"| {num_reqs} | kernels | {len(count.launches)} | {share} | {cells} |", flush=True)
        plain = count_plain(step)
        share = f"{plain.num_bytes / 1e6:.1f} | {plain.num_bytes / floor:.2f}"
        print(f"| {num_reqs} | plain | {len(plain.launches)} | {share} | | | |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
