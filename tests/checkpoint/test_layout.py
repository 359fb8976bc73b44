# SPDX-License-Identifier: Apache-2.0
"""Tensor names in every dialect, and the one message for tensors that do not fit."""

import pytest
from pairs import drafter_config

from vllm_lilicorr.checkpoint.layout import canonical_name, check_tensors, expected_tensors
from vllm_lilicorr.method.geometry import DrafterGeometry


@pytest.mark.parametrize(
    ("exported", "canonical"),
    [
        ("lilicorr.feature_mlp.0.weight", "lilicorr.feature_norm.weight"),
        ("lilicorr.feature_mlp.1.bias", "lilicorr.feature_mlp.up_proj.bias"),
        ("lilicorr.feature_mlp.3.weight", "lilicorr.feature_mlp.down_proj.weight"),
        ("lilicorr.layers.11.mlp.0.weight", "lilicorr.layers.11.mlp.up_proj.weight"),
        ("lilicorr.layers.1.mlp.2.weight_scale", "lilicorr.layers.1.mlp.down_proj.weight_scale"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.lilicorr.feature_mlp.0.bias", "lilicorr.feature_norm.bias"),
        ("lilicorr.feature_mlp.up_proj.weight", "lilicorr.feature_mlp.up_proj.weight"),
        ("lilicorr.layers.0.attn.in_proj_weight", "lilicorr.layers.0.attn.in_proj_weight"),
        ("fc.weight", "fc.weight"),
    ],
)
def test_canonical_name(exported: str, canonical: str) -> None:
    """Would catch Model Optimizer's numbered names failing to load, and in-tree names being changed."""
    assert canonical_name(exported) == canonical
    assert canonical_name(canonical) == canonical


def test_convolution_and_lm_head_tensors() -> None:
    """Would catch shapes that the published drafter's parts do not have."""
    config = drafter_config(dflash_config={"conv_kernel_size": 2, "conv_group_size": 16}, has_own_lm_head=True)
    shapes = expected_tensors(DrafterGeometry.from_config(config))
    assert shapes["layers.1.mlp_conv.base_kernel"] == (2, 2, 64)
    assert shapes["layers.0.attention_conv.kernel_projection.weight"] == (16, 64)
    assert shapes["lm_head.weight"] == (512, 64)


def test_every_difference_is_listed_once() -> None:
    """Would catch a loader that stops at the first problem or hides the shapes."""
    geometry = DrafterGeometry.from_config(drafter_config())
    found = expected_tensors(geometry)
    del found["norm.weight"]
    found["fc.weight"] = (64, 64)
    found["lilicorr.gate.weight"] = (3,)
    with pytest.raises(ValueError) as error:
        check_tensors(geometry, found)
    message = str(error.value)
    assert "3 differences" in message
    assert "missing     norm.weight, expected [64]" in message
    assert "wrong shape fc.weight: expected [64, 128], found [64, 64]" in message
    assert "unexpected  lilicorr.gate.weight, found [3]" in message


def test_tensors_that_belong_to_the_target_are_accepted() -> None:
    """Would catch exports refused because they carry a copy of the target's embedding."""
    geometry = DrafterGeometry.from_config(drafter_config())
    check_tensors(geometry, expected_tensors(geometry) | {"embed_tokens.weight": (512, 64)})
