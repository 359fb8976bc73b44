# SPDX-License-Identifier: Apache-2.0
"""Calibrated acceptance of a path, and the lengths that follow from it."""

import itertools
import time

import numpy as np
import pytest
import torch

from vllm_lilicorr.method.calibration import (
    NUM_FEATURES,
    AcceptanceEstimator,
    AcceptanceModel,
    Reliability,
    choose_lengths,
    path_features,
)
from vllm_lilicorr.method.lattice import Lattice

NUM_SLOTS = 5


def random_lattice(num_reqs: int, top_k: int, seed: int = 0) -> tuple[Lattice, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_reqs, NUM_SLOTS, top_k)
    log_probs = torch.randn(*shape, generator=generator).log_softmax(-1).sort(-1, descending=True).values - 0.3
    lattice = Lattice(torch.arange(top_k).expand(shape), log_probs, 3 * torch.randn(*shape, top_k, generator=generator))
    return lattice, torch.randint(0, top_k, shape[:2], generator=generator)


def test_features_against_a_loop():
    """Catches a row of another predecessor, or the chosen rank taken for the best one."""
    lattice, path = random_lattice(3, 4)
    largest = torch.rand(3, NUM_SLOTS) + 0.1
    found = path_features(lattice, path, largest)
    for request, slot in itertools.product(range(3), range(NUM_SLOTS)):
        previous = int(path[request, slot - 1]) if slot else 0
        probs = lattice.edge_logits[request, slot, previous].softmax(0)
        chosen, best = probs[path[request, slot]], probs.max()
        expected = [
            torch.logit(chosen),
            torch.logit(best),
            lattice.log_probs[request, slot, path[request, slot]],
            lattice.log_probs[request, slot, 0],
            largest[request, slot].log(),
        ]
        assert found[request, slot] == pytest.approx([float(x) for x in expected], abs=1e-4)


def test_features_of_a_draw_do_not_show_it():
    """Catches lengths that depend on the drawn token: output would no longer follow the target's distribution."""
    lattice, path = random_lattice(1, 4)
    largest, is_sampled = torch.rand(1, NUM_SLOTS), torch.tensor([True])
    found = path_features(lattice, path, largest, is_sampled)
    for slot, rank in itertools.product(range(NUM_SLOTS), range(5)):
        other = path.clone()
        other[0, slot] = rank
        features = path_features(lattice, other, largest, is_sampled)
        assert np.array_equal(features[0, : slot + 1], found[0, : slot + 1])
        if slot + 1 < NUM_SLOTS and rank != path[0, slot]:
            assert not np.array_equal(features[0, slot + 1], found[0, slot + 1])
    mixed = path_features(*random_lattice(2, 4), None, torch.tensor([False, True]))
    greedy = path_features(*random_lattice(2, 4), None)
    assert np.array_equal(mixed[0], greedy[0]) and not np.array_equal(mixed[1], greedy[1])


@pytest.mark.parametrize("top_k", [1, 2])
def test_features_of_degenerate_lattices_are_finite(top_k):
    """Catches NaN from a certain row, from -inf logits, from one candidate, or from a token of rank K:
    one of them would poison the weights for good."""
    lattice, path = random_lattice(2, top_k)
    lattice.edge_logits[0, :, :, 1:] = -torch.inf
    lattice.log_probs[0, 1] = -torch.inf
    lattice.edge_logits[0, 2] = torch.nan
    path[1] = top_k
    features = path_features(lattice, path, torch.zeros(2, NUM_SLOTS), torch.tensor([False, True]))
    assert np.isfinite(features).all()
    model = AcceptanceModel(NUM_SLOTS)
    model.observe(features, np.array([5, 5]), np.array([5, 0]))
    assert np.isfinite(model.predict(features)).all()


def features_of(values: np.ndarray) -> np.ndarray:
    features = np.zeros((*values.shape, NUM_FEATURES), dtype=np.float32)
    features[:, :, 0] = values
    return features


def test_only_slots_that_were_verified_and_reached_count():
    """Catches a slot behind a rejection, or behind the verified ones, that is counted as rejected."""
    model = AcceptanceModel(NUM_SLOTS)
    model.observe(features_of(np.zeros((4, NUM_SLOTS))), np.array([5, 3, 2, 0]), np.array([5, 1, 2, 0]))
    # 5 accepted; 1 accepted and 1 rejected; 2 accepted; nothing.
    assert model.reliability.count.sum() == 9
    assert model.reliability.accepted.sum() == 8


