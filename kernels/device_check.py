# SPDX-License-Identifier: Apache-2.0
"""Checks every kernel of the head on a device against float64, and times a draft step there.

    python -m vllm_lilicorr.kernels.device_check

Needs a CUDA device, torch and triton, nothing else. Inputs are random and new in every run (the seed is printed),
outputs are poisoned before they are written. Times are medians of CUDA graph replays over
copies of the weights that together exceed the L2 cache.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm_lilicorr.kernels import reference
from vllm_lilicorr.kernels.attention import lattice_attention
from vllm_lilicorr.kernels.candidates import merge_parts, partial_candidates
from vllm_lilicorr.kernels.edges import score_and_walk
from vllm_lilicorr.kernels.encode import encode
from vllm_lilicorr.kernels.factors import factors
from vllm_lilicorr.kernels.linear import linear
from vllm_lilicorr.kernels.linear_pair import linear_pair
from vllm_lilicorr.kernels.project import project
from vllm_lilicorr.kernels.random_step import EPS, LOGIT_SCALE, TINY, VECTOR_EPS, Inputs, Shape, Step
from vllm_lilicorr.kernels.reference import IMPOSSIBLE
from vllm_lilicorr.kernels.walk import walk

# Of an output entry, relative to itself and to the root mean square of its tensor. bf16 has
# 8 bits: one rounding of the result, one of normalised inputs or softmax weights before a product.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Finding:
    """How far an output is from float64, in units of its tolerance: above 1 is an error."""

    name: str
    error: float


def exact(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return 0.0 if torch.equal(found, wanted) else float("inf")


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> float:
    """The largest difference, over tolerance * (|wanted| + rms(wanted)); equal infinities differ by 0."""
    found, wanted = found.double(), wanted.double()
    if wanted.isnan().any() or not torch.equal(found.isfinite(), wanted.isfinite()):
        return float("inf")
    finite = wanted.isfinite()
    found, wanted = found[finite], wanted[finite]
    scale = wanted.abs() + wanted.square().mean().sqrt()
    return ((found - wanted).abs() / scale.clamp_min(1e-30)).max().item() / tolerance


def check_candidates(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Iterator[Finding]:
    """One rank and two; ties, minus infinity, NaN, padding that would win, a row of minus infinity."""
    inputs, num_padding, half = Inputs(dtype, device, seed), 5, shape.vocab_size // 2
    logits = inputs.normal(shape.num_rows + 3, shape.vocab_size + num_padding, scale=4.0)
    logits[-1] = -torch.inf
    logits[-2, ::3] = torch.nan
    logits[-3] = (logits[-3].float().clamp_max(0.0) / 4).round().to(dtype)  # ties; zeros of both signs are best
    logits[:, -num_padding:] = 100.0
    before = logits.clone()
    whole = partial_candidates(logits, shape.top_k, num_padding, 0)
    ids, log_probs = merge_parts(*whole, IMPOSSIBLE)
    yield Finding("candidates leave the logits alone", exact(logits.nan_to_num(), before.nan_to_num()))
    values = logits[:, :-num_padding].double()
    values = torch.where(values.isnan(), -torch.inf, values)
    ranked = values.sort(dim=-1, descending=True, stable=True)
    wanted = ranked.values[:, : shape.top_k] - torch.logsumexp(values, dim=-1, keepdim=True)
    wanted = torch.where(wanted >= IMPOSSIBLE, wanted, IMPOSSIBLE)
    yield Finding("candidate ids", exact(ids, ranked.indices[:, : shape.top_k]))
    yield Finding("log-probabilities", (log_probs.double() - wanted).abs().max().item() / 2e-5)
    ranks = (
        partial_candidates(logits[:, :half], shape.top_k, 0, 0),
        partial_candidates(logits[:, half:], shape.top_k, num_padding, half),
    )
    keys, partitions = (torch.cat(part, dim=1) for part in zip(*ranks, strict=True))
    of_ranks, log_probs_of_ranks = merge_parts(keys, partitions, IMPOSSIBLE)
    yield Finding("candidate ids of two ranks", exact(of_ranks, ids))
    yield Finding("log-probabilities of two ranks", (log_probs_of_ranks - log_probs).abs().max().item() / 2e-5)


def check_operations(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Iterator[Finding]:
    """Every operation after the candidates, on inputs of its own."""
    inputs, tolerance = Inputs(dtype, device, seed), TOLERANCES[dtype]
    width, rows, nodes, reqs = shape.width, shape.num_rows, shape.num_nodes, shape.num_reqs

    def compare(name: str, found: torch.Tensor, operation: Callable[..., torch.Tensor], *args: Any) -> Finding:
        exact_args = [
            arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
        ]
        return Finding(name, close(found, operation(*exact_args), tolerance))

    keys, partitions = partial_candidates(inputs.normal(rows, shape.vocab_size, scale=4.0), shape.top_k, 0, 0)
    candidate_ids, log_probs = merge_parts(keys, partitions, IMPOSSIBLE)
    hidden, anchor = inputs.normal(rows, shape.hidden_size), inputs.normal(reqs, shape.hidden_size)
    valid = torch.arange(reqs, device=device) % 2 == 0
    feature_weight = inputs.normal(5, width, scale=0.5).float()
    feature_bias = inputs.normal(width, scale=0.1).float()
    hidden_layer, anchor_layer = inputs.layer(width, shape.hidden_size), inputs.layer(width, shape.hidden_size)
    ids, probs, features, hidden_rows, anchor_rows = project(
        keys,
        partitions,
        hidden,
        anchor,
        valid,
        feature_weight,
        feature_bias,
        *hidden_layer,
        *anchor_layer,
        shape.trained_top_k,
        IMPOSSIBLE,
    )
    yield Finding("project: ids", exact(ids, candidate_ids))
    yield Finding("project: log-probabilities", exact(probs, log_probs))
    args = (log_probs, feature_weight, feature_bias, shape.trained_top_k)
    yield compare("project: features", features, reference.feature_rows, *args)
    plain = (None, 0.0, False, None)
    yield compare("project: drafter states", hidden_rows, reference.linear, hidden, *hidden_layer, *plain)
    wanted = reference.linear(anchor.double(), *(part.double() for part in anchor_layer), *plain) * valid[:, None]
    yield Finding("project: anchors", close(anchor_rows, wanted, tolerance))

    table = inputs.normal(shape.vocab_size, width)
    embeddings = (inputs.normal(shape.block_size - 1, width), inputs.normal(shape.trained_top_k, width))
    args = (ids, table, hidden_rows, features, *inputs.layer(width, width), *embeddings, shape.num_slots)
    yield compare("encode", encode(*args), reference.encode, *args)

    x = inputs.normal(nodes, width, scale=2.0)
    norm, anchor_norm = inputs.norm(width), inputs.norm(width)
    args = (x, *inputs.layer(3 * width, width), norm)
    anchor_args = (anchor_rows, *inputs.layer(width + shape.num_factors, width), anchor_norm)
    qkv, anchor_parts = linear_pair(*args, *anchor_args, EPS)
    yield compare("linear_pair: nodes", qkv, reference.linear, *args, EPS, False, None)
    yield compare("linear_pair: anchors", anchor_parts, reference.linear, *anchor_args, EPS, False, None)
    inner = inputs.normal(nodes, shape.mlp_width)
    for name, args in {
        "linear": (x, *inputs.layer(2 * shape.num_factors, width), None, EPS, False, None),
        "linear, norm and SiLU": (x, *inputs.layer(shape.mlp_width, width), norm, EPS, True, None),
        "linear, residual": (inner, *inputs.layer(width, shape.mlp_width), None, EPS, False, x),
    }.items():
        yield compare(name, linear(*args), reference.linear, *args)

    bias = (inputs.normal(shape.num_heads, 2 * shape.block_size - 1), inputs.normal(shape.num_heads))
    qkv = inputs.normal(reqs, shape.num_slots * shape.top_k, 3, shape.num_heads, width // shape.num_heads)
    args = (qkv, *bias, shape.top_k)
    yield compare("lattice_attention", lattice_attention(*args), reference.lattice_attention, *args)

    anchor_part = anchor_parts[:, :width]
    args = (x, norm, anchor_rows, anchor_norm, anchor_part, inputs.layer(width, 3 * width)[0], EPS)
    yield compare("factors", factors(*args), reference.factors, *args)

    vectors = inputs.normal(nodes, 2 * shape.num_factors)
    vectors[0] *= 1e-6  # shorter than vector_eps
    log_probs, start = inputs.log_probs(rows, shape.top_k), anchor_parts[:, width:]
    numbers = (shape.num_slots, LOGIT_SCALE, VECTOR_EPS, IMPOSSIBLE)
    arrived = torch.zeros(reqs, dtype=torch.int32, device=device)
    lattice_ids = ids.view(reqs, shape.num_slots, shape.top_k)
    for expected_length in (False, True):
        name = "expected length" if expected_length else "greedy"
        tokens = torch.full((reqs + 1, shape.num_slots + 2), -7, device=device)
        scores = score_and_walk(tokens, arrived, vectors, start, ids, log_probs, *numbers, expected_length)
        wanted = reference.walk(scores.double(), lattice_ids, expected_length)
        yield compare(f"edges ({name})", scores, reference.edge_logits, vectors, start, log_probs, *numbers)
        yield Finding(f"walk after edges ({name})", exact(tokens[:reqs, : shape.num_slots], wanted))
        yield Finding(f"arrivals reset ({name})", exact(arrived, torch.zeros_like(arrived)))
        outside = (tokens[reqs:] == -7).all() & (tokens[:, shape.num_slots :] == -7).all()
        yield Finding(f"nothing else written ({name})", 0.0 if outside else float("inf"))


def check_walk(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Iterator[Finding]:
    """Scores that make the two walks differ, and for the greedy one ties."""
    inputs, sizes = Inputs(torch.float32, device, seed), (16, shape.num_slots, shape.top_k)
    scores, ids = inputs.normal(*sizes, shape.top_k), inputs.ids(shape.vocab_size, *sizes)
    for name, rows, expected_length in (
        ("greedy", scores, False),
        ("greedy, ties", scores.round(), False),
        ("expected length", scores, True),
    ):
        tokens = torch.full(sizes[:2], -7, device=device)
        walk(tokens, rows, ids, expected_length)
        yield Finding(f"walk ({name})", exact(tokens, reference.walk(rows.double(), ids, expected_length)))


def check_head(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> Iterator[Finding]:
    """The whole step, with the token table and without: no further from float64 than twice plain PyTorch is."""
    for name, max_table_bytes in (("table", 1 << 40), ("no table", 0)):
        step = Step(shape, dtype, device, seed, max_table_bytes)
        ids, log_probs, scores = step.fused()
        wanted = step.plain_head(ids, log_probs.double(), torch.float64)
        own = (step.plain_head(ids, log_probs, dtype) - wanted).abs().mean().item()
        error = (scores.double() - wanted).abs().mean().item()
        yield Finding(f"head ({name})", error / (2 * own + 1e-6))
        walked = reference.walk(scores, ids.view(scores.shape[:3]), False)
        yield Finding(f"draft tokens ({name})", exact(step.draft_tokens, walked))


CHECKS = {check.__name__: check for check in (check_candidates, check_operations, check_walk, check_head)}


def collect(name: str, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> list[Finding]:
    """One of CHECKS with poisoned outputs: memory that a kernel should have written holds NaN until then."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.inference_mode():
            return list(CHECKS[name](shape, dtype, device, seed))
    finally:
        torch.use_deterministic_algorithms(was)


