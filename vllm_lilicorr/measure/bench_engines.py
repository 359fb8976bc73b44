# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks have in common: a look at the machine, and engines that differ in their drafting alone."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_lilicorr.measure.embedded_pair import Pair
from vllm_lilicorr.measure.engine_client import EngineClient
from vllm_lilicorr.serving.preflight import Findings, busy_cores, check_load, check_machine


def machine_is_ready(needed_gib: float, console: Console) -> bool:
    """Prints what is wrong with this machine, or what will disturb; False where nothing can be measured."""
    findings = Findings()
    check_machine(findings, needed_gib)
    check_load(busy_cores(), os.cpu_count(), findings)
    for line in findings.problems + findings.remarks:
        console.print(line)
    return not findings.problems


def block_size(drafter: Path) -> int:
    """A drafter's block size, from its config.json."""
    config = json.loads((drafter / "config.json").read_text())
    return config.get("block_size") or config["dflash_config"]["block_size"]


def engine_arguments(
    pair: Pair, speculation: dict[str, Any] | None, max_num_seqs: int, dtype: str, compiled: bool = False
) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM; no prefix caching, so that a prompt costs the same every time."""
    return {
        "model": str(pair.target),
        "dtype": dtype,
        "enforce_eager": not compiled,
        "max_model_len": 1024,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": False,
        "speculative_config": speculation,
    }


def start_engines(
    arguments: dict[str, dict[str, Any]], output: Path, stack: ExitStack, console: Console
) -> list[EngineClient]:
    """All engines, loaded and warmed up by one short completion each; their logs lie beside the output.

    Args: engine_arguments by name; the file of the results; what ends the engines; where to say so.
    """
    engines = []
    for name, own in arguments.items():
        log_file = Path(f"{output.with_suffix('')}-{name.replace(' ', '-')}.log")
        with console.status(f"loading {name} (log: {log_file})"):
            engine = stack.enter_context(EngineClient(name, own, log_file))
            engine.run(["def main():\n"] * own["max_num_seqs"], own["max_num_seqs"], 16)
        engines.append(engine)
    return engines
