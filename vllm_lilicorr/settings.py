# SPDX-License-Identifier: Apache-2.0
"""Environment switches of the plugin, in one place."""

import os
from dataclasses import dataclass

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """What a user may set through the environment.

    Attributes:
        disable: LILICORR_DISABLE=1 leaves vLLM exactly as it was.
        trace_file: LILICORR_TRACE=FILE appends one JSON line per request and
            draft step (candidates, edge logits, chosen path). A diagnostic:
            it slows serving.
        walk: LILICORR_WALK=NAME is the walk of drafters whose speculative config
            names none.
        trace_lines: LILICORR_TRACE_LINES=N ends the record after N lines, from
            when on it costs next to nothing.
    """

    disable: bool = False
    walk: str | None = None
    trace_file: str | None = None
    trace_lines: int | None = None

    @classmethod
    def from_environment(cls) -> "Settings":
        """Raises ValueError for a value that is neither true nor false."""
        return cls(
            disable=_boolean("LILICORR_DISABLE"),
            walk=os.environ.get("LILICORR_WALK") or None,
            trace_file=os.environ.get("LILICORR_TRACE") or None,
            trace_lines=_count("LILICORR_TRACE_LINES"),
        )


def _boolean(name: str) -> bool:
    word = os.environ.get(name, "").strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"{name}={word!r} is neither true nor false; use 1 or 0.")


def _count(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} is not a number of lines; use 0 or more, or leave it unset.")
    return int(text)