def check(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> list[Finding]:
    """All checks."""
    return [finding for name in CHECKS for finding in collect(name, shape, dtype, device, seed)]


def graph_time(calls: list[Callable[[], Any]], repeats: int = 25) -> float:
    """Seconds of one call: the median over replays of a CUDA graph that holds every call twice."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * 2:
            call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / (2 * len(calls)))
    return statistics.median(times)


def time_steps(device: str, seed: int) -> None:
    """Prints what a draft step takes beside plain PyTorch, and beside one reading of weights and logits."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / graph_time([lambda: target.copy_(source)])
    print(f"memory bandwidth by copying: {bandwidth / 1e12:.2f} TB/s")
    print("R   S   kernels us   plain, graph us   floor us   kernels / floor")
    for num_reqs, block_size in ((1, 8), (3, 8), (16, 8), (1, 16), (3, 16), (16, 16)):
        shape = Shape(num_reqs=num_reqs, block_size=block_size, num_slots=block_size - 1)
        with torch.inference_mode():
            steps = [Step(shape, torch.bfloat16, device, seed + copy) for copy in range(3)]
            fused = graph_time([step.fused for step in steps])
            plain = graph_time([step.plain for step in steps])
        weights = sum(tensor.nbytes for tensor in steps[0].parameters.values())
        floor = (weights + steps[0].logits.nbytes) / bandwidth
        cells = f"{fused * 1e6:10.1f} {plain * 1e6:17.1f} {floor * 1e6:10.1f} {fused / floor:17.2f}"
        print(f"{num_reqs:2d} {block_size - 1:3d} {cells}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=torch.seed() % 2**31, help="of the inputs; random if not given")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here; run this where there is one.", file=sys.stderr)
        return 2
    device = "cuda"
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__}, seed {options.seed}")
    cases = [
        (Shape(num_reqs=num_reqs, block_size=block_size, num_slots=num_slots, top_k=top_k), torch.bfloat16)
        for num_reqs, block_size, num_slots, top_k in (
            (1, 8, 7, 8),
            (3, 8, 7, 8),
            (16, 8, 7, 8),
            (1, 16, 15, 8),
            (16, 16, 15, 8),
            (3, 16, 5, 4),
            (2, 8, 1, 1),
        )
    ]
    failed = 0
    for shape, dtype in [*cases, (TINY, torch.float32), (TINY, torch.bfloat16)]:
        print(f"{dtype}, R {shape.num_reqs}, S {shape.num_slots}, K {shape.top_k}, H {shape.width}")
        for finding in check(shape, dtype, device, options.seed):
            wrong = not finding.error <= 1
            failed += wrong
            print(f"  {'WRONG' if wrong else 'ok':6s}{finding.name}: {finding.error:.3f} of the tolerance", flush=True)
    print(f"{failed} wrong")
    time_steps(device, options.seed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
