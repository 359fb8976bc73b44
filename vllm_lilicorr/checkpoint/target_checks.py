# SPDX-License-Identifier: Apache-2.0
"""What a drafter takes from its target's files: the mask token's meaning, the embedding, the LM head."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_lilicorr.checkpoint.findings import Finding, Level
from vllm_lilicorr.checkpoint.headers import TensorEntry
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.checkpoint.tokenizer import token_text
from vllm_lilicorr.method.geometry import DrafterGeometry


def mask_token(geometry: DrafterGeometry, target: Checkpoint) -> Iterable[Finding]:
    """What the mask token's id means to the target's tokenizer."""
    mask = geometry.mask_token_id
    found = token_text(target.folder, mask)
    if found is None:
        return
    text, added = found
    if text is not None and not added:
        yield Finding(
            "mask token",
            Level.WARNING,
            f"mask_token_id {mask} is the ordinary token {text!r} of the target",
            "masks are special or unused tokens as a rule; the id may be another tokenizer's",
            "Set the mask_token_id that the drafter was trained with.",
        )
    else:
        what = "unused" if text is None else f"the special token {text!r}"
        yield Finding("mask token", Level.OK, f"mask_token_id {mask}", f"{what} in the target's tokenizer")


def target_tensors(geometry: DrafterGeometry, target: Checkpoint, text_config: Mapping[str, Any]) -> Iterable[Finding]:
    """The embedding, and the LM head, that the drafter takes from the target.

    Args:
        geometry: of the drafter.
        target: its headers.
        text_config: the target's text configuration.
    """
    rows_needed, width = geometry.vocab_size, geometry.hidden_size

    def find(*endings: str) -> TensorEntry | None:
        """The tensor that fits, of several (a model that speaks has an embedding of its own for that), or the first."""
        found = [entry for name, entry in named.items() if name.endswith(endings)]
        fitting = (entry for entry in found if entry.shape[:1] >= (rows_needed,) and entry.shape[1:] == (width,))
        return next(fitting, found[0] if found else None)

    named = target.tensors
    embedding = find("embed_tokens.weight", ".embeddings.weight")
    wanted = [("token embedding", embedding)]
    if not geometry.has_own_lm_head and not text_config.get("tie_word_embeddings"):
        wanted.append(("LM head", find("lm_head.weight")))
    fits = True
    for what, entry in wanted:
        if entry is None:
            fits = False
            yield Finding(
                "target tensors",
                Level.WARNING,
                f"No {what} is found among the target's {len(named)} tensors",
                "the drafter takes it from the target",
                "Compare the target's tensor names with its architecture.",
            )
        elif entry.shape[:1] < (rows_needed,) or (entry.dtype != "U8" and entry.shape[1:] != (width,)):
            fits = False
            yield Finding(
                "target tensors",
                Level.ERROR,
                f"The target's {what} has shape {list(entry.shape)}",
                f"the drafter needs at least {rows_needed} rows of {width}",
                "Use the drafter that was trained for this target.",
            )
    if fits and embedding is not None:
        padding = embedding.shape[0] - rows_needed
        yield Finding(
            "target tensors",
            Level.OK,
            f"{embedding.shape[0]} embedding rows" + (f", {padding} of them padding" if padding else ""),
            f"enough for the vocabulary of {rows_needed}",
        )
