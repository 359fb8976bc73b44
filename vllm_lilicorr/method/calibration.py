# SPDX-License-Identifier: Apache-2.0
"""How far a drafted path will be accepted: its own probabilities, calibrated while serving.

The head's row probabilities are overconfident, because the right token may lie outside
the lattice. A logistic regression maps what is known of each slot to the probability
that it is accepted once all slots before it were; it learns from every verified slot.
Greedy and sampled requests have a model each: a sampled token is accepted with
probability min(1, p / q), which is another question.

Everything here is numpy on a handful of values: a step of 32 requests costs about 0.1 ms.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_lilicorr.method.lattice import Lattice
from vllm_lilicorr.method.walks import rows_along

NUM_BINS = 10
# Log-odds and log-probabilities beyond these say nothing more, and would dominate an update.
_LOWEST, _HIGHEST = -10.0, 8.0
NUM_FEATURES = 5
# Weights of 1 and the features before anything was seen: near those of the embedded pair, with which a row
# that says 0.65 means 0.4, and one that says 0.99 means 0.95.
_GREEDY_PRIOR = (0.4, 0.6, -0.1, 0.4, 0.3, 0.0)
_SAMPLED_PRIOR = (-0.2, 0.0, 0.1, 0.2, 0.2, -0.1)
# Curvature behind these weights, and behind each slot's offset of 0.
_PRIOR_STRENGTH, _SLOT_STRENGTH = 2.0, 4.0
# What an observation weighs after this many later draft steps: 1 / e.
_MEMORY_STEPS = 2000.0


def path_features(
    lattice: Lattice,
    path: torch.Tensor,  # [R, S] int64 ranks, K for a token from outside the candidates
    largest: torch.Tensor | None,  # [R, S] fp32: the largest probability of each slot's proposal; None where none drew
    is_sampled: torch.Tensor | None = None,  # [R] bool: whose path was drawn; None for nobody's
) -> np.ndarray:
    """What is known of each slot of a path, [R, S, NUM_FEATURES] float32.

    Log-odds of the chosen rank in the softmax of the edge row that the path reached, and of that row's
    best rank; the drafter's log-probability of the chosen candidate, and of the slot's best; the
    largest log-probability of the proposal.

    Of a drawn path the row's best rank stands for the chosen one: whether a slot is verified may depend
    on the tokens before it, never on its own. (A rule that verified likely draws and left out the others
    would serve likely tokens too often.)
    """
    top_k = lattice.edge_logits.shape[-1]
    ranks = path.clamp_max(top_k - 1)
    rows = rows_along(lattice.edge_logits, ranks)
    best = rows.argmax(dim=2, keepdim=True)
    chosen = ranks[:, :, None]
    if is_sampled is not None:
        chosen = torch.where(is_sampled[:, None, None], best, chosen)
    row_log_probs = rows.log_softmax(dim=2).gather(2, torch.cat((chosen, best), dim=2))
    odds = row_log_probs - (-row_log_probs.exp()).log1p()
    if is_sampled is not None:
        after_elsewhere = torch.nn.functional.pad(path[:, :-1] == top_k, (1, 0))
        odds = odds.masked_fill(after_elsewhere[:, :, None], _LOWEST)
    spread = torch.zeros_like(odds[:, :, :1]) if largest is None else largest[:, :, None].log()
    log_probs = lattice.log_probs
    features = torch.cat((odds, log_probs.gather(2, chosen), log_probs[:, :, :1], spread), dim=2).cpu().numpy()
    features = np.nan_to_num(features, nan=_LOWEST, posinf=_HIGHEST, neginf=_LOWEST)
    return np.clip(features, _LOWEST, _HIGHEST, out=features)


@dataclass
class Reliability:
    """Predicted against accepted, in ten bins of the prediction, and log-losses in nats.

    Attributes:
        count: [10] slots that were verified and reached.
        predicted: [10] sum of their predictions.
        accepted: [10] how many were accepted.
        log_loss: sum over all of them.
        base_log_loss: the same for each slot's acceptance rate so far, which a drafter without
            probabilities could use.
    """

    count: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))
    predicted: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))
    log_loss: float = 0.0
    base_log_loss: float = 0.0

    @property
    def expected_calibration_error(self) -> float:
        """Mean over all slots of the difference between a bin's predicted and accepted rate."""
        return float(np.abs(self.predicted - self.accepted).sum() / max(self.count.sum(), 1))

    def add(
        self,
        predicted: np.ndarray,  # [N] float64
        base: np.ndarray,  # [N] float64
        accepted: np.ndarray,  # [N] float64, 0 or 1
    ) -> None:
        bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        self.count += np.bincount(bins, minlength=NUM_BINS)
        self.predicted += np.bincount(bins, predicted, NUM_BINS)
        self.accepted += np.bincount(bins, accepted, NUM_BINS)
        rejected = 1 - accepted
        self.log_loss -= float(np.log(np.abs(rejected - predicted)).sum())
        self.base_log_loss -= float(np.log(np.abs(rejected - base)).sum())


