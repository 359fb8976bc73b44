# SPDX-License-Identifier: Apache-2.0
"""Options of `vllm serve` as the rules see them."""

import pytest

from vllm_lilicorr.doctor.engine_arguments import parse_engine_arguments


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--tensor-parallel-size", "2", "--speculative-config", '{"model": "d"}'],
        ["vllm", "serve", "m", "-tp=2", '--speculative_config={"model": "d"}'],
        ["--unknown", "x", "--model=m", "-tp", "2", "-sc", '{"model": "d"}', "--flag"],
        ["serve", "m", "--tensor_parallel_size=2", "--spec-model", "d"],
        ["m", "-tp", "2", "--speculative-config.model", "d"],
    ],
)
def test_every_spelling_of_an_option_is_read(words):
    """Would catch a spelling that vLLM takes and that passes unchecked here."""
    found = parse_engine_arguments(words)
    assert (found.target, found.tensor_parallel_size, found.speculative) == ("m", 2, {"model": "d"})


@pytest.mark.parametrize(("text", "length"), [("128k", 128000), ("128K", 131072), ("1.5k", 1500), ("auto", None)])
def test_lengths_are_read_with_their_suffixes(text, length):
    """Would catch decimal and binary thousands confused."""
    assert parse_engine_arguments(["m", "--max-model-len", text]).max_model_len == length


def test_values_are_as_given_and_defaults_are_vllms():
    """Would catch a flag read into another, or a default that is not vLLM's."""
    found = parse_engine_arguments(
        ["m", "--kv-cache-dtype", "fp8", "--no-enable-prefix-caching", "--gpu-memory-utilization=0.5",
         "--block-size", "64", "--config", "f.yaml"]
    )  # fmt: skip
    assert (found.kv_cache_dtype, found.enable_prefix_caching, found.memory_share) == ("fp8", False, 0.5)
    assert (found.block_size, found.config_file) == (64, "f.yaml")
    assert parse_engine_arguments([]).memory_share == 0.92


def test_dotted_options_are_merged_and_said_to_be():
    """Would catch the JSON judged without its overrides."""
    found = parse_engine_arguments(
        ["m", "-sc", '{"model": "d", "num-speculative-tokens": 3}', "-sc.num_speculative_tokens", "5"]
    )
    assert found.speculative == {"model": "d", "num_speculative_tokens": 5}
    assert "merged num_speculative_tokens" in found.merged


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "-sc", "{"], "is not JSON"),
        (["m", "-sc", "[1]"], "is not a JSON object"),
        (["m", "-tp", "two"], "argument --tensor-parallel-size/-tp: invalid"),
        (["m", "-tp", "0"], "argument --tensor-parallel-size/-tp: invalid"),
        (["m", "--max-model-len", "long"], "argument --max-model-len: invalid"),
        (["m", "--kv-cache-dtype"], "expected one argument"),
    ],
)
def test_what_vllm_could_not_read_either_is_refused(words, message):
    """Would catch a traceback, or argparse ending the process."""
    with pytest.raises(ValueError, match=message):
        parse_engine_arguments(words)
