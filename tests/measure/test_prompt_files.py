# SPDX-License-Identifier: Apache-2.0
"""Prompt files."""

import pytest

from vllm_lilicorr.measure.prompt_files import Prompt, load_prompts, parse_prompts


def test_texts_come_out_exactly():
    """A newline too many or too few changes the first token of the continuation."""
    assert parse_prompts("===== a\ndef f(\n===== b c\nx\n\n===== a\n  y\n") == [
        Prompt("a", "def f("),
        Prompt("b c", "x\n"),
        Prompt("a", "  y"),
    ]


@pytest.mark.parametrize(("text", "words"), [("x\n===== a\ny\n", "stands before"), ("===== a\n\n", "is empty")])
def test_mistakes_are_named(text, words):
    """A prompt silently lost, or an empty one, which vLLM refuses."""
    with pytest.raises(ValueError, match=words):
        parse_prompts(text)


@pytest.mark.parametrize(("name", "least"), [("demo", 4), ("held_out_python", 32)])
def test_our_own_files(name, least):
    """A broken mark merging two prompts; the same prompt twice."""
    prompts = load_prompts(name)
    assert len(prompts) >= least
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert not any("=====" in prompt.text for prompt in prompts)
