# SPDX-License-Identifier: Apache-2.0
"""Whatever a checkpoint holds: findings, never an exception. And names survive every naming."""

import json
import shutil
from pathlib import Path

import pytest
from broken import FIRST, write_pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import drafter_config

from vllm_lilicorr.checkpoint.declaration import declarations
from vllm_lilicorr.checkpoint.doctor import examine
from vllm_lilicorr.checkpoint.layout import canonical_name, expected_tensors
from vllm_lilicorr.method.geometry import DrafterGeometry

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TOP_KEYS = sorted(drafter_config(quantization_config={}, is_neox_style=True, sliding_window=1, has_own_lm_head=False))
NESTED_KEYS = sorted(drafter_config()["dflash_config"]) + ["conv_kernel_size", "conv_group_size", "use_swa"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def scratch(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("scratch")
    return shutil.copytree(pair[0], folder / "drafter"), shutil.copytree(pair[1], folder / "target")


@SETTINGS
@given(
    st.dictionaries(st.sampled_from(TOP_KEYS), JSON, max_size=3), st.dictionaries(st.sampled_from(NESTED_KEYS), JSON)
)
def test_any_value_in_a_config(pair, scratch, top: dict, nested: dict) -> None:
    """Would catch a traceback for a value of a type that nobody thought of."""
    config = json.loads((pair[0] / "config.json").read_text())
    config["dflash_config"] |= nested
    (scratch[0] / "config.json").write_text(json.dumps(config | top))
    for finding in examine(*scratch)[1]:
        assert finding.value
    (scratch[0] / "config.json").write_text(json.dumps(config))


@SETTINGS
@given(st.dictionaries(st.sampled_from(sorted(drafter_config())), JSON, max_size=3))
def test_any_value_in_a_target_config(pair, scratch, values: dict) -> None:
    """Would catch a traceback for another family's config.json."""
    config = json.loads((pair[1] / "config.json").read_text())
    (scratch[1] / "config.json").write_text(json.dumps(config | values))
    (scratch[0] / "config.json").write_bytes((pair[0] / "config.json").read_bytes())
    examine(*scratch)


@SETTINGS
@given(JSON | st.dictionaries(st.sampled_from(["quantization", "quant_algo", "ignore", "config_groups"]), JSON))
def test_any_declaration(value: object) -> None:
    """Would catch a traceback for a declaration of another method."""
    for declaration in declarations({"quantization_config": value}, value if isinstance(value, dict) else None):
        declaration.excludes("layers.0.mlp.up_proj")


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_to_a_header(pair, scratch, changes: list[tuple[int, int]]) -> None:
    """Would catch a damaged header that ends in a traceback, or in a read past the end."""
    data = bytearray((pair[0] / FIRST).read_bytes())
    for place, value in changes:
        data[place] = value
    (scratch[0] / FIRST).write_bytes(data)
    examine(*scratch)
    (scratch[0] / FIRST).write_bytes((pair[0] / FIRST).read_bytes())


@given(st.booleans(), st.booleans(), st.integers(1, 3), st.integers(1, 3))
def test_every_naming_means_the_same(prefix: bool, sequential: bool, layers: int, head_layers: int) -> None:
    """Would catch two tensors that get one name, or a naming that is mapped to nothing."""
    config = drafter_config(
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        dflash_config={"lilicorr_num_layers": head_layers},
    )
    names = list(expected_tensors(DrafterGeometry.from_config(config)))
    exported = [_sequential(name) if sequential else name for name in names]
    exported = [f"model.{name}" if prefix and not name.startswith("lilicorr.") else name for name in exported]
    assert len(set(exported)) == len(names)
    assert [canonical_name(name) for name in exported] == names


def _sequential(name: str) -> str:
    for new, old in (("feature_norm.", "feature_mlp.0."), ("feature_mlp.up_proj.", "feature_mlp.1."),
                     ("feature_mlp.down_proj.", "feature_mlp.3.")):  # fmt: skip
        if name.startswith(f"lilicorr.{new}"):
            return name.replace(new, old)
    if name.startswith("lilicorr.layers."):
        return name.replace("mlp.up_proj.", "mlp.0.").replace("mlp.down_proj.", "mlp.2.")
    return name
