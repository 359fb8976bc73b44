# SPDX-License-Identifier: Apache-2.0
"""Whether a drafter fits a target, from what both configurations say."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_lilicorr.checkpoint.findings import Finding, Level
from vllm_lilicorr.method.geometry import DrafterGeometry

QWEN3_MASK_TOKEN_ID = 151669
QWEN_VOCAB_SIZES = (151936, 152064)
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_OTHER_DRAFTER = "Use the drafter that was trained for this target."


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a target's config.json; multimodal targets nest it."""
    for key in _TEXT_CONFIGS:
        nested = config.get(key)
        if isinstance(nested, Mapping) and "hidden_size" in nested:
            return nested
    return config


def _unknown(check: str, name: str, value: Any) -> Finding:
    """Of a target whose config.json calls a dimension otherwise, or nests it elsewhere."""
    return Finding(
        check,
        Level.WARNING,
        f"The target's config.json has {name} {value!r}",
        "the drafter cannot be compared with it",
        "Compare them by hand.",
    )


def dimension_findings(geometry: DrafterGeometry, target: Mapping[str, Any]) -> Iterable[Finding]:
    """Widths: of the features that the drafter reads, and of the embeddings that it drafts on.

    Args:
        geometry: of the drafter.
        target: the target's text configuration.
    """

    def error(value: str, rule: str) -> Finding:
        return Finding("target dimensions", Level.ERROR, value, rule, _OTHER_DRAFTER)

    width = target.get("hidden_size")
    if not isinstance(width, int):
        yield _unknown("target dimensions", "hidden_size", width)
        return
    fits = True
    if geometry.target_hidden_size != width:
        fits = False
        yield error(f"target_hidden_size {geometry.target_hidden_size}", f"the target's hidden_size is {width}")
    if geometry.hidden_size != width:
        fits = False
        yield error(
            f"hidden_size {geometry.hidden_size}", f"it drafts on the target's token embeddings, which are {width} wide"
        )
    if fits:
        yield Finding("target dimensions", Level.OK, f"hidden_size {width}", "drafter and target agree")


def layer_findings(
    geometry: DrafterGeometry, drafter: Mapping[str, Any], target: Mapping[str, Any]
) -> Iterable[Finding]:
    """The target layers that the drafter reads.

    Args:
        geometry: of the drafter.
        drafter: its config.json.
        target: the target's text configuration.
    """
    check, ids = "target layers", list(geometry.target_layer_ids)
    count = target.get("num_hidden_layers")
    if not isinstance(count, int):
        yield _unknown(check, "num_hidden_layers", count)
        return
    expected = drafter.get("num_target_layers")
    fits = True
    if max(ids) >= count:
        fits = False
        yield Finding(
            check,
            Level.ERROR,
            f"target_layer_ids {ids}",
            f"the target has {count} layers, 0..{count - 1}",
            _OTHER_DRAFTER,
        )
    if expected is not None and expected != count:
        fits = False
        yield Finding(
            check, Level.ERROR, f"num_target_layers {expected}", f"the target has {count} layers", _OTHER_DRAFTER
        )
    if len(set(ids)) != len(ids) or ids != sorted(ids):
        fits = False
        yield Finding(
            check,
            Level.WARNING,
            f"target_layer_ids {ids}",
            "trained drafters read each layer once, in ascending order; another order drafts badly without an error",
            "Compare it with the training configuration.",
        )
    if fits:
        yield Finding(check, Level.OK, f"target_layer_ids {ids}", f"within the target's {count} layers")


def vocabulary_findings(geometry: DrafterGeometry, target: Mapping[str, Any]) -> Iterable[Finding]:
    """The vocabularies' sizes, and a mask token that is known to be another family's.

    Args:
        geometry: of the drafter.
        target: the target's text configuration.
    """
    check, size = "vocabulary", target.get("vocab_size")
    if not isinstance(size, int):
        yield _unknown(check, "vocab_size", size)
    elif geometry.vocab_size != size:
        yield Finding(
            check, Level.ERROR, f"vocab_size {geometry.vocab_size}", f"the target's is {size}", _OTHER_DRAFTER
        )
    elif geometry.mask_token_id == QWEN3_MASK_TOKEN_ID and size not in QWEN_VOCAB_SIZES:
        yield Finding(
            check,
            Level.ERROR,
            f"mask_token_id {geometry.mask_token_id}",
            f"it is Qwen3's mask token, and this vocabulary of {size} is not Qwen3's",
            "Set the mask_token_id that the drafter was trained with.",
        )
    else:
        yield Finding(check, Level.OK, f"vocab_size {size}", "drafter and target agree")


def config_findings(
    geometry: DrafterGeometry, drafter: Mapping[str, Any], target: Mapping[str, Any]
) -> Iterable[Finding]:
    """Everything above: what two configurations alone can tell."""
    yield from dimension_findings(geometry, target)
    yield from layer_findings(geometry, drafter, target)
    yield from vocabulary_findings(geometry, target)
