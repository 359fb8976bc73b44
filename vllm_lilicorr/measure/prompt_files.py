# SPDX-License-Identifier: Apache-2.0
"""Prompts written for this project, in plain text files one can read and edit.

A line `===== kind` begins a prompt and names its kind. The newline before the next
such line is not part of the prompt.
"""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("prompts")
MARK = "===== "


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and what kind of text it is."""

    kind: str
    text: str


def load_prompts(name: str) -> list[Prompt]:
    """Reads `prompts/NAME.txt`."""
    return parse_prompts((FOLDER / f"{name}.txt").read_text())


def parse_prompts(text: str) -> list[Prompt]:
    """Splits the text of a prompt file.

    Raises:
        ValueError: A prompt is empty, or text stands before the first mark.
    """
    prompts = []
    before, *parts = f"\n{text}".split(f"\n{MARK}")
    if before.strip():
        raise ValueError(f"{before.strip()[:40]!r} stands before the first {MARK!r}; add one.")
    for index, part in enumerate(parts):
        kind, _, body = part.partition("\n")
        if index == len(parts) - 1:
            body = body.removesuffix("\n")
        if not body:
            raise ValueError(f"The prompt {kind!r} is empty; write its text below the mark.")
        prompts.append(Prompt(kind.strip(), body))
    return prompts
