# SPDX-License-Identifier: Apache-2.0
"""One lattice, drawn: for the terminal (rich) and as an SVG file.

Columns are slots, rows are candidates by the drafter's own ranking. Both views show
the path that the correlator chose and how far the target confirmed it.
"""

from collections.abc import Callable
from html import escape

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from vllm_lilicorr.measure.trace_file import TracedBlock

TokenText = Callable[[int], str]

# Of a candidate by its state: a sign for terminals without colours, and a style.
TERMINAL_STATES = {
    "accepted": ("✓", "bold black on green"),
    "rejected": ("✗", "bold black on yellow"),
    "missed": ("○", "bold blue"),
    "": (" ", ""),
}

LONGEST_LABEL, SHORTEST_LABEL = 8, 3
RANK_COLUMN = "target"  # its widest cell
# Beside its label, a cell holds a sign, a space and a percentage, and a space parts it from the next.
BESIDE_LABEL = 1 + 1 + len("100") + 1

COLUMN, ROW, WIDTH, HEIGHT = 132, 44, 96, 30
LEFT, TOP = 150, 96

STYLE = """
  .page { fill: #ffffff } text { fill: #1f2328; font: 13px ui-monospace, Menlo, monospace }
  .title { font: 600 16px system-ui, sans-serif } .note { font: 12px system-ui, sans-serif }
  .note, .muted { fill: #59636e } .node { fill: #f6f8fa; stroke: #d1d9e0 }
  .edge { stroke: #818b98; fill: none } .path { stroke-width: 3; fill: none }
  .accepted { stroke: #1a7f37 } .rejected { stroke: #bc4c00; stroke-dasharray: 6 4 }
  .node.accepted { fill: #dafbe1; stroke-width: 2 } .node.rejected { fill: #fff1e5; stroke-width: 2 }
  .node.missed { stroke: #0969da; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #f0f6fc } .note, .muted { fill: #9198a1 }
    .node { fill: #151b23; stroke: #3d444d } .edge { stroke: #656c76 }
    .accepted { stroke: #3fb950 } .rejected { stroke: #db6d28 } .node.missed { stroke: #4493f8 }
    .node.accepted { fill: #12261e } .node.rejected { fill: #2a1d12 }
  }
"""


def summary(block: TracedBlock) -> str:
    """One sentence: what the walk got, and what argmax would have got."""
    return (
        f"{block.num_accepted} of {block.num_slots} drafted tokens accepted; the most likely "
        f"candidate of every slot by itself would have got {block.num_accepted_by_argmax}."
    )


def label_room(block: TracedBlock, width: int) -> int:
    """Characters that a token may take in a terminal of `width` columns."""
    return min(LONGEST_LABEL, (width - len(RANK_COLUMN) - 2) // block.num_slots - BESIDE_LABEL)


def lattice_table(block: TracedBlock, token_text: TokenText, width: int) -> Table | Text:
    """The lattice for a terminal of `width` columns; a cell is a candidate and its transition probability in %.

    Where not even short tokens fit, a sentence takes its place.
    """
    room = label_room(block, width)
    if room < SHORTEST_LABEL:
        needed = block.num_slots * (SHORTEST_LABEL + BESIDE_LABEL) + len(RANK_COLUMN) + 2
        return Text(
            f"{summary(block)} The lattice needs {needed} columns, and this terminal has {width}: "
            "widen it, or look at the drawing in lattice.svg."
        )
    table = Table(title="One real lattice", caption=summary(block), box=box.SIMPLE, padding=0)
    table.add_column("rank", justify="right", style="dim", width=len(RANK_COLUMN))
    for slot in range(block.num_slots):
        table.add_column(f" slot {slot + 1}", no_wrap=True, width=room + BESIDE_LABEL - 1)
    for rank in range(block.top_k):
        cells = []
        for slot in range(block.num_slots):
            percent = round(100 * block.edge_probabilities(slot)[rank])
            label = _fit(token_text(block.candidate_ids[slot][rank]), room)
            sign, style = TERMINAL_STATES[_state(block, slot, rank)]
            cells.append(Text.assemble((f"{sign}{label}", style), (f" {percent:>3}", "dim")))
        table.add_row(str(rank + 1), *cells)
    table.add_section()
    table.add_row(RANK_COLUMN, *(Text(f" {_fit(token_text(token), room)}", style="bold") for token in block.served))
    return table


def lattice_svg(block: TracedBlock, token_text: TokenText) -> str:
    """The lattice as a self-contained SVG document, readable on light and dark pages."""
    width = LEFT + block.num_slots * COLUMN + 10
    rows_end = TOP + block.top_k * ROW
    height = rows_end + 96
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(summary(block))}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        '<text class="title" x="20" y="32">One block drafted by LiLiCorr</text>',
        f'<text class="note" x="20" y="54">{escape(summary(block))}</text>',
    ]
    parts += _edges(block)
    anchor_y = TOP + ROW / 2
    parts.append(_node(20, anchor_y, "", token_text(block.anchor_token_id)))
    parts.append(f'<text class="note" x="20" y="{TOP - 10}">anchor</text>')
    for slot in range(block.num_slots):
        x = LEFT + slot * COLUMN
        parts.append(f'<text class="note" x="{x}" y="{TOP - 10}">slot {slot + 1}</text>')
        for rank in range(block.top_k):
            label = token_text(block.candidate_ids[slot][rank])
            parts.append(_node(x, TOP + rank * ROW + ROW / 2, _state(block, slot, rank), label))
    served_y = rows_end + 30
    parts.append(f'<text class="note" x="20" y="{served_y}">target\'s tokens</text>')
    for slot, token in enumerate(block.served):
        x = LEFT + slot * COLUMN + WIDTH / 2
        text = escape(_clip(token_text(token), 10))
        parts.append(f'<text x="{x}" y="{served_y}" text-anchor="middle">{text}</text>')
    parts.append(_legend(rows_end + 68))
    return "\n".join([*parts, "</svg>", ""])


