# SPDX-License-Identifier: Apache-2.0
"""Dotted options such as `--speculative-config.num_speculative_tokens 5`, merged.

vLLM collects all dotted options of one name into an object of their own and
appends it to the command line, so that it replaces the JSON given before it:
`--speculative-config '{"method": ..., "model": ...}'` is thrown away as a whole.
Here they are merged into that JSON before vLLM sees either.
"""

import json
from typing import Any

NAMES = ("--speculative-config", "-sc")


def merge_speculative_overrides(arguments: list[str]) -> tuple[list[str], str | None]:
    """Merges dotted speculative options into the JSON option beside them.

    Args:
        arguments: What follows `serve` on the command line.

    Returns:
        The arguments to pass on, and one line that says what was merged, or None
        where there was nothing to merge (no JSON, or no dotted option: vLLM's own
        reading of either alone is right).

    Raises:
        ValueError: The JSON cannot be read, or a dotted option has no value.
    """
    kept: list[str] = []
    overrides: list[tuple[str, str]] = []
    json_at: int | None = None  # index in `kept` of the JSON text
    json_prefix = ""  # "--speculative-config=" where it was one word
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            kept += arguments[position:]
            break
        name, equals, value = word.partition("=")
        head, dot, key = name.partition(".")
        if head.replace("_", "-") not in NAMES:
            kept.append(word)
            position += 1
            continue
        if not equals:
            if position + 1 >= len(arguments):
                raise ValueError(f"{word} has no value; write {word} VALUE.")
            value = arguments[position + 1]
        position += 1 if equals else 2
        if dot:
            overrides.append((key, value))
            continue
        if not equals:
            kept.append(word)
        json_at, json_prefix = len(kept), f"{name}=" if equals else ""
        kept.append(json_prefix + value)
    if json_at is None or not overrides:
        return list(arguments), None

    text = kept[json_at][len(json_prefix) :]
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--speculative-config={text!r} is not JSON ({error}); "
            'write --speculative-config \'{"method": "lilicorr", "model": DRAFTER}\'.'
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"--speculative-config={text!r} is not a JSON object; use {{...}}.")
    for key, value in overrides:
        _assign(config, key, value)
    kept[json_at] = json_prefix + json.dumps(config)
    keys = ", ".join(key.removesuffix("+") for key, _ in overrides)
    return kept, f"merged {keys} into --speculative-config: {json.dumps(config)}"


def _assign(config: dict[str, Any], key: str, text: str) -> None:
    """Sets `a.b` in a nested dict; a key ending in `+` appends comma-separated items."""
    append = key.endswith("+")
    *parents, last = key.removesuffix("+").split(".")
    for parent in parents:
        child = config.get(parent)
        if not isinstance(child, dict):
            child = config[parent] = {}
        config = child
    if append:
        existing = config.get(last)
        config[last] = (existing if isinstance(existing, list) else []) + text.split(",")
        return
    try:
        config[last] = json.loads(text)
    except json.JSONDecodeError:
        config[last] = text
