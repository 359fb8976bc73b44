# SPDX-License-Identifier: Apache-2.0
"""What a check found: the value, the rule that it meets or breaks, and the remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One result of one check.

    Attributes:
        check: the check's name, the same for all of its results.
        level: how bad it is. An error means that the pair does not load or drafts
            wrongly; a warning, that something is not as it should be.
        value: what was found.
        rule: what it must be, or why it is fine.
        remedy: what to do; empty where nothing needs doing.
    """

    check: str
    level: Level
    value: str
    rule: str
    remedy: str = ""

    @property
    def sentence(self) -> str:
        text = f"{self.value}: {self.rule}" if self.rule else self.value
        text = text if text.endswith((".", "!")) else f"{text}."
        return f"{text} {self.remedy}".strip()


def exit_code(findings: Iterable[Finding], strict: bool = False) -> int:
    """2 with any error, 1 with any warning where `strict`, else 0."""
    levels = {finding.level for finding in findings}
    if Level.ERROR in levels:
        return 2
    return 1 if strict and Level.WARNING in levels else 0


def raise_errors(findings: Iterable[Finding], what: str) -> None:
    """Raises one ValueError that lists every error among the findings.

    Args:
        findings: results of checks.
        what: what was checked, the subject of the message.
    """
    errors = [finding.sentence for finding in findings if finding.level is Level.ERROR]
    if len(errors) == 1:
        raise ValueError(f"{what}: {errors[0]}")
    if errors:
        lines = "".join(f"\n  - {error}" for error in errors)
        raise ValueError(f"{what}; {len(errors)} errors:{lines}")


def some(names: list[str], limit: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
