# SPDX-License-Identifier: Apache-2.0
"""`lilicorr acceptance`: tokens per step by walk, by how requests sample, by K and by S.

One engine after another completes the same held-out prompts. Tokens per step are pooled
over all requests, 1 + accepted / draft steps; the standard error is over prompts, and a
difference's is that of the paired differences, so that what prompts have in common
drops out.
"""

import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_lilicorr.measure.bench_engines import block_size, engine_arguments
from vllm_lilicorr.measure.embedded_pair import Pair
from vllm_lilicorr.measure.engine_client import EngineClient, Run
from vllm_lilicorr.measure.held_out_text import held_out_text
from vllm_lilicorr.measure.plain_dflash import write_plain_dflash
from vllm_lilicorr.measure.provenance import provenance
from vllm_lilicorr.serving.preflight import busy_cores

CONCURRENCY = 8
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0},
    "temperature 0.4": {"temperature": 0.4},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1},
    "temperature 1, top-k 1": {"temperature": 1, "top_k": 1},
    "temperature 1, top-k 20": {"temperature": 1, "top_k": 20},
    "temperature 1, top-p 0.9": {"temperature": 1, "top_p": 0.9},
    "temperature 0.7, top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}
FEW = ("temperature 0", "temperature 1")


@dataclass(frozen=True)
class Variant:
    """One engine: its speculative config beyond the model, and how its requests sample."""

    name: str
    config: dict[str, Any]
    sampling: tuple[str, ...] = tuple(SAMPLING)
    dflash: bool = False


@dataclass(frozen=True)
class AcceptanceOptions:
    """What `lilicorr acceptance` may be told.

    Attributes:
        pair: checkpoints to measure.
        num_prompts: held-out prompts.
        max_tokens: tokens per prompt; every request yields exactly as many.
        dtype: vLLM's dtype.
        only: names of variants; empty for all.
        output: where the results go, as JSON.
    """

    pair: Pair
    num_prompts: int = 96
    max_tokens: int = 96
    dtype: str = "auto"
    only: tuple[str, ...] = ()
    output: Path = Path("lilicorr-acceptance.json")


def variants_of(top_k: int, num_slots: int) -> tuple[Variant, ...]:
    """Baseline, walks, then fewer candidates and shorter drafts than trained."""
    fewer = [k for k in (1, 2, 4) if k < top_k]
    shorter = [s for s in (1, 3, 5, 8, 12) if s < num_slots]
    return (
        Variant("plain DFlash", {"draft_sample_method": "probabilistic"}, dflash=True),
        Variant("sampled", {"lilicorr": {"walk": "sampled"}}),
        Variant("greedy", {"lilicorr": {"walk": "greedy"}}),
        Variant("expected-length", {"lilicorr": {"walk": "expected-length"}}, sampling=("temperature 0",)),
        *(Variant(f"K {k}", {"lilicorr": {"candidate_topk": k}}, sampling=FEW) for k in fewer),
        *(Variant(f"S {s}", {"num_speculative_tokens": s}, sampling=FEW) for s in shorter),
    )


def run_acceptance(options: AcceptanceOptions, console: Console) -> int:
    """Measures, prints the table, writes the file; returns the exit code.

    Raises:
        ValueError: `only` names a variant that does not exist.
    """
    config = json.loads((options.pair.drafter / "config.json").read_text())
    nested = config.get("dflash_config") or {}
    num_slots = block_size(options.pair.drafter) - 1
    top_k = nested.get("lilicorr_candidate_topk") or config["lilicorr_candidate_topk"]
    variants = variants_of(top_k, num_slots)
    names = [variant.name for variant in variants]
    if unknown := set(options.only) - set(names):
        raise ValueError(f"{sorted(unknown)[0]!r} is no variant; use some of: {', '.join(names)}.")
    prompts = held_out_text(options.num_prompts)
    busy = busy_cores()
    results: dict[str, dict[str, Run]] = {}
    with tempfile.TemporaryDirectory(prefix="lilicorr-acceptance-") as scratch:
        alone = options.pair.dflash_alone or write_plain_dflash(options.pair.drafter, Path(scratch) / "dflash")
        for variant in variants:
            if options.only and variant.name not in options.only:
                continue
            method, drafter = ("dflash", alone) if variant.dflash else ("lilicorr", options.pair.drafter)
            speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": num_slots}
            config = speculative | variant.config
            arguments = engine_arguments(options.pair, config, CONCURRENCY, options.dtype) | {"seed": 0}
            log_file = Path(f"{options.output.with_suffix('')}.log")
            engine = EngineClient(variant.name, arguments, log_file)
            with console.status(f"{variant.name} (log: {log_file})"), engine:
                results[variant.name] = {
                    name: engine.run(prompts, CONCURRENCY, options.max_tokens, SAMPLING[name])
                    for name in variant.sampling
                }
            console.print(f"{variant.name}: {_line(results[variant.name])}")
    record = {
        **provenance(),
        "busy_cores_at_start": busy,
        "prompts": {"source": "torch.nn.modules", "count": len(prompts), "max_tokens": options.max_tokens},
        "acceptance_convention": "pooled: 1 + accepted / draft steps",
        "variants": {name: {s: _figures(run) for s, run in runs.items()} for name, runs in results.items()},
    }
    if "plain DFlash" in results:
        base = results["plain DFlash"]
        record["over_plain_dflash"] = {
            name: {s: difference(run, base[s]) for s, run in runs.items()}
            for name, runs in results.items()
            if name != "plain DFlash"
        }
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    show_acceptance(console, record)
    console.print(f"Written to {options.output}")
    return 0


def _figures(run: Run) -> dict[str, float]:
    lengths = tokens_per_step(run)
    return {
        "acceptance_length": run.counts.acceptance_length,
        "standard_error": statistics.stdev(lengths) / math.sqrt(len(lengths)),
        "draft_steps": run.counts.drafts,
        "accepted": run.counts.accepted,
    }


def tokens_per_step(run: Run) -> list[float]:
    """Of each request: tokens after its first, by the steps that yielded them."""
    return [(len(ids) - 1) / max(steps - 1, 1) for ids, steps in zip(run.token_ids, run.steps, strict=True)]


def difference(run: Run, base: Run) -> dict[str, float]:
    """Mean over prompts of the difference in tokens per step, with its standard error, and the pooled ratio."""
    pairs = zip(tokens_per_step(run), tokens_per_step(base), strict=True)
    differences = [own - other for own, other in pairs]
    return {
        "mean": statistics.mean(differences),
        "standard_error": statistics.stdev(differences) / math.sqrt(len(differences)),
        "ratio": run.counts.acceptance_length / base.counts.acceptance_length,
    }


def _line(runs: dict[str, Run]) -> str:
    return ", ".join(f"{name} {run.counts.acceptance_length:.3f}" for name, run in runs.items())


def show_acceptance(console: Console, record: dict[str, Any]) -> None:
    """One row per way of sampling, one column per engine."""
    prompts = record["prompts"]
    table = Table(
        title=f"Tokens per step (standard error), {prompts['count']} prompts of {prompts['max_tokens']} tokens"
    )
    table.add_column("requests")
    for name in record["variants"]:
        table.add_column(name, justify="right")
    for sampling in SAMPLING:
        cells = []
        for runs in record["variants"].values():
            figures = runs.get(sampling)
            cells.append(f"{figures['acceptance_length']:.3f} ({figures['standard_error']:.3f})" if figures else "")
        table.add_row(sampling, *cells)
    console.print(table)
