# SPDX-License-Identifier: Apache-2.0
"""The bench's results as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table


def show_results(console: Console, record: dict[str, Any]) -> None:
    """Prints what pair_bench.run_bench wrote."""
    hardware = record["hardware"]
    table = Table(
        title=f"Embedded pair, {record['mode']} mode, dtype {record['dtype']}, temperature 0, "
        f"{hardware['cores']} cores of {hardware['cpu']}"
    )
    for heading in ("requests", "drafting", "tokens/s", "x none", "spread", "tokens per step"):
        named = heading == "drafting"
        table.add_column(heading, justify="left" if named else "right", min_width=13 if named else None)
    table.add_column("same tokens as none", justify="right")
    for number, figures in record["concurrency"].items():
        table.add_section()
        for name, engine in figures["engines"].items():
            ratio = figures["ratios"].get(f"{name}/none")
            table.add_row(
                number,
                name,
                f"{engine['tokens_per_second']:.0f}",
                f"{ratio['mean']:.2f}" if ratio else "1",
                f"{ratio['smallest']:.2f} to {ratio['largest']:.2f}" if ratio else "",
                f"{engine['acceptance_length']:.2f}",
                f"{100 * engine['same_tokens_as_none']:.0f} %",
            )
    console.print(table)
    for number, figures in record["concurrency"].items():
        over = figures["ratios"]["lilicorr/dflash-argmax"]
        console.print(
            f"{number} in flight: LiLiCorr over plain DFlash of the same backbone: throughput "
            f"x{over['mean']:.3f} ({over['smallest']:.2f} to {over['largest']:.2f}), acceptance "
            f"x{figures['acceptance_gain_over_dflash']:.3f}, one by the other "
            f"{figures['throughput_gain_per_acceptance_gain']:.3f}."
        )
