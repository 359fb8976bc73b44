# SPDX-License-Identifier: Apache-2.0
"""Adaptive draft length in the real engine: the target's tokens whatever is decided, and calibrated decisions."""

from collections.abc import Iterator

import numpy as np
import pytest
from engines import Engine, greedy, tokens
from test_deferred_context import Scripted
from vllm import SamplingParams

from vllm_lilicorr.engine.draft_length import DraftLengthPolicy
from vllm_lilicorr.method.calibration import Reliability

pytestmark = pytest.mark.slow

ADAPTIVE = {"lilicorr": {"adaptive_length": True}}
# Draft steps of one request each, before calibration is judged.
LEARNED_STEPS = 2000


class AlwaysDrafting(DraftLengthPolicy):
    """Learns as the real one, and has every drafted token verified."""

    def begin_step(self, view, can_draft=True, must_draft=False) -> bool:
        self._drafting, self._draft_steps = True, 0
        return super().begin_step(view, can_draft, must_draft)

    def choose(self, features, *kinds):
        lengths = super().choose(features, *kinds)
        lengths[:] = features.shape[1]  # of the proposal that is observed, too
        return lengths


def always_drafting(policy: DraftLengthPolicy) -> AlwaysDrafting:
    return AlwaysDrafting(policy.estimator, policy.costs, 7)


@pytest.fixture(scope="module")
def adaptive_engine(pair) -> Iterator[Engine]:
    with Engine(
        pair.target, pair.drafter, speculative=ADAPTIVE, enable_prefix_caching=True, max_num_batched_tokens=256
    ) as engine:
        yield engine


@pytest.fixture
def restored(adaptive_engine) -> Iterator[Engine]:
    """The engine, with its own policy again afterwards."""
    policy = adaptive_engine.proposer._policy
    yield adaptive_engine
    adaptive_engine.proposer._policy = policy


def mixed_params(count: int) -> list[SamplingParams]:
    """Two greedy requests, then a sampled one, and so on, of 20 to 49 tokens."""
    params = []
    for index in range(count):
        max_tokens = 20 + index * 7 % 30
        if index % 3 < 2:
            params.append(greedy(max_tokens))
        else:
            params.append(SamplingParams(temperature=0.8, top_p=0.9, max_tokens=max_tokens))
    return params


@pytest.fixture(scope="module")
def expected(reference_engine, prompts) -> list[list[int]]:
    return tokens(reference_engine.generate(prompts, greedy(49)))


@pytest.mark.parametrize("ragged", [False, True])
def test_tokens_equal_no_speculation_through_many_suspensions(restored, prompts, expected, ragged):
    """Catches proposals, draft probabilities or context that stay behind from before a suspension, and rows of
    draft probabilities that do not fit ragged lists. Prefix caching, chunked prompts, sampled neighbours."""
    restored.proposer._policy = policy = Scripted(ragged)
    params = mixed_params(len(prompts))
    accepted = restored.counters.accepted
    for _ in range(2):  # the second time from cached prefixes
        served = tokens(restored.generate(prompts, params))
        for index in range(len(prompts)):
            if params[index].temperature == 0:
                assert served[index] == expected[index][: params[index].max_tokens], f"prompt {index}"
    assert policy.resumptions > 100
    assert restored.counters.accepted > accepted


def test_tokens_equal_no_speculation_with_its_own_policy(restored, prompts, expected):
    """Catches a decision that changes what is served: one request at a time, then eight."""
    for batch in (prompts[:4], prompts[100:]):
        for group in ([one] for one in batch) if len(batch) == 4 else [batch]:
            served = tokens(restored.generate(group, greedy(49)))
            for prompt, ids in zip(group, served, strict=True):
                assert ids == expected[prompts.index(prompt)]


def test_costs_were_measured_at_start_up(adaptive_engine):
    """Catches a policy that starts without curves, or with those of an idle function."""
    costs = adaptive_engine.proposer._policy.costs
    for drafting in (False, True):
        seconds = costs._base(8, drafting)
        assert 1e-4 < seconds[0] < seconds[-1] < 1.0
    assert costs._base(8, True)[0] > costs._base(8, False)[0] + 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_calibration_on_held_out_prompts(restored, prompts, temperature):
    """Catches probabilities that are off by more than 0.05 on average, or that say less than each slot's own
    acceptance rate, after 2,000 draft steps on other prompts."""
    policy = restored.proposer._policy = always_drafting(restored.proposer._policy)
    model = policy.estimator.greedy if temperature == 0 else policy.estimator.sampled
    model.__init__(7)  # with the greedy prior, a worse start for the sampled ones
    params = SamplingParams(temperature=temperature, max_tokens=49, ignore_eos=True)
    drafts, learned = restored.counters.drafts, 0
    while restored.counters.drafts - drafts < LEARNED_STEPS:
        restored.generate(prompts[learned : learned + 20], params)
        learned += 20
    assert learned <= 140
    model.reliability = Reliability()
    restored.generate(prompts[140:], params)
    found = model.reliability
    count = found.count.sum()
    print(
        f"temperature {temperature}: {int(count)} slots, expected calibration error "
        f"{found.expected_calibration_error:.4f}, log-loss {found.log_loss / count:.4f}, of the slots' rates "
        f"{found.base_log_loss / count:.4f}, weights {model._weights.round(2)}"
    )
    with np.printoptions(precision=2, suppress=True):
        print(found.predicted / np.maximum(found.count, 1), found.accepted / np.maximum(found.count, 1), found.count)
    assert count > 1000
    assert found.expected_calibration_error < 0.05
    assert found.log_loss < found.base_log_loss


def test_vllms_own_schedule_of_lengths_keeps_working(pair, prompts, reference):
    """Catches proposals of a length that the schedule did not ask for, and a drafter that runs where it asks
    for none."""
    schedule = [[1, 3, 7], [4, 6, 2], [7, 8, 0]]
    speculative = ADAPTIVE | {"num_speculative_tokens_per_batch_size": schedule}
    with Engine(pair.target, pair.drafter, speculative=speculative) as engine:
        policy = engine.proposer._policy = always_drafting(engine.proposer._policy)
        lengths: dict[int, set[int]] = {}
        choose = policy.choose

        def watched(features, *kinds):
            lengths.setdefault(len(features), set()).add(features.shape[1])
            return choose(features, *kinds)

        policy.choose = watched
        served = tokens(engine.generate(prompts[:24], [greedy(10 + index) for index in range(24)]))
        for index in range(24):
            assert served[index] == reference[index][: 10 + index]
        assert {size: found for size, found in lengths.items() if size > 6} == {}
        assert lengths[1] == {7} and lengths[5] == {2}
