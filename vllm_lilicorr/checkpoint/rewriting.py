# SPDX-License-Identifier: Apache-2.0
"""What `lilicorr quantize` and `lilicorr convert` share: progress while they write, and the report after."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_lilicorr.checkpoint.plan import Plan
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.checkpoint.writer import check_places, write_checkpoint


@dataclass(frozen=True)
class Rewriting:
    """A checkpoint that was written from another.

    Attributes:
        encoder: who encoded the weights; None where none was encoded.
        quantization: what config.json declares, in a word; None for float.
        bytes_before: of all tensors, and bytes_after likewise.
        num_files: of weights; num_reused of them an interrupted run had finished.
        modules: what each changed module reports: its format, and its relative error.
    """

    source: str
    destination: str
    encoder: str | None
    quantization: str | None
    bytes_before: int
    bytes_after: int
    num_files: int
    num_reused: int
    modules: list[dict[str, Any]]

    def print(self, console: Console) -> None:
        """The table of changed modules, and a summary."""
        if self.modules:
            table = Table(title=f"{len(self.modules)} changed modules")
            table.add_column("module", overflow="fold")
            table.add_column("format")
            table.add_column("change", overflow="fold")
            table.add_column("relative error", justify="right")
            for row in self.modules:
                change = row.get("change") or f"{_size(row['bytes_before'])} to {_size(row['bytes_after'])}"
                table.add_row(row["module"], row["format"], change, f"{row['relative_error']:.4f}")
            console.print(table)
        reused = f"; {self.num_reused} of {self.num_files} files were finished before" if self.num_reused else ""
        by = f", encoded by {self.encoder}" if self.encoder else ""
        console.print(
            f"{self.destination}: {self.quantization or 'float'}{by}. {_size(self.bytes_before)} before, "
            f"{_size(self.bytes_after)} after ({self.bytes_after / self.bytes_before:.0%}){reused}.",
            soft_wrap=True,
        )


def run_rewriting(
    folder: Path,
    destination: Path,
    plan: Callable[[Checkpoint], Plan],
    encoder: str | None,
    as_json: bool,
) -> int:
    """Writes `destination` from `folder`: progress on standard error, the report on standard output.

    Raises:
        ValueError: nothing can be read, planned or written there.
        KeyboardInterrupt: with a message that says how to go on.
    """
    check_places(folder, destination)
    source = Checkpoint.open(folder)
    result = _rewrite(source, destination, plan(source), encoder)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
    else:
        result.print(Console(highlight=False))
    return 0


def _rewrite(source: Checkpoint, destination: Path, plan: Plan, encoder: str | None) -> Rewriting:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"writing {destination.name}", total=plan.num_bytes)
        written = write_checkpoint(destination, plan, lambda num_bytes: progress.advance(task, num_bytes))
    declared = plan.json_files["config.json"].get("quantization_config")
    return Rewriting(
        source=str(source.folder),
        destination=str(destination),
        encoder=encoder,
        quantization=declared["quant_algo"] if declared else None,
        bytes_before=source.num_bytes,
        bytes_after=plan.num_bytes,
        num_files=written.num_files,
        num_reused=written.num_reused,
        modules=[report for report in written.reports if report],
    )


def _size(num_bytes: int) -> str:
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
