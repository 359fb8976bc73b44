# SPDX-License-Identifier: Apache-2.0
"""Engines and greedy runs that several files look at, each made once."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import pytest

MAX_TOKENS = 40
# Without free whitespace a small model closes its JSON.
STRUCTURED = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


@dataclass(frozen=True)
class Run:
    """200 prompts served greedily by one engine."""

    token_ids: list[list[int]]
    drafts: list[dict[int, Any]]  # per prompt: position to engines.Draft
    num_drafts: int
    num_accepted: int
    num_preemptions: int
    num_cached_tokens: int


@pytest.fixture(scope="session")
def prompts(pair) -> list[list[int]]:
    from held_out import held_out_prompts
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    return held_out_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def reference_engine(pair) -> Iterator[Any]:
    """The target without speculation, 8 requests at a time."""
    from engines import Engine

    with Engine(pair.target, **STRUCTURED) as engine:
        yield engine


@pytest.fixture(scope="session")
def lilicorr_engine(pair, tmp_path_factory) -> Iterator[Any]:
    """Drafting with LiLiCorr, whole prompts, 8 requests at a time, no prefix caching."""
    from engines import Engine

    trace = tmp_path_factory.mktemp("trace") / "plain.jsonl"
    with Engine(pair.target, pair.drafter, trace=trace, **STRUCTURED) as engine:
        yield engine


@pytest.fixture(scope="session")
def reference(reference_engine, prompts) -> list[list[int]]:
    """Greedy tokens of every prompt, without speculation."""
    from engines import greedy, tokens

    return tokens(reference_engine.generate(prompts, greedy(MAX_TOKENS)))


SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Eight requests that verify seven drafts each take the whole budget, so prompts come in pieces.
    "chunked": {"max_num_batched_tokens": 128},
    # Room for every prompt, so that none is evicted before it comes again.
    "cached": {"enable_prefix_caching": True, "num_gpu_blocks_override": 2560},
    # One request of the longest prompt fits, eight do not.
    "preempted": {"num_gpu_blocks_override": 32},
}


@pytest.fixture(scope="session")
def runs(pair, prompts, lilicorr_engine, tmp_path_factory) -> Callable[[str], Run]:
    """The run of one scenario by name, made at its first use."""
    from engines import Engine, greedy, tokens

    made: dict[str, Run] = {}

    def serve(engine: Engine) -> Run:
        before = copy(engine.counters)
        outputs = engine.generate(prompts, greedy(MAX_TOKENS))
        after = engine.counters
        drafts = engine.take_trace()
        return Run(
            token_ids=tokens(outputs),
            drafts=[drafts[output.request_id] for output in outputs],
            num_drafts=after.drafts - before.drafts,
            num_accepted=after.accepted - before.accepted,
            num_preemptions=after.preemptions - before.preemptions,
            num_cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        )

    def run(name: str) -> Run:
        if name not in made:
            if name == "plain":
                made[name] = serve(lilicorr_engine)
            else:
                trace = tmp_path_factory.mktemp("trace") / f"{name}.jsonl"
                with Engine(pair.target, pair.drafter, trace=trace, **SCENARIOS[name]) as engine:
                    if name == "cached":
                        engine.generate(prompts, greedy(1))
                        engine.take_trace()
                    made[name] = serve(engine)
        return made[name]

    return run
