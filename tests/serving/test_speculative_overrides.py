# SPDX-License-Identifier: Apache-2.0
"""Dotted speculative options beside a JSON option."""

import json

import pytest

from vllm_lilicorr.serving.speculative_overrides import merge_speculative_overrides

CONFIG = {"method": "lilicorr", "model": "D"}


def merged_config(arguments: list[str]) -> tuple[list[str], dict]:
    """The arguments beside the option, and the option's object."""
    merged, message = merge_speculative_overrides(arguments)
    assert message is not None
    at = next(i for i, word in enumerate(merged) if word.startswith(("--speculative", "-sc")))
    if "=" in merged[at]:
        return merged[:at] + merged[at + 1 :], json.loads(merged[at].partition("=")[2])
    return merged[:at] + merged[at + 2 :], json.loads(merged[at + 1])


@pytest.mark.parametrize("option", ["--speculative-config", "--speculative_config", "-sc"])
@pytest.mark.parametrize("joined", [True, False])
def test_every_spelling_is_merged(option, joined):
    """A spelling that vLLM accepts but we overlook would still lose the whole JSON."""
    text = json.dumps(CONFIG)
    words = [f"{option}={text}"] if joined else [option, text]
    rest, config = merged_config(["M", *words, f"{option}.num_speculative_tokens", "5", "--port", "1"])
    assert rest == ["M", "--port", "1"]
    assert config == CONFIG | {"num_speculative_tokens": 5}


def test_an_override_before_the_json_wins_too():
    """vLLM appends dotted options last wherever they stand; order must not change the result."""
    _, config = merged_config(["--speculative-config.method=dflash", "--speculative-config", json.dumps(CONFIG)])
    assert config == CONFIG | {"method": "dflash"}


def test_nested_keys_and_lists():
    """`a.b` set as a flat key "a.b", or `+` kept in the name, would be an unknown key to vLLM."""
    _, config = merged_config(
        [
            "-sc",
            json.dumps(CONFIG | {"x": {"keep": 1}, "l": ["p"]}),
            "-sc.x.y",
            "true",
            "-sc.l+",
            "q,r",
            "-sc.s",
            "word",
        ]
    )
    assert config == CONFIG | {"x": {"keep": 1, "y": True}, "l": ["p", "q", "r"], "s": "word"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["M", "--speculative-config", '{"method": "lilicorr"}'],
        ["M", "--speculative-config.method", "lilicorr"],
        ["M", "--compilation-config.mode", "3", "--host", "a.b"],
        ["M", "--", "--speculative-config", "{}", "--speculative-config.a", "1"],
        [],
    ],
)
def test_everything_else_passes_untouched(arguments):
    """Rewriting what vLLM reads correctly by itself could change its meaning."""
    assert merge_speculative_overrides(arguments) == (arguments, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-sc", "{method", "-sc.x", "1"], "is not JSON"),
        (["-sc", "[1]", "-sc.x", "1"], "not a JSON object"),
        (["--speculative-config.x"], "has no value"),
    ],
)
def test_what_cannot_be_merged_is_said(arguments, words):
    """A traceback, or a silently dropped option, instead of a sentence."""
    with pytest.raises(ValueError, match=words):
        merge_speculative_overrides(arguments)


def test_the_result_means_to_vllm_what_the_message_says():
    """Merging by other rules than vLLM's parser would give vLLM another object than we print."""
    argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")
    parser = argparse_utils.FlexibleArgumentParser()
    parser.add_argument("--speculative-config", "-sc", type=json.loads)
    arguments = ["--speculative_config", json.dumps(CONFIG), "--speculative-config.num_speculative_tokens", "5"]
    stock = parser.parse_args(list(arguments)).speculative_config
    assert stock == {"num_speculative_tokens": 5}, "vLLM now merges by itself: this module can go"
    merged, _ = merge_speculative_overrides(arguments)
    assert parser.parse_args(merged).speculative_config == CONFIG | {"num_speculative_tokens": 5}