def _state(block: TracedBlock, slot: int, rank: int) -> str:
    """accepted or rejected on the chosen path; missed: the target's token, beside the path."""
    if block.path[slot] == rank:
        return "accepted" if slot < block.num_accepted else "rejected"
    return "missed" if block.candidate_ids[slot][rank] == block.served[slot] else ""


def _edges(block: TracedBlock) -> list[str]:
    """Transitions out of the chosen path, as faint as they are improbable, then the path."""
    faint, strong = [], []
    for slot in range(block.num_slots):
        start_x = LEFT + (slot - 1) * COLUMN + WIDTH if slot else 20 + WIDTH
        start_y = TOP + (block.path[slot - 1] if slot else 0) * ROW + ROW / 2
        end_x = LEFT + slot * COLUMN
        for rank, probability in enumerate(block.edge_probabilities(slot)):
            end_y = TOP + rank * ROW + ROW / 2
            middle = (start_x + end_x) / 2
            curve = f'd="M{start_x} {start_y} C{middle} {start_y} {middle} {end_y} {end_x} {end_y}"'
            if rank == block.path[slot]:
                strong.append(f'<path class="path {_state(block, slot, rank)}" {curve}/>')
            elif probability >= 0.01:
                opacity = 0.25 + 0.75 * probability
                faint.append(f'<path class="edge" opacity="{opacity:.2f}" {curve}/>')
    return faint + strong


def _node(x: float, y: float, state: str, text: str) -> str:
    css = f"node {state}".strip()
    return (
        f'<rect class="{css}" x="{x}" y="{y - HEIGHT / 2}" width="{WIDTH}" height="{HEIGHT}" '
        f'rx="6"/><text x="{x + WIDTH / 2}" y="{y + 5}" text-anchor="middle">'
        f"{escape(_clip(text, 10))}</text>"
    )


def _legend(y: float) -> str:
    entries = (
        ("accepted", "chosen and accepted"),
        ("rejected", "chosen, rejected"),
        ("missed", "the target's token, not chosen"),
    )
    parts = []
    for index, (state, words) in enumerate(entries):
        x = 20 + index * 230
        parts.append(
            f'<rect class="node {state}" x="{x}" y="{y - 12}" width="22" height="14" rx="4"/>'
            f'<text class="note" x="{x + 30}" y="{y}">{escape(words)}</text>'
        )
    return "".join(parts)


def _fit(text: str, columns: int) -> str:
    """As _clip, in exactly `columns` columns of a terminal, where some characters take two."""
    shown = _visible(text)
    if cell_len(shown) > columns:
        shown = set_cell_size(shown, columns - 1).rstrip(" ") + "…"
    return set_cell_size(shown, columns)


def _clip(text: str, length: int) -> str:
    """Whitespace made visible, and at most `length` characters."""
    shown = _visible(text)
    return shown if len(shown) <= length else shown[: length - 1] + "…"


def _visible(text: str) -> str:
    shown = text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")
    return "".join(c if c.isprintable() else "�" for c in shown)
