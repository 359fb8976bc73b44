# SPDX-License-Identifier: Apache-2.0
"""The policy against a simulated engine: known costs, known acceptance."""

import numpy as np
import pytest

from vllm_lilicorr.engine.draft_length import DraftLengthPolicy, StepView
from vllm_lilicorr.engine.options import Options
from vllm_lilicorr.engine.step_costs import StepCosts, curves_in_seconds
from vllm_lilicorr.method.calibration import NUM_FEATURES, AcceptanceEstimator

NUM_SLOTS = 7
TARGET = {1: 0.005, 8: 0.0055, 32: 0.008, 64: 0.011, 256: 0.03}
DRAFTER = {1: 0.0035, 8: 0.010, 32: 0.035}
EASY, HARD = 0.85, 0.1


class Simulation:
    """An engine whose steps take the true curves plus an overhead that no curve knows.

    Every slot of a request is accepted with the probability that its features say.
    """

    def __init__(self, seed: int = 0, overhead: float = 0.002, target=None, drafter=None) -> None:
        self.draws = np.random.default_rng(seed)
        self.truth = StepCosts(TARGET, DRAFTER, NUM_SLOTS)
        self.overhead = overhead
        costs = StepCosts(target or TARGET, drafter or DRAFTER, NUM_SLOTS)
        self.policy = DraftLengthPolicy(AcceptanceEstimator(NUM_SLOTS), costs, NUM_SLOTS)
        self.now = self.plain_seconds = 0.0
        self.tokens = 0
        self.drafted: list[bool] = []
        self.verified: list[int] = []
        self._ids: list[str] = []
        self._positions: dict[str, int] = {}
        self._lengths, self._logits = np.zeros(0, dtype=int), None

    def run(self, acceptance: list[float], steps: int, name: str = "r") -> float:
        """Serves one request per acceptance rate; returns tokens per second over plain decoding's."""
        ids = [f"{name}{index}" for index in range(len(acceptance))]
        acceptance = np.array(acceptance)
        self.tokens, began = 0, self.now
        num_reqs = len(ids)
        if ids != self._ids:
            self._lengths = np.zeros(num_reqs, dtype=int)
        for _ in range(steps):
            num_computed = 1 + self._lengths
            reached = np.arange(NUM_SLOTS) < self._lengths[:, None]
            hits = self.draws.random((num_reqs, NUM_SLOTS)) < acceptance[:, None]
            accepted = np.cumprod(hits & reached, axis=1).sum(axis=1)
            was_drafting = self.drafted[-1] if self.drafted else False
            seconds = self.truth.seconds(num_reqs, was_drafting)[self._lengths.sum()] + self.overhead
            self.now += seconds * self.draws.lognormal(0, 0.03)
            positions = np.array([self._positions.get(one, 10) for one in ids])
            no_prompts = np.zeros(num_reqs, dtype=bool)
            view = StepView(
                self.now, ids, num_computed, self._lengths - accepted, no_prompts, lambda found=positions: found
            )
            self.tokens += num_reqs + int(accepted.sum())
            for one, position, count in zip(ids, positions, accepted, strict=True):
                self._positions[one] = int(position + 1 + count)
            drafts = self.policy.begin_step(view)
            self.drafted.append(drafts)
            self._lengths = np.zeros(num_reqs, dtype=int)
            if drafts:
                noise = self.draws.normal(0, 0.3, (num_reqs, NUM_SLOTS))
                features = np.zeros((num_reqs, NUM_SLOTS, NUM_FEATURES), dtype=np.float32)
                features[:, :, 0] = np.log(acceptance / (1 - acceptance))[:, None] + noise
                self._lengths = self.policy.choose(features, np.zeros(num_reqs, dtype=bool))
            self.verified.append(int(self._lengths.sum()))
        self._ids = ids
        plain = num_reqs / (self.truth.seconds(num_reqs, False)[0] + self.overhead)
        return self.tokens / (self.now - began) / plain


