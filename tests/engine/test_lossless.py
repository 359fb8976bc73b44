# SPDX-License-Identifier: Apache-2.0
"""Temperature 0 in float32: LiLiCorr drafting gives the tokens of no speculation, whatever the schedule."""

import pytest
import torch
from engines import Engine, accepted_steps, greedy, tokens
from vllm.sampling_params import StructuredOutputsParams

from vllm_lilicorr.method.walks import expected_length_walk, greedy_walk

pytestmark = pytest.mark.slow

MAX_TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["module", "function", "class"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("scenario", ["plain", "chunked", "cached", "preempted"])
def test_tokens_of_200_prompts_equal_no_speculation(runs, reference, scenario):
    """Catches a draft that is served without being the target's own token: a wrong verification row
    after chunked prefill, a cached prefix, or a preempted request that comes back."""
    run = runs(scenario)
    different = [index for index, served in enumerate(run.token_ids) if served != reference[index]]
    assert not different, f"prompts {different} differ from no speculation"
    # The schedule under test did happen, and drafting with it.
    assert run.num_drafts > 0 and run.num_accepted > 0
    assert (run.num_preemptions > 0) == (scenario == "preempted")
    assert (run.num_cached_tokens > 0) == (scenario == "cached")


def test_expected_length_walk(pair, prompts, reference, tmp_path):
    """Catches a walk whose path and tokens come apart: tokens stay right, acceptance falls."""
    speculative = {"lilicorr": {"walk": "expected-length"}}
    with Engine(pair.target, pair.drafter, speculative=speculative, trace=tmp_path / "trace.jsonl") as engine:
        assert tokens(engine.generate(prompts, greedy(MAX_TOKENS))) == reference
        assert engine.counters.accepted > engine.counters.drafts
        drafts = [draft for drafts in engine.take_trace().values() for draft in drafts.values()]
    lattices = torch.tensor([draft.edge_logits for draft in drafts])
    assert expected_length_walk(lattices).tolist() == [draft.path for draft in drafts]
    assert (expected_length_walk(lattices) != greedy_walk(lattices)).any()


def test_prompts_are_the_promised_ones(prompts):
    """Catches a prompt set that quietly became short or few."""
    lengths = sorted(len(prompt) for prompt in prompts)
    assert len(prompts) == 200 and lengths[0] == 5 and lengths[-1] == 400
    assert len({tuple(prompt) for prompt in prompts}) == 200


def test_drafts_are_the_correlators(runs):
    """Catches a silent fall-back to slot-wise argmax: such a path has rank 0 everywhere."""
    paths = [draft.path for drafts in runs("plain").drafts for draft in drafts.values()]
    off_argmax = sum(any(path) for path in paths)
    assert off_argmax > len(paths) // 20, f"{off_argmax} of {len(paths)} paths leave rank 0"


def test_one_request_at_a_time(lilicorr_engine, prompts, reference):
    """Catches what a batch hides: buffers sized by an earlier, larger batch."""
    for index in range(0, len(prompts), 5):
        (served,) = tokens(lilicorr_engine.generate([prompts[index]], greedy(MAX_TOKENS)))
        assert served == reference[index], f"prompt {index}"


def test_aborted_requests_leave_the_others_alone(lilicorr_engine, prompts, reference):
    """Catches state kept by batch row: an abort moves the last row into the gap."""
    engine = lilicorr_engine.llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    indices = {str(10_000 + index): index for index in range(48)}
    doomed = {request_id for request_id, index in indices.items() if index % 3 == 1}
    for request_id, index in indices.items():
        engine.add_request(request_id, {"prompt_token_ids": prompts[index]}, greedy(MAX_TOKENS))
    served, num_steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                served[output.request_id] = list(output.outputs[0].token_ids)
        num_steps += 1
        if num_steps % 3 == 0:
            running = [request.request_id.rsplit("-", 1)[0] for request in scheduler.running]
            victims = [request_id for request_id in running if request_id in doomed][:1]
            engine.abort_request(victims)
            doomed.difference_update(victims)
    finished = {request_id: indices[request_id] for request_id in served}
    assert 32 <= len(finished) < 44, "a quarter of the requests or so must be aborted while they run"
    for request_id, index in finished.items():
        assert served[request_id] == reference[index], f"prompt {index}"


def test_logprobs_are_the_targets(lilicorr_engine, reference_engine, prompts):
    """Catches logprobs taken from a draft row, or shifted by the number of accepted tokens."""
    params = greedy(MAX_TOKENS, logprobs=3)
    expected = reference_engine.generate(prompts[:32], params)
    found = lilicorr_engine.generate(prompts[:32], params)
    assert tokens(found) == tokens(expected)
    for mine, theirs in zip(found, expected, strict=True):
        for step, (a, b) in enumerate(zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True)):
            for token in a.keys() & b.keys():
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4), (step, token)
            assert len(a.keys() & b.keys()) >= 3, (step, a, b)


def test_structured_output(lilicorr_engine, reference_engine, prompts):
    """Catches a grammar that is advanced by rejected drafts, or not by accepted ones."""
    params = greedy(64, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    expected = tokens(reference_engine.generate(prompts[:16], params))
    accepted = lilicorr_engine.counters.accepted
    outputs = lilicorr_engine.generate(prompts[:16], params)
    assert tokens(outputs) == expected
    assert lilicorr_engine.counters.accepted > accepted
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_accepted_tokens_are_accounted_for(runs, prompts):
    """Catches counters that drift from what was served: each step serves its accepted drafts and one token more."""
    run = runs("plain")
    steps = [accepted_steps(*row) for row in zip(run.drafts, prompts, run.token_ids, strict=True)]
    served = sum(len(ids) for ids in run.token_ids)
    assert sum(len(row) for row in steps) == run.num_drafts
    assert served >= len(prompts) + sum(step.accepted for row in steps for step in row)
