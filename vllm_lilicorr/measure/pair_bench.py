# SPDX-License-Identifier: Apache-2.0
"""`lilicorr bench-pair`: no speculation, plain DFlash and LiLiCorr in paired runs.

A shared machine's speed drifts by more than the differences to be measured. So all
engines are loaded first, each in a process of its own that does nothing while it
waits, and take turns on the same block of prompts in the order A B C C B A: each
engine has the same average place in time. Ratios are formed within a block and then
averaged (geometric mean); their smallest and largest values are the spread.
"""

import json
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_lilicorr.measure.acceptance import SpeculationCounts
from vllm_lilicorr.measure.bench_engines import block_size, engine_arguments, machine_is_ready, start_engines
from vllm_lilicorr.measure.bench_table import show_results
from vllm_lilicorr.measure.embedded_pair import Pair
from vllm_lilicorr.measure.engine_client import EngineClient, Run
from vllm_lilicorr.measure.plain_dflash import write_plain_dflash
from vllm_lilicorr.measure.prompt_files import load_prompts
from vllm_lilicorr.measure.provenance import provenance

NONE, DFLASH, LILICORR = "none", "dflash-argmax", "lilicorr"
DFLASH_ALONE = "dflash-alone"
PROMPTS = "held_out_python"
MINIMUM_BLOCK = 8
# Four engines at most, each with its own copy of vLLM and 1 GiB of KV cache.
NEEDED_GIB = 10.0


@dataclass(frozen=True)
class BenchOptions:
    """What `lilicorr bench-pair` may be told.

    Attributes:
        pair: Checkpoints to measure.
        method: Speculation method of the LiLiCorr engine.
        concurrency: Numbers of requests in flight, one table each.
        num_prompts: Prompts, taken in order.
        max_tokens: Tokens per prompt; every request yields exactly as many.
        dtype: vLLM's dtype.
        compiled: Whether vLLM compiles the models (else eager).
        output: Where the results go, as JSON.
    """

    pair: Pair
    method: str = LILICORR
    concurrency: tuple[int, ...] = (1, 4, 8)
    num_prompts: int = 32
    max_tokens: int = 128
    dtype: str = "auto"
    compiled: bool = False
    output: Path = Path("lilicorr-bench.json")


def run_bench(options: BenchOptions, console: Console) -> int:
    """Measures, prints the tables, writes the file; returns the exit code."""
    if not machine_is_ready(NEEDED_GIB, console):
        return 1
    prompts = [prompt.text for prompt in load_prompts(PROMPTS)][: options.num_prompts]
    with tempfile.TemporaryDirectory(prefix="lilicorr-bench-") as scratch, ExitStack() as stack:
        engines = _start_engines(options, Path(scratch), stack, console)
        results = {
            concurrency: _measure(engines, prompts, concurrency, options.max_tokens, console)
            for concurrency in options.concurrency
        }
        waiting = {engine.name: engine.waiting_cpu_seconds() for engine in engines}
    record = {
        **provenance(),
        "mode": "compiled" if options.compiled else "eager",
        "dtype": options.dtype,
        "acceptance_convention": "pooled: 1 + accepted / draft steps",
        "prompts": {"file": PROMPTS, "count": len(prompts), "max_tokens": options.max_tokens},
        "cpu_seconds_while_waiting": {name: round(seconds, 2) for name, seconds in waiting.items()},
        "concurrency": {str(n): summarize(blocks) for n, blocks in results.items()},
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    show_results(console, record)
    console.print(f"Written to {options.output}")
    return 0


def _start_engines(options: BenchOptions, scratch: Path, stack: ExitStack, console: Console) -> list[EngineClient]:
    """All engines, loaded and warmed up by one short completion each."""
    drafters: dict[str, dict[str, Any] | None] = {
        NONE: None,
        DFLASH: {
            "method": "dflash",
            "model": str(write_plain_dflash(options.pair.drafter, scratch / "drafter-dflash")),
        },
        LILICORR: {"method": options.method, "model": str(options.pair.drafter)},
    }
    if options.pair.dflash_alone:
        drafters[DFLASH_ALONE] = {"method": "dflash", "model": str(options.pair.dflash_alone)}
    for name, speculation in drafters.items():
        if name.startswith("dflash"):
            speculation["num_speculative_tokens"] = block_size(Path(speculation["model"])) - 1
    arguments = {
        name: engine_arguments(options.pair, speculation, max(options.concurrency), options.dtype, options.compiled)
        for name, speculation in drafters.items()
    }
    return start_engines(arguments, options.output, stack, console)


def _measure(
    engines: list[EngineClient],
    prompts: list[str],
    concurrency: int,
    max_tokens: int,
    console: Console,
) -> list[dict[str, list[Run]]]:
    """Runs of every engine, by block of prompts; in each block the order there and back."""
    size = max(MINIMUM_BLOCK, 2 * concurrency)
    blocks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    results: list[dict[str, list[Run]]] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=2 * len(engines) * len(blocks))
        for block in blocks:
            runs: dict[str, list[Run]] = {engine.name: [] for engine in engines}
            for engine in [*engines, *reversed(engines)]:
                progress.update(task, description=f"{concurrency} in flight: {engine.name}")
                runs[engine.name].append(engine.run(block, concurrency, max_tokens))
                progress.advance(task)
            results.append(runs)
    return results


def summarize(blocks: list[dict[str, list[Run]]]) -> dict[str, Any]:
    """Figures of one number of requests in flight.

    Args:
        blocks: Runs by engine, for every block of prompts.

    Returns:
        For each engine tokens_per_second (all tokens over all seconds), acceptance, and
        the share of prompts with the tokens of no speculation; the ratios with their
        spread; throughput gain over acceptance gain, LiLiCorr over plain DFlash.
    """
    names = list(blocks[0])
    speeds = {
        name: [sum(r.tokens for r in b[name]) / sum(r.seconds for r in b[name]) for b in blocks] for name in names
    }
    engines: dict[str, Any] = {}
    for name in names:
        runs = [run for block in blocks for run in block[name]]
        counts = sum((run.counts for run in runs), SpeculationCounts())
        plain = [ids for block in blocks for run in block[NONE] for ids in run.token_ids]
        own = [ids for run in runs for ids in run.token_ids]
        engines[name] = {
            "tokens_per_second": sum(r.tokens for r in runs) / sum(r.seconds for r in runs),
            "acceptance_length": counts.acceptance_length,
            "acceptance_by_position": counts.acceptance_by_position,
            "same_tokens_as_none": sum(a == b for a, b in zip(own, plain, strict=True)) / len(own),
        }
    ratios = {
        f"{name}/{base}": spread([a / b for a, b in zip(speeds[name], speeds[base], strict=True)])
        for name in names
        for base in (NONE, DFLASH)
        if name != base and (base == NONE or name == LILICORR)
    }
    acceptance_gain = engines[LILICORR]["acceptance_length"] / engines[DFLASH]["acceptance_length"]
    return {
        "engines": engines,
        "ratios": ratios,
        "acceptance_gain_over_dflash": acceptance_gain,
        "throughput_gain_per_acceptance_gain": (ratios[f"{LILICORR}/{DFLASH}"]["mean"] / acceptance_gain),
    }


def spread(ratios: list[float]) -> dict[str, float]:
    """Geometric mean, smallest and largest."""
    return {
        "mean": statistics.geometric_mean(ratios),
        "smallest": min(ratios),
        "largest": max(ratios),
        "blocks": len(ratios),
    }
