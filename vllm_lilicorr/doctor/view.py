# SPDX-License-Identifier: Apache-2.0
"""How `lilicorr doctor` and `lilicorr inspect` look in a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_lilicorr.checkpoint.findings import Level
from vllm_lilicorr.checkpoint.inspection import Inspection
from vllm_lilicorr.doctor.diagnosis import Report
from vllm_lilicorr.doctor.machines import KNOWN_MACHINES

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def print_report(report: Report, console: Console) -> None:
    """A table of all findings, and one line that counts them."""
    table = Table(title=escape(_title(report)), title_justify="left", title_style="bold", pad_edge=False, box=None)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found, rule, remedy", overflow="fold", ratio=1)
    for finding in report.findings:
        colour = _COLOURS[finding.level]
        text = escape(finding.value) + (f"[dim]: {escape(finding.rule)}[/dim]" if finding.rule else "")
        if finding.remedy:
            text += f"\n[{colour}]{escape(finding.remedy)}[/{colour}]"
        table.add_row(f"[{colour}]{finding.level}[/{colour}]", finding.check, text)
    console.print(table)
    counts = {level: sum(finding.level is level for finding in report.findings) for level in Level}
    console.print(
        f"{counts[Level.OK]} ok, {_count(counts[Level.WARNING], 'warning')}, {_count(counts[Level.ERROR], 'error')}"
    )


def _title(report: Report) -> str:
    target = f" with {report.target}" if report.target else ", without a target (name one with --target)"
    return f"{report.drafter}{target}, on {report.machine.title}"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def print_inspection(result: Inspection, title: str, console: Console) -> None:
    """Geometry, parameters and bytes by part, bytes by dtype, floor times."""
    geometry = result.geometry
    console.print(f"[bold]{escape(title)}[/bold]")
    convolutions = (
        f"grouped convolutions of {geometry.conv_kernel_size} taps over {geometry.conv_group_size} channels"
        if geometry.conv_kernel_size
        else "no convolutions"
    )
    rows = {
        "block": f"{geometry.block_size} tokens with the anchor: {geometry.num_slots} drafted, "
        f"{geometry.top_k} candidates each",
        "backbone": f"{geometry.num_hidden_layers} layers of {geometry.hidden_size}, MLP {geometry.intermediate_size}, "
        f"{geometry.num_attention_heads} query and {geometry.num_key_value_heads} key/value heads of "
        f"{geometry.head_dim}, {convolutions}",
        "reads": f"the output of target layers {', '.join(map(str, geometry.target_layer_ids))}, "
        f"{geometry.target_hidden_size} wide",
        "head": f"{geometry.num_layers} layers of {geometry.head_width}, {geometry.num_heads} attention heads, "
        f"factors of {geometry.factor_dim}, logit_scale {geometry.logit_scale:g}, vector_eps {geometry.vector_eps:g}",
        "vocabulary": f"{geometry.vocab_size}, mask token {geometry.mask_token_id}, "
        f"{'own' if geometry.has_own_lm_head else 'the target'}{'' if geometry.has_own_lm_head else chr(39) + 's'} "
        "LM head",
        "storage": ", ".join(f"{count} weights {form}" for form, count in result.formats.items())
        + "; "
        + ", ".join(f"{dtype} {_bytes(size)}" for dtype, size in result.dtype_bytes.items()),
    }
    grid = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        grid.add_row(name, escape(text))
    console.print(grid)
    parts = Table("part", box=None, pad_edge=False)
    parts.add_column("parameters", justify="right")
    parts.add_column("bytes", justify="right")
    for part, count in result.parameters.items():
        parts.add_row(part, f"{count:,}", _bytes(result.part_bytes[part]))
    parts.add_row("all", f"{sum(result.parameters.values()):,}", _bytes(result.num_bytes), style="bold")
    console.print(parts)
    console.print(
        f"Reading {_bytes(result.bytes_per_step)} once, which every draft step must, takes at least "
        + ", ".join(
            f"{1e3 * machine.floor_seconds(result.bytes_per_step):.2g} ms on {machine.title}"
            for machine in KNOWN_MACHINES.values()
        )
        + " (bandwidth as published)."
        + ("" if geometry.has_own_lm_head else " The target's LM head, which it reads too, is not counted."),
    )


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