class AcceptanceModel:
    """Online logistic regression of one kind of requests.

    One damped Newton step per draft step on that step's slots, from a curvature that
    fades: nearly the maximum-likelihood fit of the last few thousand draft steps.
    """

    def __init__(self, num_slots: int, prior: tuple[float, ...] = _GREEDY_PRIOR) -> None:
        """Args: the number of slots; weights of 1 and the features before anything was seen."""
        num_shared = 1 + NUM_FEATURES
        self._prior = np.zeros(num_shared + num_slots)
        self._prior[:num_shared] = prior
        strength = np.full(num_shared + num_slots, _SLOT_STRENGTH)
        strength[:num_shared] = _PRIOR_STRENGTH
        self._prior_curvature = np.diag(strength)
        self._weights = self._prior.copy()
        self._curvature = self._prior_curvature.copy()
        self._design = np.concatenate((np.zeros((num_slots, num_shared)), np.eye(num_slots)), axis=1)
        self._design[:, 0] = 1.0
        self._slot_count, self._slot_accepted = np.full(num_slots, 2.0), np.full(num_slots, 1.0)
        self.reliability = Reliability()

    def predict(
        self,
        features: np.ndarray,  # [R, S, NUM_FEATURES] of path_features
    ) -> np.ndarray:
        """Probability [R, S] float64 of each slot to be accepted once the slots before it were."""
        return _sigmoid(self._rows(features) @ self._weights)

    def observe(
        self,
        features: np.ndarray,  # [R, S, NUM_FEATURES] as they were drafted
        num_verified: np.ndarray,  # [R] int64 in 0..S: how many drafted tokens the target saw
        num_accepted: np.ndarray,  # [R] int64, at most num_verified
    ) -> None:
        """Learns from one verification: slots up to the first rejected one were reached."""
        num_slots = features.shape[1]
        slot = np.arange(num_slots)
        reached = slot < np.minimum(num_verified, num_accepted + 1)[:, None]
        if not reached.any():
            return
        accepted = (slot < num_accepted[:, None])[reached].astype(np.float64)
        slots = np.broadcast_to(slot, reached.shape)[reached]
        rows = self._rows(features)[reached]
        predicted = np.clip(_sigmoid(rows @ self._weights), 1e-6, 1 - 1e-6)
        self.reliability.add(predicted, self._slot_accepted[slots] / self._slot_count[slots], accepted)
        self._slot_count += np.bincount(slots, minlength=len(self._slot_count))
        self._slot_accepted += np.bincount(slots, accepted, len(self._slot_count))

        fade = 1.0 / _MEMORY_STEPS
        self._curvature += fade * (self._prior_curvature - self._curvature)
        self._curvature += (rows * (predicted * (1 - predicted))[:, None]).T @ rows
        gradient = rows.T @ (accepted - predicted) - fade * self._prior_curvature @ (self._weights - self._prior)
        self._weights += np.linalg.solve(self._curvature, gradient)

    def _rows(self, features: np.ndarray) -> np.ndarray:
        """Design matrix [R, S, 1 + NUM_FEATURES + slots] float64."""
        num_reqs, num_slots, _ = features.shape
        rows = np.repeat(self._design[None, :num_slots], num_reqs, axis=0)
        rows[:, :, 1 : 1 + NUM_FEATURES] = features
        return rows


class AcceptanceEstimator:
    """A model for greedy requests and one for sampled requests."""

    def __init__(self, num_slots: int) -> None:
        self.greedy = AcceptanceModel(num_slots)
        self.sampled = AcceptanceModel(num_slots, _SAMPLED_PRIOR)

    def joint(
        self,
        features: np.ndarray,  # [R, S, NUM_FEATURES]
        is_sampled: np.ndarray,  # [R] bool
    ) -> np.ndarray:
        """Probability [R, S] float64 that slots 0..t are all accepted; it falls along every row."""
        if not is_sampled.any():
            probs = self.greedy.predict(features)
        elif is_sampled.all():
            probs = self.sampled.predict(features)
        else:
            probs = np.where(is_sampled[:, None], self.sampled.predict(features), self.greedy.predict(features))
        return np.cumprod(probs, axis=1)

    def observe(
        self,
        features: np.ndarray,  # [R, S, NUM_FEATURES]
        is_sampled: np.ndarray,  # [R] bool
        num_verified: np.ndarray,  # [R] int64
        num_accepted: np.ndarray,  # [R] int64
    ) -> None:
        for model, rows in ((self.greedy, ~is_sampled), (self.sampled, is_sampled)):
            if rows.all():
                model.observe(features, num_verified, num_accepted)
            elif rows.any():
                model.observe(features[rows], num_verified[rows], num_accepted[rows])


def choose_lengths(
    joint: np.ndarray,  # [R, S] float64, falling along every row
    seconds: np.ndarray,  # [>= R * S + 1] float64: a step's time by the number of verified tokens
    other_rate: float = 0.0,
    settled_tokens: float = 0.0,
) -> tuple[np.ndarray, float]:
    """How many tokens of each request to verify for the most tokens per second.

    Args:
        other_rate: tokens per second that the time would yield otherwise. Where no choice reaches
            it, the draft is a loss already made, and each token must pay for its own time at this rate.
        settled_tokens: drafted tokens of the step that are expected to be accepted besides; `seconds` has
            the time to verify them.

    Returns:
        lengths [R] int64, and the expected tokens per second: each request yields one
        token and its accepted ones.

    For every total the best choice is the most probable tokens, and since probabilities
    fall along a request, these are prefixes: sort once, try every total. Ties go to
    the fewest tokens.
    """
    num_reqs, num_slots = joint.shape
    order = np.argsort(-joint, axis=None, kind="stable")
    tokens = np.empty(order.size + 1)
    tokens[0] = 0
    np.cumsum(joint.ravel()[order], out=tokens[1:])
    tokens += num_reqs + settled_tokens
    tokens = tokens[: len(seconds)]
    seconds = seconds[: order.size + 1]
    rates = tokens / seconds
    total = int(rates.argmax())
    if rates[total] < other_rate:
        total = int((tokens - other_rate * seconds).argmax())
    return np.bincount(order[:total] // num_slots, minlength=num_reqs), float(rates[total])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -30.0, 30.0)))
