# SPDX-License-Identifier: Apache-2.0
"""What a token id means in a target's tokenizer.json (Hugging Face tokenizers' format)."""

import json
from pathlib import Path

MAX_BYTES = 100_000_000


def token_text(folder: Path, token_id: int) -> tuple[str | None, bool] | None:
    """A token's text, None where the id is unused, and whether it is an added (special) token.

    Returns None where the folder has no tokenizer.json that can be read.
    """
    file = folder / "tokenizer.json"
    try:
        if file.stat().st_size > MAX_BYTES:
            return None
        tokenizer = json.loads(file.read_bytes())
        for token in tokenizer.get("added_tokens") or ():
            if token["id"] == token_id:
                return token["content"], True
        vocabulary = tokenizer["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return None
    if isinstance(vocabulary, dict):
        return next((text for text, number in vocabulary.items() if number == token_id), None), False
    if isinstance(vocabulary, list):  # unigram: pairs of text and score
        return (str(vocabulary[token_id][0]) if token_id < len(vocabulary) else None), False
    return None
