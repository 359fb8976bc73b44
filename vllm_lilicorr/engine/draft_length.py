# SPDX-License-Identifier: Apache-2.0
"""When to draft, and how many drafted tokens of each request to verify.

Drafting is worth its time where the tokens that a draft is expected to yield, per
second of a drafting step, exceed those of a plain step. Both sides are estimates: of
acceptance (calibrated, method/calibration.py) and of time (step_costs.py).

While it does not pay, the drafter is suspended. What it would yield now can only be
known by drafting, so it probes; what probes and wrong resumptions cost is counted and
kept to a share of the time.

Nothing here touches what is served, only how fast. For a request at temperature 0 that
is so whatever is verified. A drawn token must be verified or not for reasons that were
there before it was drawn, so requests that sample are cut by a rule of its own: a slot
is verified while its chance, by what is known before its token, is worth a price that
was set before this step. Seeded ones are not cut at all, so that they can be repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_lilicorr.engine.step_costs import StepCosts
from vllm_lilicorr.method.calibration import AcceptanceEstimator, choose_lengths

# Drafting begins above, and ends below, these ratios of tokens per second to a plain step's.
RESUME_AT, SUSPEND_AT = 1.05, 0.97
# Share of the time that drafting without gain may take: less with every failure in a row, a little more
# again for other requests, and in any case less by the square of the gain that is missing.
_LOSS_SHARE, _LEAST_LOSS_SHARE, _NEW_BATCH_LOSS_SHARE = 0.03, 0.0075, 0.01
# Draft steps before a resumption may be judged a failure.
_TRIAL_STEPS = 3
# One draft step's share in the running yield.
_YIELD_SHARE = 0.12
# Acceptance per slot that is assumed before anything was drafted.
_FIRST_GUESS = 0.6
# Plain steps taken while drafting, where none of as many requests was ever timed.
_TIMED_STEPS = 4


@dataclass(frozen=True)
class StepView:
    """One step as the drafter sees it, all arrays by row of the batch.

    Attributes:
        now: seconds, of any monotonic clock.
        request_ids: [R].
        num_computed: [R] int64 tokens that it computed.
        num_rejected: [R] int64 of these that were drafted and rejected.
        is_partial: [R] bool, part of a prompt: no token was sampled.
        find_first_positions: gives the position [R] int64 of the first token that the target computed; called
            in the same step, and only where a draft begins or was verified.
    """

    now: float
    request_ids: list[str]
    num_computed: np.ndarray
    num_rejected: np.ndarray
    is_partial: np.ndarray
    find_first_positions: Callable[[], np.ndarray]


@dataclass(frozen=True)
class _Proposal:
    """What was proposed in a step, for the next one to verify."""

    request_ids: list[str]
    anchor_positions: np.ndarray  # [R] int64, where each request goes on
    lengths: np.ndarray  # [R] int64
    features: np.ndarray  # [R, S, F]
    is_sampled: np.ndarray  # [R] bool


class DraftLengthPolicy:
    """Decides step by step; deterministic in the views that it is given."""

    def __init__(self, estimator: AcceptanceEstimator, costs: StepCosts, num_slots: int) -> None:
        self.estimator, self.costs = estimator, costs
        self._num_slots = num_slots
        self._proposal: _Proposal | None = None
        self._view: StepView | None = None
        self._drafted, self._timed = False, False
        # Smoothed over draft steps: P(slots 0..t accepted), tokens and verified tokens per request.
        self._profile = _FIRST_GUESS ** np.arange(1, num_slots + 1)
        self._tokens, self._verified = 1.0, 0.0
        self._price = 0.0
        self._drafting: bool | None = None
        self._draft_steps, self._plain_steps_left = 0, 0
        self._budget, self._loss, self._failures = 0.0, 0.0, 0
        self._share = _LOSS_SHARE
        self._requests_at_rest: frozenset[str] = frozenset()

    @property
    def is_suspended(self) -> bool:
        return self._drafting is False

    def begin_step(self, view: StepView, can_draft: bool = True, must_draft: bool = False) -> bool:
        """Learns from the step that `view` shows; True where the drafter should now draft."""
        num_verified = self._learn(view)
        self._time(view, num_verified)
        drafts = self._decide(view) if can_draft else False
        drafts = drafts or (must_draft and can_draft)
        self._price = self._token_price(len(view.request_ids))
        self._view, self._drafted, self._timed = view, drafts, True
        if not drafts:
            self._proposal = None
        return drafts

    def exclude_from_timing(self) -> None:
        """Tells that the present step does work that is no part of an ordinary one."""
        self._timed = False

    def choose(
        self,
        features: np.ndarray,  # [R, S, F] of method.calibration.path_features
        is_sampled: np.ndarray,  # [R] bool
        is_seeded: np.ndarray | None = None,  # [R] bool: whose draft is verified whole
    ) -> np.ndarray:
        """How many of each request's drafted tokens to verify, [R] int64 in 0..S."""
        view = self._view
        num_reqs, num_slots, _ = features.shape
        joint = self.estimator.joint(features, is_sampled)
        joint[view.is_partial] = 0.0
        plain_rate = num_reqs / self.costs.first_seconds(num_reqs, False)
        seconds = self.costs.seconds(num_reqs, True)
        lengths, rate = self._cut(joint, seconds, plain_rate, is_sampled, is_seeded)
        anchors = view.find_first_positions() + view.num_computed - view.num_rejected
        self._proposal = _Proposal(list(view.request_ids), anchors, lengths, features, is_sampled)

        num_drafting = num_reqs - int(view.is_partial.sum())
        if num_drafting:
            total = int(lengths.sum())
            profile = joint.sum(axis=0) / num_drafting
            self._profile[:num_slots] += _YIELD_SHARE * (profile - self._profile[:num_slots])
            tokens = rate * seconds[total] / num_reqs
            # The first step of a trial stands for itself.
            share = _YIELD_SHARE if self._draft_steps else 1.0
            self._tokens += share * (tokens - self._tokens)
            self._verified += share * (total / num_reqs - self._verified)
            self._loss += seconds[total] * (1 - rate / plain_rate)
        self._draft_steps += 1
        if self._drafting is False:
            self._judge_probe(view, rate / plain_rate)
        return lengths

    def _cut(
        self,
        joint: np.ndarray,  # [R, S] float64
        seconds: np.ndarray,  # [R * S + 1] float64
        plain_rate: float,
        is_sampled: np.ndarray,  # [R] bool
        is_seeded: np.ndarray | None,  # [R] bool
    ) -> tuple[np.ndarray, float]:
        """Lengths [R] int64 and the expected tokens per second."""
        if not is_sampled.any():
            return choose_lengths(joint, seconds, plain_rate)
        settled = joint > self._price
        if is_seeded is not None:
            settled[is_seeded] = True
        settled[~is_sampled] = False
        num_settled = settled.sum(axis=1)
        tokens = float((joint * settled).sum())
        undecided = np.where(is_sampled[:, None], 0.0, joint)
        lengths, rate = choose_lengths(undecided, seconds[int(num_settled.sum()) :], plain_rate, tokens)
        return lengths + num_settled, rate

    def _token_price(self, num_reqs: int) -> float:
        """Expected tokens that one more verified token must bring to pay for its time."""
        seconds = self.costs.seconds(num_reqs, True)
        last = min(round(num_reqs * self._verified), len(seconds) - 2)
        tokens_per_second = num_reqs * max(self._tokens / seconds[last], 1 / self.costs.first_seconds(num_reqs, False))
        return float(tokens_per_second * (seconds[last + 1] - seconds[last]))

    def _learn(self, view: StepView) -> int:
        """Tells the estimator what became of the last proposal; returns how many tokens were verified."""
        proposal = self._proposal
        if proposal is None:
            return 0
        if proposal.request_ids == view.request_ids:
            mine = theirs = np.arange(len(view.request_ids))
        else:
            row_of = {request_id: row for row, request_id in enumerate(proposal.request_ids)}
            pairs = [(row_of[name], row) for row, name in enumerate(view.request_ids) if name in row_of]
            if not pairs:
                return 0
            mine, theirs = np.array(pairs).T
        # The scheduler may take fewer tokens than were proposed. A request that was preempted, and computes
        # its tokens again, starts elsewhere.
        num_verified = np.minimum(view.num_computed[theirs] - 1, proposal.lengths[mine])
        continues = (proposal.anchor_positions[mine] == view.find_first_positions()[theirs]) & (
            view.num_computed[theirs] <= proposal.lengths[mine] + 1
        )
        num_verified = np.where(continues, num_verified, 0)
        total = int(num_verified.sum())
        if total:
            num_accepted = num_verified - np.where(continues, view.num_rejected[theirs], 0)
            self.estimator.observe(proposal.features[mine], proposal.is_sampled[mine], num_verified, num_accepted)
        return total

    def _time(self, view: StepView, num_verified: int) -> None:
        """Learns the time of a step in which the same requests as before went on by decoding."""
        last = self._view
        if last is None or not self._timed or last.request_ids != view.request_ids:
            return
        num_reqs = len(view.request_ids)
        if int(view.num_computed.sum()) != num_reqs + num_verified or last.is_partial.any():
            return
        self.costs.observe(num_reqs, num_verified, self._drafted, view.now - last.now)

    def _decide(self, view: StepView) -> bool:
        num_reqs = len(view.request_ids)
        if self._drafting is None:
            self._drafting = self._gain(num_reqs) >= 1.0
            self._budget = 2 * self._probe_seconds(num_reqs)
        if self._drafting:
            return self._go_on(view, num_reqs)
        return self._wants_probe(view, num_reqs)

    def _go_on(self, view: StepView, num_reqs: int) -> bool:
        if self._plain_steps_left:
            self._plain_steps_left -= 1
            return False
        resized = self._view is not None and len(self._view.request_ids) != num_reqs
        judged = self._draft_steps >= _TRIAL_STEPS or resized
        if judged and self._gain(num_reqs) < SUSPEND_AT:
            self._suspend(view)
            return False
        if self._draft_steps > 2 * _TIMED_STEPS and not self.costs.observations(num_reqs, False):
            self._plain_steps_left = _TIMED_STEPS - 1
            return False
        return True

    def _suspend(self, view: StepView) -> None:
        self._drafting = False
        self._failures = self._failures + 1 if self._loss > 0 else 0
        num_reqs = len(view.request_ids)
        probe = self._probe_seconds(num_reqs)
        self._budget = min(max(self._budget - self._loss, -8 * probe), probe)
        self._rest(view)

    def _wants_probe(self, view: StepView, num_reqs: int) -> bool:
        plain, probe = self.costs.first_seconds(num_reqs, False), self._probe_seconds(num_reqs)
        if self._is_new_batch(view):
            self._share = max(self._share, self._loss_share(self._gain(num_reqs), _NEW_BATCH_LOSS_SHARE))
        self._budget = min(self._budget + self._share * plain, 2 * probe)
        if self._budget < probe or view.is_partial.all():
            return False
        if (1 + self._num_slots) * plain < RESUME_AT * self.costs.seconds(num_reqs, True)[-1]:
            return False  # not even if all were accepted
        self._draft_steps, self._loss = 0, 0.0
        return True

    def _loss_share(self, gain: float, least: float) -> float:
        return min(gain, 1.0) ** 2 * max(_LOSS_SHARE / (1 + self._failures), least)

    def _judge_probe(self, view: StepView, gain: float) -> None:
        if gain >= RESUME_AT:
            self._drafting = True
            return
        self._failures += 1
        self._budget -= max(self._loss, 0.0)
        self._rest(view)

    def _rest(self, view: StepView) -> None:
        self._requests_at_rest = frozenset(view.request_ids)
        self._share = self._loss_share(self._gain(len(view.request_ids)), _LEAST_LOSS_SHARE)

    def _is_new_batch(self, view: StepView) -> bool:
        """Whether the batch is another one than when drafting ended: twice or half as large, or half new."""
        num_reqs = len(view.request_ids)
        if not 0.5 < num_reqs / max(len(self._requests_at_rest), 1) < 2:
            return True
        return 2 * len(self._requests_at_rest.intersection(view.request_ids)) <= num_reqs

    def _probe_seconds(self, num_reqs: int) -> float:
        return self.costs.first_seconds(num_reqs, True) - self.costs.first_seconds(num_reqs, False)

    def _gain(self, num_reqs: int) -> float:
        """Tokens per second of drafting over those of plain steps, for the text of the last draft steps."""
        seconds = self.costs.seconds(num_reqs, True)
        plain_seconds = self.costs.first_seconds(num_reqs, False)
        as_lately = self._tokens / seconds[min(round(num_reqs * self._verified), len(seconds) - 1)] * plain_seconds
        _, rate = choose_lengths(np.tile(self._profile, (num_reqs, 1)), seconds)
        return float(max(as_lately, rate * plain_seconds / num_reqs))
