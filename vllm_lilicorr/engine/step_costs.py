# SPDX-License-Identifier: Apache-2.0
"""What a step costs: measured curves of the modules, corrected by whole steps as they are served.

Scheduler, sampler and output handling are a large part of a step, and no timing of a
module knows them. So the curves give the shape (how time grows with tokens), and
observed steps give the level: one factor per number of requests, with and without
drafting, and one for the machine's present speed, which moves both alike.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# One step's share in a factor, once that has settled.
_LEVEL_SHARE, _SPEED_SHARE = 0.03, 0.1
_SETTLED = 8
# A step that took much longer was disturbed; it moves a factor by no more than this (log).
_LARGEST_SURPRISE = 0.25


class StepCosts:
    """Predicted seconds of a step by its requests, verified tokens, and whether it drafted."""

    def __init__(self, target: Mapping[int, float], drafter: Mapping[int, float], num_slots: int) -> None:
        """Args:
            target: seconds of the target's forward pass by its number of tokens.
            drafter: seconds of one draft by its number of requests.
            num_slots: drafted tokens per request.

        Raises:
            ValueError: a curve is empty, or has a count below 1 or a time of 0 or less.
        """
        self._target, self._drafter = _Curve("target", target), _Curve("drafter", drafter)
        self._num_slots = num_slots
        self._levels: dict[tuple[int, bool], _Level] = {}
        self._log_speed = 0.0
        self._bases: dict[tuple[int, bool], np.ndarray] = {}

    def seconds(self, num_reqs: int, drafting: bool) -> np.ndarray:
        """Seconds [num_reqs * num_slots + 1] float64 of a step by its number of verified tokens."""
        return self._base(num_reqs, drafting) * math.exp(self._log_speed + self._log_level(num_reqs, drafting))

    def first_seconds(self, num_reqs: int, drafting: bool) -> float:
        """Seconds of a step that verifies nothing."""
        base = self._base(num_reqs, drafting)[0]
        return float(base) * math.exp(self._log_speed + self._log_level(num_reqs, drafting))

    def observations(self, num_reqs: int, drafting: bool) -> int:
        """How many such steps were observed."""
        level = self._levels.get((_bucket(num_reqs), drafting))
        return level.count if level else 0

    def observe(self, num_reqs: int, num_verified: int, drafting: bool, seconds: float) -> None:
        """Learns from a whole step that did nothing else."""
        key = (_bucket(num_reqs), drafting)
        expected = self._base(num_reqs, drafting)[num_verified]
        log_ratio = math.log(max(seconds, 1e-9) / expected) - self._log_speed
        level = self._levels.setdefault(key, _Level())
        level.count += 1
        if level.count <= _SETTLED:
            level.first.append(log_ratio)
            level.log = float(np.median(level.first))
            return
        surprise = min(max(log_ratio - level.log, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._log_speed += _SPEED_SHARE * surprise
        level.log += _LEVEL_SHARE * surprise

    def _base(self, num_reqs: int, drafting: bool) -> np.ndarray:
        base = self._bases.get((num_reqs, drafting))
        if base is None:
            tokens = num_reqs + np.arange(num_reqs * self._num_slots + 1)
            base = self._target(tokens)
            if drafting:
                base = base + self._drafter(num_reqs)
            self._bases[num_reqs, drafting] = base
        return base

    def _log_level(self, num_reqs: int, drafting: bool) -> float:
        """The factor observed for this many requests; unseen, the nearest one's, of the same mode first."""
        bucket = _bucket(num_reqs)
        level = self._levels.get((bucket, drafting))
        if level is None:
            key = min(
                self._levels, key=lambda seen: (seen[1] != drafting, abs(seen[0] - bucket), seen[0]), default=None
            )
            if key is None:
                return 0.0
            level = self._levels[key]
        return level.log


class _Level:
    """A factor (log) and how it was found: the median of the first steps, then a running mean."""

    def __init__(self) -> None:
        self.log, self.count = 0.0, 0
        self.first: list[float] = []


class _Curve:
    """Seconds by a count: straight between the points, on along the last two beyond them."""

    def __init__(self, name: str, points: Mapping[int, float]) -> None:
        counts = sorted(points)
        if not counts or counts[0] < 1 or min(points.values()) <= 0:
            raise ValueError(_curve_error(name, points))
        self._counts = np.array(counts, dtype=np.float64)
        # More work never takes less time: what says so is noise.
        self._seconds = np.maximum.accumulate([float(points[count]) for count in counts])

    def __call__(self, count: np.ndarray | int) -> np.ndarray:
        result = np.interp(count, self._counts, self._seconds)
        if len(self._counts) > 1:
            slope = (self._seconds[-1] - self._seconds[-2]) / (self._counts[-1] - self._counts[-2])
        else:
            slope = 0.0
        return result + slope * np.maximum(np.asarray(count) - self._counts[-1], 0)


def _bucket(num_reqs: int) -> int:
    """Numbers of requests that share a factor: each its own up to 5, then steps of a fifth."""
    return round(4 * math.log2(num_reqs))


def curves_in_seconds(cost_curve: Any) -> tuple[dict[int, float], dict[int, float]]:
    """The target's and the drafter's curve in seconds, of a user's cost_curve in milliseconds.

    Raises:
        ValueError: it is no mapping of "target" and "drafter" to such curves.
    """
    names = ("target", "drafter")
    if not isinstance(cost_curve, Mapping) or set(cost_curve) != set(names):
        raise ValueError(
            f"cost_curve={cost_curve!r}, but it has two curves, of milliseconds by tokens and by requests; write "
            '{"target": {"1": 5.0, "64": 10.0}, "drafter": {"1": 3.0, "32": 30.0}}, or leave it out.'
        )
    curves = []
    for name in names:
        points = cost_curve[name]
        try:
            curve = {int(count): float(milliseconds) / 1e3 for count, milliseconds in points.items()}
        except (AttributeError, TypeError, ValueError):
            raise ValueError(_curve_error(name, points)) from None
        _Curve(name, curve)
        curves.append(curve)
    return curves[0], curves[1]


def _curve_error(name: str, points: Any) -> str:
    return (
        f"The {name} cost curve is {points!r}, but it maps counts of 1 or more to times above 0; give at least one "
        "such point, or leave the curve out to have it measured."
    )
