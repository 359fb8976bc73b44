# SPDX-License-Identifier: Apache-2.0
"""What the demo puts on the screen."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vllm_lilicorr.measure.acceptance import SpeculationCounts
from vllm_lilicorr.measure.completions import Completion
from vllm_lilicorr.measure.embedded_pair import Pair
from vllm_lilicorr.measure.lattice_view import TERMINAL_STATES, lattice_table
from vllm_lilicorr.measure.prompt_files import Prompt
from vllm_lilicorr.measure.provenance import hardware, versions
from vllm_lilicorr.measure.trace_file import TracedBlock
from vllm_lilicorr.serving.preflight import Findings

if TYPE_CHECKING:
    from vllm_lilicorr.measure.demo import ServedResults

CHUNK_STYLES = ("green", "cyan")


def show_findings(console: Console, findings: Findings) -> None:
    """Problems in red, remarks in yellow."""
    for problem in findings.problems:
        console.print(Text(problem, style="bold red"))
    for remark in findings.remarks:
        console.print(Text(remark, style="yellow"))


def show_intro(console: Console, pair: Pair, num_prompts: int) -> None:
    """What is about to happen, on what."""
    machine, installed = hardware(), versions()
    console.rule("LiLiCorr speculative decoding, served by vLLM")
    console.print(
        f"Target {pair.target.name}, drafter {pair.drafter.name}; vLLM {installed['vllm']}, "
        f"torch {installed['torch']}, {machine['cores']} cores of {machine['cpu']}. "
        f"{num_prompts} prompts at temperature 0, one request at a time.",
        style="dim",
    )


def show_command(console: Console, name: str, command: str) -> None:
    """The command of a server, to copy, and what the server is."""
    console.print()
    console.print(Text(f"Starting vLLM's server {name}", style="bold"))
    console.print(Text(f"  $ {command}", style="dim"), soft_wrap=True)


@contextmanager
def waiting(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A spinner with the phase of the start and the time it has taken."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("importing vLLM")
        yield lambda phase, seconds: progress.update(task, description=phase)


def begin_stream(console: Console, prompt: Prompt) -> Callable[[str], None]:
    """Prints the prompt; returns what prints each chunk, its colour changing with every one."""
    console.print()
    console.print(Text(f"── {prompt.kind} ", style="bold magenta"))
    console.print(Text(prompt.text, style="dim"), end="")
    count = 0

    def show(chunk: str) -> None:
        nonlocal count
        console.print(Text(chunk, style=CHUNK_STYLES[count % 2]), end="", soft_wrap=True)
        count += 1

    return show


def end_stream(console: Console, completion: Completion) -> None:
    """A line below a streamed completion."""
    console.print()
    console.print(
        f"[{len(completion.token_ids)} tokens in {completion.seconds:.2f} s; "
        "the colour changes with every block of tokens that arrived together]",
        style="dim",
        markup=False,
    )


def show_speed(
    console: Console,
    prompts: list[Prompt],
    drafted: "ServedResults",
    plain: "ServedResults",
    compiled: bool,
) -> None:
    """Tokens per second with and without speculation, by prompt."""
    mode = "compiled" if compiled else "eager"
    table = Table(title=f"Tokens per second without speculation and with LiLiCorr ({mode} mode)")
    table.add_column("prompt")
    for heading in ("without", "LiLiCorr", "speed-up", "tokens/step", "same tokens"):
        table.add_column(heading, justify="right")
    ratios = []
    for index, prompt in enumerate(prompts):
        before, after = plain.tokens_per_second[index], drafted.tokens_per_second[index]
        ratios.append(after / before)
        table.add_row(
            prompt.kind,
            f"{before:.0f}",
            f"{after:.0f}",
            f"{after / before:.2f}x",
            f"{drafted.counts_by_prompt[index].acceptance_length:.2f}",
            _agreement(plain.token_ids[index], drafted.token_ids[index]),
        )
    table.add_section()
    table.add_row(
        Text("median", style="bold"),
        f"{statistics.median(plain.tokens_per_second):.0f}",
        f"{statistics.median(drafted.tokens_per_second):.0f}",
        Text(f"{statistics.median(ratios):.2f}x", style="bold"),
        f"{drafted.counts.acceptance_length:.2f}",
        "",
    )
    console.print()
    console.print(table)
    if plain.token_ids != drafted.token_ids:
        console.print(
            "bfloat16 rounds differently in a step over several tokens than in a step over one, "
            "so tokens can differ where the target's two best are closer than it resolves. "
            "With --dtype float32 all are the same.",
            style="dim",
        )


def _agreement(plain: list[int], drafted: list[int]) -> str:
    if plain == drafted:
        return "all"
    same = 0
    for a, b in zip(plain, drafted, strict=False):
        if a != b:
            break
        same += 1
    return f"first {same}"


def show_acceptance(console: Console, counts: SpeculationCounts) -> None:
    """Acceptance length, and a bar per draft position."""
    console.print()
    console.print(Text("Drafted tokens accepted, by position", style="bold"))
    table = Table(show_header=False, box=None)
    for position, share in enumerate(counts.acceptance_by_position, start=1):
        bar = Text("█" * round(40 * share), style="green")
        table.add_row(f"{position}", f"{100 * share:.0f} %", bar)
    console.print(table)
    console.print(
        f"Acceptance length {counts.acceptance_length:.2f} tokens per step "
        f"(1 + {counts.accepted} accepted / {counts.drafts} steps, from the server's /metrics)."
    )


def show_lattice(console: Console, block: TracedBlock, token_text: Callable[[int], str]) -> None:
    """The lattice with its legend, or one sentence where the terminal is too narrow for it."""
    console.print()
    drawn = lattice_table(block, token_text, console.width)
    console.print(drawn)
    if isinstance(drawn, Text):
        return
    legend = Text("Numbers are transition probabilities in %. ")
    meanings = {"accepted": "accepted", "rejected": "chosen, rejected", "missed": "the target's token, not chosen"}
    for state, words in meanings.items():
        sign, style = TERMINAL_STATES[state]
        legend.append(f"{sign} {words}", style=style)
        legend.append("  ")
    console.print(legend)


def show_files(console: Console, folder: Path) -> None:
    """Where everything is."""
    console.print()
    names = sorted(path.name for path in folder.iterdir())
    console.print(f"Files in {folder}: {', '.join(names)}")
    console.print("Both servers are stopped.", style="dim")
