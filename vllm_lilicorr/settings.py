# SPDX-License-Identifier: Apache-2.0
"""Environment switches of the plugin, in one place."""

import os
from dataclasses import dataclass

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("", "0", "false", "no", "off")
CPU_NVFP4_WORDS = ("packed", "decoded")


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
        cpu_nvfp4: LILICORR_CPU_NVFP4=packed (the default) keeps NVFP4 weights packed
            on the CPU platform and decodes them in every product; "decoded" decodes
            them once, at load, into the model's dtype: 3.6 times the memory in
            bfloat16, faster products.
    """

    disable: bool = False
    walk: str | None = None
    trace_file: str | None = None
    trace_lines: int | None = None
    cpu_nvfp4: str = "packed"

    @classmethod
    def from_environment(cls) -> "Settings":
        """Raises ValueError for a value that its switch does not have."""
        return cls(
            disable=_boolean("LILICORR_DISABLE"),
            walk=os.environ.get("LILICORR_WALK") or None,
            trace_file=os.environ.get("LILICORR_TRACE") or None,
            trace_lines=_count("LILICORR_TRACE_LINES"),
            cpu_nvfp4=_word("LILICORR_CPU_NVFP4", CPU_NVFP4_WORDS),
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


def _word(name: str, words: tuple[str, ...]) -> str:
    """One of `words`, the first where nothing is set."""
    word = os.environ.get(name, "").strip().lower() or words[0]
    if word not in words:
        raise ValueError(f"{name}={word!r} is unknown; use {' or '.join(words)}.")
    return word