def simulate(model: AcceptanceModel, draws: np.random.Generator, steps: int, overconfidence: float) -> None:
    for _ in range(steps):
        logits = draws.normal(1.0, 2.0, (1, NUM_SLOTS))
        truth = 1 / (1 + np.exp(-(logits - overconfidence)))
        accepted = int(np.cumprod(draws.random((1, NUM_SLOTS)) < truth).sum())
        verified = int(draws.integers(1, NUM_SLOTS + 1))
        model.observe(features_of(logits), np.array([verified]), np.array([min(accepted, verified)]))


def test_learns_overconfidence_and_follows_a_change():
    """Catches a model that keeps its prior, learns from slots never reached, or stops learning."""
    draws = np.random.default_rng(0)
    model = AcceptanceModel(NUM_SLOTS)
    for overconfidence in (2.0, -0.5):
        simulate(model, draws, 4000, overconfidence)
        model.reliability = Reliability()
        simulate(model, draws, 1500, overconfidence)
        found = model.reliability
        assert found.expected_calibration_error < 0.05
        assert found.log_loss < 0.95 * found.base_log_loss


def test_joint_falls_along_a_path_and_keeps_kinds_apart():
    """Catches rows of a mixed batch that swap models."""
    estimator = AcceptanceEstimator(NUM_SLOTS)
    draws = np.random.default_rng(1)
    simulate(estimator.greedy, draws, 500, -3.0)
    simulate(estimator.sampled, draws, 500, 3.0)
    features = features_of(np.full((3, NUM_SLOTS), 1.0))
    joint = estimator.joint(features, np.array([False, True, False]))
    assert (np.diff(joint, axis=1) <= 0).all()
    assert joint[0] == pytest.approx(joint[2]) and joint[0, 0] > joint[1, 0] + 0.4
    assert joint[1] == pytest.approx(np.cumprod(estimator.sampled.predict(features[1:2])))
    estimator.observe(features, np.array([False, True, False]), np.array([1, 2, 3]), np.array([1, 0, 3]))
    assert estimator.sampled.reliability.count.sum() > 0


def test_lengths_equal_brute_force():
    """Catches a greedy choice that stops at the first token that does not pay, where cost has steps."""
    draws = np.random.default_rng(2)
    for _ in range(300):
        num_reqs, num_slots = draws.integers(1, 4), draws.integers(1, 4)
        joint = np.cumprod(draws.random((num_reqs, num_slots)), axis=1)
        seconds = 1.0 + np.cumsum(draws.random(num_reqs * num_slots + 1) * draws.choice([0.0, 0.3, 2.0]))
        best = max(
            (num_reqs + sum(joint[row, :length].sum() for row, length in enumerate(lengths))) / seconds[sum(lengths)]
            for lengths in itertools.product(range(num_slots + 1), repeat=num_reqs)
        )
        lengths, rate = choose_lengths(joint, seconds)
        assert rate == pytest.approx(best)
        tokens = num_reqs + sum(joint[row, :length].sum() for row, length in enumerate(lengths))
        assert tokens / seconds[lengths.sum()] == pytest.approx(best)


def test_lengths_of_a_draft_that_cannot_pay():
    """Catches tokens that are verified to dilute a loss: each must pay for its own time."""
    joint = np.array([[0.6, 0.35], [0.3, 0.01]])
    assert choose_lengths(joint, np.arange(10.0, 15.0))[0].tolist() == [2, 1]
    seconds = np.array([10.0, 11.0, 12.0, 13.0, 14.0])
    lengths, _ = choose_lengths(joint, seconds, other_rate=0.4)
    assert lengths.tolist() == [1, 0]


def test_equal_probabilities_take_prefixes():
    """Catches an unstable sort: a later slot verified without the one before it."""
    joint = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    lengths, _ = choose_lengths(joint, np.linspace(1.0, 1.01, 7))
    assert lengths.tolist() == [2, 2]


def test_a_step_costs_little():
    """Catches a Python loop over slots: 2 ms would be a tenth of a step (0.2 ms here on a quiet core)."""
    estimator = AcceptanceEstimator(7)
    features = np.zeros((32, 7, NUM_FEATURES), dtype=np.float32)
    greedy, verified = np.zeros(32, dtype=bool), np.full(32, 7)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        choose_lengths(estimator.joint(features, greedy), np.linspace(1.0, 3.0, 225))
        estimator.observe(features, greedy, verified, verified // 2)
        times.append(time.perf_counter() - began)
    assert min(times) < 2e-3
