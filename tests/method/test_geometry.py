# SPDX-License-Identifier: Apache-2.0
"""Geometry from both dialects of config.json, and the message for each value that cannot be."""

import pytest
from pairs import drafter_config

from vllm_lilicorr.method.geometry import DrafterGeometry, is_lilicorr_config


def test_both_dialects_give_one_geometry() -> None:
    """Would catch block_size read from one place only."""
    top_level = drafter_config()
    nested = drafter_config(dflash_config={"block_size": 8})
    del nested["block_size"]
    assert DrafterGeometry.from_config(top_level) == DrafterGeometry.from_config(nested)


def test_content_decides_what_is_lilicorr() -> None:
    """Would catch older exports taken for plain DFlash, and plain DFlash taken for LiLiCorr."""
    assert is_lilicorr_config(drafter_config())
    assert is_lilicorr_config(drafter_config(architectures=["DFlashDraftModel"]))
    assert not is_lilicorr_config({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}})
    assert not is_lilicorr_config({"architectures": ["Qwen3ForCausalLM"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"lilicorr_candidate_topk": 6}}, "lilicorr_candidate_topk=6 .* power of two from 1 to 16"),
        ({"dflash_config": {"lilicorr_num_heads": 5}}, "lilicorr_num_heads=5 .* must divide lilicorr_hidden_size=32"),
        (
            {"dflash_config": {"conv_kernel_size": 2}},
            "conv_kernel_size=2, conv_group_size=0 .* both are set or neither",
        ),
        ({"dflash_config": {"mask_token_id": 512}}, "mask_token_id=512 .* vocabulary of 512"),
        ({"dflash_config": {"target_layer_ids": [-1]}}, r"target_layer_ids=\[-1\] .* counted from 0"),
        ({"dflash_config": {"lilicorr_vector_eps": 0.0}}, "lilicorr_vector_eps=0.0 .* positive"),
        ({"dflash_config": {"lilicorr_enabled": False}}, "lilicorr_enabled=false .* exported"),
        ({"dflash_config": {"lilicorr_logit_scale": None}}, "has no lilicorr_logit_scale"),
        ({"block_size": 1}, "block_size=1 .* at least one slot"),
    ],
)
def test_impossible_values_are_named(changes: dict, message: str) -> None:
    """Would catch a bad value that reaches the weights, or a message without value and rule."""
    with pytest.raises(ValueError, match=message):
        DrafterGeometry.from_config(drafter_config(**changes))
