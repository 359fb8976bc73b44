# SPDX-License-Identifier: Apache-2.0
"""`lilicorr bench-adaptive`: adaptive draft length against no speculation and fixed lengths.

Steady loads (see load.py) of 1 to 32 requests, on easy text (code at temperature 0) and
on hard text (the same at temperature 1, where few drafts are accepted); text that turns
from easy to hard to easy; a load step from 1 to 32 requests and back. All engines are
loaded first and take turns, there and back, on the same requests.
"""

import json
import math
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_lilicorr.measure.bench_engines import engine_arguments, machine_is_ready, start_engines
from vllm_lilicorr.measure.embedded_pair import Pair
from vllm_lilicorr.measure.engine_client import EngineClient
from vllm_lilicorr.measure.prompt_files import load_prompts
from vllm_lilicorr.measure.provenance import provenance

NONE, ADAPTIVE = "none", "adaptive"
FIXED_LENGTHS = (3, 7)
PROMPTS = "held_out_python"
TEMPERATURES = {"easy": 0.0, "hard": 1.0}
NEEDED_GIB = 10.0
# Two-sided 95 % quantiles of Student's distribution for 1, 2, ... degrees of freedom.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True)
class AdaptiveOptions:
    """What `lilicorr bench-adaptive` may be told.

    Attributes:
        pair: Checkpoints to measure.
        concurrency: Numbers of requests in flight.
        repeats: Paired runs of every load.
        seconds: About how long a run without speculation takes.
        dtype: vLLM's dtype.
        compiled: Whether vLLM compiles the models (else eager).
        output: Where the results go, as JSON.
    """

    pair: Pair
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    repeats: int = 6
    seconds: float = 1.5
    dtype: str = "auto"
    compiled: bool = False
    output: Path = Path("lilicorr-adaptive.json")


def run_adaptive_bench(options: AdaptiveOptions, console: Console) -> int:
    """Measures, prints the table, writes the file; returns the exit code."""
    if not machine_is_ready(NEEDED_GIB, console):
        return 1
    requests = [
        {"prompt": prompt.text, "max_tokens": 64 + index * 37 % 129}  # no two batches end together
        for index, prompt in enumerate(load_prompts(PROMPTS))
    ]
    with ExitStack() as stack:
        engines = _start_engines(options, stack, console)
        speeds = _plain_speeds(engines[0], requests, options.concurrency)
        results = {}
        for name, phases in loads(options.concurrency, speeds, options.seconds).items():
            with console.status(name):
                results[name] = summarize(_measure(engines, requests, phases, options.repeats))
            console.print(_line(name, results[name]))
    record = {
        **provenance(),
        "mode": "compiled" if options.compiled else "eager",
        "dtype": options.dtype,
        "repeats": options.repeats,
        "loads": results,
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    _show(console, record)
    console.print(f"Written to {options.output}")
    return 0


def loads(concurrency: tuple[int, ...], speeds: dict[int, float], seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Phases by the load's name; each takes about `seconds` at these tokens per second without speculation."""

    def phase(kind: str, number: int) -> dict[str, Any]:
        return {"kind": kind, "concurrency": number, "tokens": max(int(speeds[number] * seconds), 2 * number)}

    few, many = min(concurrency), max(concurrency)
    steady = {f"{kind}, {number}": [phase(kind, number)] for kind in TEMPERATURES for number in concurrency}
    return steady | {
        f"easy, hard, easy, {few}": [phase(kind, few) for kind in ("easy", "hard", "easy")],
        f"easy, {few}, {many}, {few}": [phase("easy", number) for number in (few, many, few)],
    }


def _start_engines(options: AdaptiveOptions, stack: ExitStack, console: Console) -> list[EngineClient]:
    """No speculation first."""
    drafter = {"method": "lilicorr", "model": str(options.pair.drafter)}
    speculation: dict[str, dict[str, Any] | None] = {
        NONE: None,
        ADAPTIVE: drafter | {"lilicorr": {"adaptive_length": True}},
    }
    for length in FIXED_LENGTHS:
        fixed = {"num_speculative_tokens": length, "lilicorr": {"adaptive_length": False}}
        speculation[f"fixed {length}"] = drafter | fixed
    arguments = {
        name: engine_arguments(options.pair, config, max(options.concurrency), options.dtype, options.compiled)
        for name, config in speculation.items()
    }
    return start_engines(arguments, options.output, stack, console)


def _kinds(requests: list[dict[str, Any]], first: int) -> dict[str, list[dict[str, Any]]]:
    rotated = requests[first:] + requests[:first]
    return {kind: [one | {"temperature": warmth} for one in rotated] for kind, warmth in TEMPERATURES.items()}


def _plain_speeds(engine: EngineClient, requests: list[dict[str, Any]], concurrency: tuple[int, ...]):
    speeds = {}
    for number in concurrency:
        phase = {"kind": "easy", "concurrency": number, "tokens": 80 * number}
        (result,) = engine.run_load(_kinds(requests, 0), [phase])
        speeds[number] = result["tokens"] / result["seconds"]
    return speeds


def _measure(
    engines: list[EngineClient], requests: list[dict[str, Any]], phases: list[dict[str, Any]], repeats: int
) -> dict[str, list[float]]:
    """Tokens per second of every engine, by repeat."""
    speeds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for repeat in range(repeats):
        kinds = _kinds(requests, repeat * 11 % len(requests))
        for engine in engines if repeat % 2 == 0 else reversed(engines):
            results = engine.run_load(kinds, phases)
            tokens, seconds = (sum(result[key] for result in results) for key in ("tokens", "seconds"))
            speeds[engine.name].append(tokens / seconds)
    return speeds


def summarize(speeds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Mean tokens per second by engine; for those that draft the ratio to no speculation with its 95 % bounds."""
    summary = {}
    for name, values in speeds.items():
        summary[name] = {"tokens_per_second": statistics.mean(values)}
        if name != NONE:
            logs = [math.log(own / plain) for own, plain in zip(values, speeds[NONE], strict=True)]
            center, half = statistics.mean(logs), math.inf
            if len(logs) > 1:
                quantile = _STUDENT[min(len(logs) - 1, len(_STUDENT)) - 1]
                half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
            summary[name] |= {
                "ratio": math.exp(center),
                "lower": math.exp(center - half),
                "upper": math.exp(center + half) if half < math.inf else math.inf,
            }
    return summary


def _cells(figures: dict[str, dict[str, float]]) -> list[str]:
    cells = [f"{figures[NONE]['tokens_per_second']:.0f}"]
    for name, own in figures.items():
        if name != NONE:
            cells.append(f"{own['ratio']:.2f} ({own['lower']:.2f} to {own['upper']:.2f})")
    return cells


def _line(name: str, figures: dict[str, dict[str, float]]) -> str:
    return f"{name}: {'; '.join(_cells(figures))}"


def _show(console: Console, record: dict[str, Any]) -> None:
    hardware = record["hardware"]
    table = Table(
        title=f"Tokens/s over no speculation (95 % bounds of {record['repeats']} paired runs), {record['mode']} mode, "
        f"dtype {record['dtype']}, {hardware['cores']} cores of {hardware['cpu']}"
    )
    table.add_column("text, requests in flight")
    table.add_column("none, tokens/s", justify="right")
    for name in next(iter(record["loads"].values())):
        if name != NONE:
            table.add_column(name, justify="right")
    for name, figures in record["loads"].items():
        table.add_row(name, *_cells(figures))
    console.print(table)
