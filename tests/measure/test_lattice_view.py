# SPDX-License-Identifier: Apache-2.0
"""Lattices read from a trace, and drawn."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

from vllm_lilicorr.measure.demo_view import show_lattice
from vllm_lilicorr.measure.lattice_view import lattice_svg, lattice_table, summary
from vllm_lilicorr.measure.trace_file import TracedBlock, most_telling, read_trace

# Three slots, two candidates. The walk takes ranks 0, 1, 0; the target confirms the first two.
RECORD = {
    "request_id": "cmpl-7-0-abcd",
    "anchor_position": 2,
    "anchor_token_id": 12,
    "candidate_ids": [[20, 21], [30, 31], [40, 41]],
    "log_probs": [[-0.1, -2.0], [-0.4, -1.0], [-0.2, -3.0]],
    "edge_logits": [
        [[2.0, 0.0], [2.0, 0.0]],
        [[0.0, math.log(3)], [5.0, 0.0]],
        [[0.0, 0.0], [1.0, 0.0]],
    ],
    "path": [0, 1, 0],
    "draft_token_ids": [20, 31, 40],
}
SERVED = [10, 11, 12, 20, 31, 41, 50]


def block(tmp_path) -> TracedBlock:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(RECORD) + "\n")
    (only,) = read_trace(file, {"cmpl-7": SERVED})
    return only


def test_served_tokens_are_the_ones_after_the_anchor(tmp_path):
    """Off by one: every draft would look rejected, or accepted one slot late."""
    found = block(tmp_path)
    assert found.served == [20, 31, 41]
    assert found.num_accepted == 2
    assert found.num_accepted_by_argmax == 1


def test_acceptance_ends_at_the_first_difference(tmp_path):
    """Matches behind a rejected token do not count."""
    found = block(tmp_path)
    assert found.accepted([1, 1, 1]) == 0


def test_probabilities_follow_the_chosen_predecessor(tmp_path):
    """The row of another predecessor: probabilities of a path that was not taken."""
    found = block(tmp_path)
    assert found.edge_probabilities(1) == pytest.approx([0.25, 0.75])
    assert found.edge_probabilities(2) == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1)])


def test_other_requests_and_unfinished_blocks_are_left_out(tmp_path):
    """A block judged by another request's tokens, or by tokens that were never generated."""
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(RECORD | {"request_id": "cmpl-8"}) + "\n" + json.dumps(RECORD) + "\n")
    assert read_trace(file, {"cmpl-7": SERVED[:5]}) == []
    assert read_trace(tmp_path / "missing", {}) == []


def test_the_most_telling_block_is_the_one_the_walk_won(tmp_path):
    """Showing a block in which the correlator changed nothing."""
    won = block(tmp_path)
    dull = TracedBlock(**{**vars(won), "path": [0, 0, 0], "served": [20, 30, 40]})
    assert most_telling([dull, won, dull]) is won
    assert most_telling([]) is None


def test_the_svg_is_wellformed_and_shows_the_path(tmp_path):
    """Token text such as `<` or `&` breaking the document; states drawn on the wrong nodes."""
    texts = {20: "<a", 31: "&b", 41: '"c', 40: "d"}
    svg = lattice_svg(block(tmp_path), lambda token: texts.get(token, str(token)))
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    shown = [element.text for element in root.iter(f"{space}text")]
    assert "<a" in shown and "&b" in shown
    states = [element.get("class") for element in root.iter(f"{space}path")]
    assert states.count("path accepted") == 2
    assert states.count("path rejected") == 1
    nodes = [element.get("class") for element in root.iter(f"{space}rect") if element.get("rx") == "6"]
    assert nodes.count("node missed") == 1, "the target's third token stood beside the path"
    assert "prefers-color-scheme: dark" in svg


def test_the_table_names_every_candidate(tmp_path):
    """A rank or slot missing on the screen; markup such as [red] in a token swallowed."""
    console = Console(width=100, record=True, color_system=None)
    console.print(lattice_table(block(tmp_path), lambda token: f"[{token}]", 100))
    printed = console.export_text()
    for token in (20, 21, 30, 31, 40, 41):
        assert f"[{token}]" in printed
    assert summary(block(tmp_path))[:25] in printed


def seven_slots() -> TracedBlock:
    """Seven slots of eight candidates; the walk takes rank 2 everywhere with 100 %, and the target agrees."""
    likely = [[0.0, 50.0, *[0.0] * 6]] * 8
    return TracedBlock(
        anchor_token_id=1,
        candidate_ids=[[100 * slot + rank for rank in range(8)] for slot in range(7)],
        log_probs=[[-float(rank) for rank in range(8)] for _ in range(7)],
        edge_logits=[likely] * 7,
        path=[1] * 7,
        served=[100 * slot + 1 for slot in range(7)],
    )


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("word", ["token", "試験試験試験"])
def test_the_lattice_fits_the_terminal(width, word):
    """Would catch a lost rank column, cut percentages and lines that wrap; wide characters count twice."""
    console = Console(width=width, record=True, color_system=None)
    show_lattice(console, seven_slots(), lambda token: f"{token} {word}")
    lines = console.export_text().splitlines()
    rows = [line for line in lines if line[:8].strip().isdecimal()]
    assert [int(line[:8]) for line in rows] == list(range(1, 9))
    assert rows[1].count("✓") == 7
    for number, row in enumerate(rows, 1):
        percent = "100" if number == 2 else "0"
        assert re.findall(r"(\d+)(?=\s|$)", row) == [str(number), *[percent] * 7]
    assert all(f"slot {slot}" in next(line for line in lines if "rank" in line) for slot in range(1, 8))
    assert next(line for line in lines if line.strip().startswith("target")).split()[0] == "target"
    assert all(cell_len(line) <= width for line in lines)
    assert any("accepted" in line and "✗" in line for line in lines), "the legend"


def test_a_narrow_terminal_gets_a_sentence():
    """Would catch a lattice drawn where it cannot be read, or a legend without one."""
    console = Console(width=60, record=True, color_system=None)
    show_lattice(console, seven_slots(), str)
    printed = " ".join(console.export_text().split())
    assert printed.startswith("7 of 7 drafted tokens accepted")
    assert printed.endswith(
        "The lattice needs 71 columns, and this terminal has 60: widen it, or look at the drawing in lattice.svg."
    )
    exact = Console(width=71, record=True, color_system=None)
    show_lattice(exact, seven_slots(), str)
    assert "rank" in exact.export_text()