@pytest.mark.parametrize("num_reqs", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("acceptance", [EASY, 0.6, HARD])
def test_never_much_slower_than_plain(num_reqs, acceptance):
    """Catches a policy that drafts where it does not pay, or probes too often, at any load."""
    simulation = Simulation()
    simulation.run([acceptance] * num_reqs, 500)
    assert simulation.run([acceptance] * num_reqs, 1500) > 0.975


def test_as_fast_as_the_best_fixed_length_at_low_load():
    """Catches lengths that are cut too short, and a drafter that rests where it would pay."""
    simulation = Simulation()
    gain = simulation.run([EASY], 1000)
    seconds = simulation.truth.seconds(1, True) + simulation.overhead
    tokens = 1 + np.cumsum(EASY ** np.arange(1, NUM_SLOTS + 1))
    best = (tokens / seconds[1:]).max() * (simulation.truth.seconds(1, False)[0] + simulation.overhead)
    assert gain > 0.95 * best


def test_easy_hard_easy():
    """Catches a suspension without end, and one that comes late."""
    simulation = Simulation()
    assert simulation.run([EASY], 600) > 1.5
    assert simulation.run([HARD], 1500) > 0.97
    assert simulation.policy.is_suspended
    assert simulation.run([EASY], 1500) > 1.4


def test_a_load_step_is_answered_at_once():
    """Catches a decision for one request that is kept for 32, and the way back that waits for a probe."""
    simulation = Simulation()
    simulation.run([0.7], 300, "a")
    first = len(simulation.drafted)
    simulation.run([0.7] * 32, 300, "b")
    assert sum(simulation.drafted[first:]) <= 6
    first = len(simulation.drafted)
    simulation.run([0.7], 100, "c")
    assert sum(simulation.drafted[first:]) > 80


def test_probes_cost_a_known_share():
    """Catches probing by a count of steps: at 32 requests a draft takes as long as five steps."""
    simulation = Simulation()
    simulation.run([HARD] * 32, 300)
    first, began = len(simulation.drafted), simulation.now
    simulation.run([HARD] * 32, 3000)
    spent = sum(simulation.drafted[first:]) * DRAFTER[32]
    assert spent < 0.01 * (simulation.now - began)


def test_probes_cost_a_known_share_when_requests_come_and_go():
    """Catches a probe for every new batch: with many requests these are frequent and a probe is dear."""
    simulation = Simulation()
    simulation.run([HARD] * 12, 300, "first")
    first, began = len(simulation.drafted), simulation.now
    for batch in range(40):
        simulation.run([HARD] * 12, 50, f"batch{batch}-")
    probes = sum(simulation.drafted[first:])
    assert probes > 0
    assert probes * simulation.policy._probe_seconds(12) < 0.015 * (simulation.now - began)


def test_ragged_lengths_follow_the_requests():
    """Catches lengths by batch instead of by request."""
    simulation = Simulation()
    simulation.run([0.9, 0.02], 300)
    lengths = simulation._lengths
    assert simulation.drafted[-1] and lengths[0] >= 4 and lengths[1] <= 2


def test_wrong_curves_are_corrected():
    """Catches a policy that believes its start-up measurement: here the drafter is ten times slower than said."""
    simulation = Simulation(drafter={count: seconds / 10 for count, seconds in DRAFTER.items()})
    simulation.run([0.6] * 8, 500)
    assert simulation.run([0.6] * 8, 1000) > 0.97


def test_same_views_give_same_decisions():
    """Catches a clock or a random number inside the policy."""
    first, second = Simulation(seed=3), Simulation(seed=3)
    for simulation in (first, second):
        simulation.run([0.6] * 4, 300)
        simulation.run([HARD] * 3, 300)
    assert first.drafted == second.drafted and first.verified == second.verified


def view(now=0.0, ids=("a",), positions=(10,), computed=(1,), rejected=(0,), partial=(False,)) -> StepView:
    arrays = (np.array(values) for values in (computed, rejected, partial))
    return StepView(now, list(ids), *arrays, lambda: np.array(positions))


def proposing(lengths: list[int]) -> DraftLengthPolicy:
    """A policy that has proposed these lengths for requests a, b, ... at positions 10, 20, ..."""
    policy = DraftLengthPolicy(AcceptanceEstimator(NUM_SLOTS), StepCosts(TARGET, DRAFTER, NUM_SLOTS), NUM_SLOTS)
    count = len(lengths)
    ids, positions = "abcdef"[:count], [10 * (row + 1) for row in range(count)]
    policy._drafting = True
    assert policy.begin_step(view(0.0, ids, positions, [1] * count, [0] * count, [False] * count))
    policy.choose(np.full((count, NUM_SLOTS, NUM_FEATURES), 3.0, dtype=np.float32), np.zeros(count, dtype=bool))
    policy._proposal.lengths[:] = lengths
    return policy


def observed(policy: DraftLengthPolicy) -> tuple[int, int]:
    reliability = policy.estimator.greedy.reliability
    return int(reliability.count.sum()), int(reliability.accepted.sum())


def test_accepted_tokens_follow_requests_that_move():
    """Catches counts by batch row: a request has left, another joined, and the rows are reordered."""
    policy = proposing([3, 2, 4])
    policy.begin_step(view(0.1, "cxa", [31, 5, 11], [5, 1, 4], [4, 0, 1], [False] * 3))
    # c: 0 of 4 accepted, one slot reached; a: 2 of 3 accepted, three reached; b is gone.
    assert observed(policy) == (4, 2)


def test_tokens_that_were_not_verified_are_no_rejections():
    """Catches a proposal that the scheduler cut (one of three here), or left out, taken for rejected."""
    policy = proposing([3, 3])
    policy.begin_step(view(0.1, "ab", [11, 21], [2, 1], [0, 0], [False] * 2))
    assert observed(policy) == (1, 1)


def test_a_preempted_request_that_computes_again_is_not_a_verification():
    """Catches recomputed prompt tokens taken for accepted drafts."""
    policy = proposing([3])
    policy.begin_step(view(0.1, "a", [8], [4], [0]))
    assert observed(policy) == (0, 0)


def test_steps_with_prompts_are_not_timed():
    """Catches a prefill's time taken for a decode step's."""
    policy = proposing([2])
    policy.begin_step(view(0.1, "ax", [11, 0], [3, 50], [0, 0], [False, False]))
    assert policy.costs.observations(2, True) == 0
    policy = proposing([2])
    policy.begin_step(view(0.1, "a", [11], [3], [0]))
    assert policy.costs.observations(1, True) == 1


def test_part_of_a_prompt_gets_no_tokens_verified():
    """Catches drafts for a request that has no sampled token yet; the scheduler drops them anyway."""
    policy = DraftLengthPolicy(AcceptanceEstimator(NUM_SLOTS), StepCosts(TARGET, DRAFTER, NUM_SLOTS), NUM_SLOTS)
    policy._drafting = True
    policy.begin_step(view(0.0, "ab", [10, 0], [1, 64], [0, 0], [False, True]))
    features = np.full((2, NUM_SLOTS, NUM_FEATURES), 6.0, dtype=np.float32)
    lengths = policy.choose(features, np.zeros(2, dtype=bool))
    assert lengths[0] > 0 and lengths[1] == 0


def test_sampled_requests_are_cut_at_a_price_set_before():
    """Catches a length that later slots of the same request, or its neighbours, decide: they follow from its draws."""
    policy = DraftLengthPolicy(AcceptanceEstimator(NUM_SLOTS), StepCosts(TARGET, DRAFTER, NUM_SLOTS), NUM_SLOTS)
    policy._drafting = True
    rng = np.random.default_rng(0)
    sampled, lengths = np.array([True, False, True]), set()
    policy.begin_step(view(0.0, "abc", [10, 20, 30], [1, 1, 1], [0, 0, 0]))
    policy._price = 0.3
    for _ in range(200):
        features = rng.normal(scale=3.0, size=(3, NUM_SLOTS, NUM_FEATURES)).astype(np.float32)
        joint = policy.estimator.joint(features, sampled)
        chosen, _ = policy._cut(joint, policy.costs.seconds(3, True), 1.0, sampled, None)
        for row in (0, 2):
            assert chosen[row] == (joint[row] > 0.3).sum()
            lengths.add(int(chosen[row]))
        seeded, _ = policy._cut(joint, policy.costs.seconds(3, True), 1.0, sampled, np.array([False, False, True]))
        assert seeded[0] == chosen[0] and seeded[2] == NUM_SLOTS
    assert {0, 1, 2, 3} <= lengths
    assert 0 < policy._token_price(3) < 3


def test_seeded_requests_always_draft():
    """Catches random numbers that a suspension, and with it a timing, moves."""
    policy = DraftLengthPolicy(AcceptanceEstimator(NUM_SLOTS), StepCosts(TARGET, DRAFTER, NUM_SLOTS), NUM_SLOTS)
    policy._drafting = False
    for step in range(50):
        assert policy.begin_step(view(0.01 * step, "a", [10 + step], [1], [0]), must_draft=True)
        features = np.full((1, NUM_SLOTS, NUM_FEATURES), -9.0, dtype=np.float32)
        assert policy.choose(features, np.ones(1, dtype=bool), np.ones(1, dtype=bool)).tolist() == [NUM_SLOTS]


def test_costs_follow_whole_steps_and_ignore_hiccups():
    """Catches a level that one disturbed step moves, and one that never leaves the curves."""
    costs = StepCosts(TARGET, DRAFTER, NUM_SLOTS)
    for step in range(60):
        costs.observe(1, 0, False, 0.5 if step in (3, 59) else 0.008)
        costs.observe(1, 5, True, 0.012)
    assert costs.seconds(1, False)[0] == pytest.approx(0.008, rel=0.06)
    assert costs.seconds(1, True)[5] == pytest.approx(0.012, rel=0.06)
    # The machine slows down while only one kind of step runs: the other kind is expected to be slower too.
    for _ in range(60):
        costs.observe(1, 5, True, 0.024)
    assert costs.seconds(1, False)[0] > 0.012


def test_curves_go_on_beyond_their_points():
    """Catches a cost that stops growing at the largest measured batch."""
    seconds = StepCosts({1: 0.004, 8: 0.004, 16: 0.008}, {1: 0.001}, NUM_SLOTS).seconds(4, False)
    assert seconds[28] == pytest.approx(0.004 + 24 * 0.0005)
    assert (np.diff(seconds) >= 0).all()


def test_cost_curve_from_the_config():
    """Catches keys of JSON, which are strings, sorted as strings; and milliseconds taken for seconds."""
    given = {"target": {"8": 5, "16": 6.0, "1": 4}, "drafter": {"1": 3}}
    target, drafter = curves_in_seconds(Options.from_mapping({"cost_curve": given}).cost_curve)
    assert target == {8: 0.005, 16: 0.006, 1: 0.004} and drafter == {1: 0.003}


@pytest.mark.parametrize(
    "cost_curve",
    [5, {"target": {"1": 1}}, {"target": {}, "drafter": {"1": 1}}, {"target": {"0": 1}, "drafter": {"1": 1}},
     {"target": {"1": -1}, "drafter": {"1": 1}}, {"target": {"x": 1}, "drafter": {"1": 1}},
     {"target": [1], "drafter": {"1": 1}}],
)  # fmt: skip
def test_bad_cost_curves_are_refused(cost_curve):
    """Catches a curve that fails in a worker, long after the config was read."""
    with pytest.raises(ValueError, match="cost"):
        Options.from_mapping({"cost_curve": cost_curve})
