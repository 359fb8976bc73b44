# SPDX-License-Identifier: Apache-2.0
"""Is a drafter broken, or is the text hard? Counts, and what they say.

A drafter that is loaded wrongly still drafts, and the target's output stays right: only
acceptance falls. Acceptance alone cannot tell such a drafter from hard text. What can:

- exact checks: the anchor that a draft was made from is the last committed token's;
- paired comparisons: the same positions, scored with one thing otherwise
  (engine/examination.py), so that the text cancels out;
- the drafter's own certainty: on hard text a sound drafter is unsure of itself.

`diagnose` turns these into causes, the likeliest first, or into silence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Below this share of accepted first drafts it is asked why. Sound drafters may well be below it.
POOR = 0.65
# Powers of two by which the edge logits are rescaled to see which scale would have told best.
SCALES = 2.0 ** np.arange(-4, 5)
_AS_TRAINED = 4  # SCALES[_AS_TRAINED] == 1

# Nats per token by which an alternative must be better, and in standard errors of its mean.
LEAST_GAIN, LEAST_CERTAINTY = 0.4, 4.0
# Nats per first token by which another scale of the edge logits must be better. Larger text-dependent
# differences towards smaller scales are seen from sound drafters (up to 1.0).
LARGER_SCALE_GAIN, SMALLER_SCALE_GAIN = 0.15, 2.5
# Right first tokens among the candidates, as a share of those that the drafter expected there: at
# temperature 0 and above. Sound drafters find 1.0 and more, and 0.5 and more.
LEAST_SHARES_OF_EXPECTED = (0.55, 0.3)
# Nats per token that the request's own context must be better than another request's.
LEAST_CONTEXT_GAIN = 0.15
# Drafts that are needed before anything is said.
LEAST_DRAFTS = 96
# Drafts with the very candidates of the one before, as a share of all: sound drafters stay below a half.
REPEATED_SHARE = 0.9
# Checked anchors that must be wrong.
LEAST_WRONG_ANCHORS, WRONG_ANCHOR_SHARE = 8, 0.25


class DraftCounts:
    """What became of drafts, summed."""

    def __init__(self, num_slots: int, top_k: int) -> None:
        self.drafts = 0
        self.verified = np.zeros(num_slots, dtype=np.int64)
        self.accepted = np.zeros(num_slots, dtype=np.int64)
        self.first_rank = np.zeros(top_k + 1, dtype=np.int64)  # of the right token in slot 1; top_k: not a candidate
        # Of requests at temperature 0, and of those that sample: drafts, right first tokens among the candidates,
        # and how many the drafter expected there.
        self.lattices = np.zeros(2, dtype=np.int64)
        self.found, self.expected = np.zeros(2, dtype=np.int64), np.zeros(2)
        self.scale_losses, self.squared_gains = np.zeros(len(SCALES)), np.zeros(len(SCALES))
        self.num_scaled = 0
        self.repeated = 0  # drafts whose first slot has the very candidates of the draft before
        self._last_candidates: np.ndarray | None = None  # [K]
        self.anchors, self.wrong_anchors = 0, 0
        self.anchor_tokens, self.wrong_anchor_tokens = 0, 0

    def observe(
        self,
        candidate_ids: np.ndarray,  # [R, S, K] int64
        log_probs: np.ndarray,  # [R, S, K] fp32
        start_logits: np.ndarray,  # [R, K] fp32, of the first slot
        draft_token_ids: np.ndarray,  # [R, S] int64
        num_verified: np.ndarray,  # [R] int64 in 0..S
        num_accepted: np.ndarray,  # [R] int64, at most num_verified
        next_token_ids: np.ndarray,  # [R] int64: what the target committed after the accepted ones
        is_greedy: np.ndarray,  # [R] bool
    ) -> None:
        """Adds one step's drafts, of requests whose next tokens are known."""
        num_reqs, num_slots, top_k = candidate_ids.shape
        self.drafts += num_reqs
        slots = np.arange(num_slots)
        self.verified += (slots < num_verified[:, None]).sum(0)
        self.accepted += (slots < num_accepted[:, None]).sum(0)
        first = candidate_ids[:, 0]
        before = first[:1] - 1 if self._last_candidates is None else self._last_candidates[None]
        self.repeated += int((first == np.concatenate((before, first[:-1]))).all(1).sum())
        self._last_candidates = first[-1].copy()
        right = np.where(num_accepted > 0, draft_token_ids[:, 0], next_token_ids)
        matches = first == right[:, None]
        rank = np.where(matches.any(1), matches.argmax(1), top_k)
        self.first_rank += np.bincount(rank, minlength=top_k + 1)
        known = rank < top_k
        expected = np.exp(log_probs[:, 0].astype(np.float64)).sum(1)
        for kind, rows in enumerate((is_greedy, ~is_greedy)):
            self.lattices[kind] += int(rows.sum())
            self.found[kind] += int(known[rows].sum())
            self.expected[kind] += float(expected[rows].sum())
        if known.any():
            scaled = start_logits[known].astype(np.float64)
            scaled -= scaled.max(1, keepdims=True)
            losses = np.log(np.exp(scaled[:, None] * SCALES[:, None]).sum(2))
            losses -= SCALES * np.take_along_axis(scaled, rank[known, None], axis=1)
            self.scale_losses += losses.sum(0)
            self.squared_gains += np.square(losses[:, _AS_TRAINED, None] - losses).sum(0)
            self.num_scaled += int(known.sum())

    @property
    def first_acceptance(self) -> float:
        """Share of verified first slots that were accepted; 1 where none was verified."""
        return float(self.accepted[0] / self.verified[0]) if self.verified[0] else 1.0

    @property
    def in_lattice(self) -> float:
        """Share of first slots whose right token was a candidate."""
        return 1.0 - float(self.first_rank[-1] / max(self.drafts, 1))

    @property
    def is_poor(self) -> bool:
        """Whether it should be asked why so little is accepted."""
        return self.drafts >= LEAST_DRAFTS and self.first_acceptance < POOR


@dataclass(frozen=True)
class Comparison:
    """How much better following tokens would have been foretold, in nats per token: mean and its error."""

    gain: float
    error: float

    @classmethod
    def of(cls, alternative: np.ndarray, as_served: np.ndarray) -> "Comparison":
        """From log-probabilities [N] at the same positions."""
        gains = np.asarray(alternative, dtype=np.float64) - np.asarray(as_served, dtype=np.float64)
        error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        return cls(float(gains.mean()), float(error))

    def exceeds(self, gain: float) -> bool:
        return self.gain > gain and self.gain > LEAST_CERTAINTY * self.error


@dataclass(frozen=True)
class Examination:
    """Paired comparisons, by what was otherwise.

    Attributes:
        alternatives: (kind, description) to what it gains; kinds are "rope", "mask", "scales", "layers".
        foreign_context: what another request's context gains; None where it was not asked.
        num_positions: positions that were compared.
    """

    alternatives: Mapping[tuple[str, str], Comparison] = field(default_factory=dict)
    foreign_context: Comparison | None = None
    num_positions: int = 0


@dataclass(frozen=True)
class Cause:
    """Something that may be wrong.

    Attributes:
        key: "anchors", "dead", "rope", "mask", "scales", "layers", "logit_scale" or "pair".
        text: a sentence for the log, with its numbers.
    """

    key: str
    text: str


_REMEDIES = {
    "rope": "wrong RoPE layout (is_neox_style in the drafter's config.json)",
    "mask": "wrong mask token (mask_token_id in the drafter's config.json)",
    "scales": "wrongly scaled weights (weight_scale_2 of projections that are stacked: q/k/v, gate/up)",
    "layers": "shifted target layers (target_layer_ids in the drafter's config.json)",
}


def diagnose(counts: DraftCounts, examination: Examination | None = None) -> list[Cause]:
    """Likely causes, the likeliest first; empty where nothing looks broken."""
    causes = _wrong_anchors(counts) + _dead(counts)
    if examination is not None:
        causes += _better_alternatives(examination)
    if counts.drafts >= LEAST_DRAFTS:
        causes += _wrong_scale(counts)
        if not causes and counts.is_poor:
            causes += _no_use(counts, examination)
    return causes


def _wrong_anchors(counts: DraftCounts) -> list[Cause]:
    found = []
    for wrong, checked, what in (
        (counts.wrong_anchor_tokens, counts.anchor_tokens, "token"),
        (counts.wrong_anchors, counts.anchors, "features"),
    ):
        if wrong >= LEAST_WRONG_ANCHORS and wrong > WRONG_ANCHOR_SHARE * checked:
            text = f"stale anchors: {wrong} of {checked} drafts began at the {what} of another step or request"
            found.append(Cause("anchors", text))
    return found[:1]


def _dead(counts: DraftCounts) -> list[Cause]:
    if not counts.is_poor or counts.repeated < REPEATED_SHARE * counts.drafts:
        return []
    text = (
        f"weights that are missing or zero: {counts.repeated} of {counts.drafts} drafts had the same "
        "candidates as the one before, whatever the text"
    )
    return [Cause("dead", text)]


def _better_alternatives(examination: Examination) -> list[Cause]:
    best: dict[str, tuple[float, str]] = {}
    for (kind, description), comparison in examination.alternatives.items():
        if comparison.exceeds(LEAST_GAIN) and comparison.gain > best.get(kind, (0.0, ""))[0]:
            best[kind] = (comparison.gain, description)
    causes = []
    for kind, (gain, description) in sorted(best.items(), key=lambda item: -item[1][0]):
        text = (
            f"{_REMEDIES[kind]}: with {description}, the {examination.num_positions} examined positions are "
            f"foretold better by {gain:.2f} nats per token"
        )
        causes.append(Cause(kind, text))
    return causes


def _wrong_scale(counts: DraftCounts) -> list[Cause]:
    if counts.num_scaled < LEAST_DRAFTS // 2:
        return []
    losses = counts.scale_losses / counts.num_scaled
    best = int(losses.argmin())
    gain = losses[_AS_TRAINED] - losses[best]
    variance = max(counts.squared_gains[best] / counts.num_scaled - gain**2, 0.0)
    uncertain = gain <= 3 * math.sqrt(variance / counts.num_scaled)
    if uncertain or gain <= (LARGER_SCALE_GAIN if best > _AS_TRAINED else SMALLER_SCALE_GAIN):
        return []
    text = (
        f"wrong lilicorr_logit_scale or lilicorr_vector_eps in the drafter's config.json: the correlator's scores tell "
        f"the right first token best when multiplied by {SCALES[best]:g} ({gain:.2f} nats better, "
        f"{counts.num_scaled} drafts)"
    )
    return [Cause("logit_scale", text)]


def _no_use(counts: DraftCounts, examination: Examination | None) -> list[Cause]:
    evidence = []
    for kind, (share, when) in enumerate(zip(LEAST_SHARES_OF_EXPECTED, ("at", "above"), strict=True)):
        drafts, found, expected = counts.lattices[kind], counts.found[kind], counts.expected[kind]
        if drafts >= LEAST_DRAFTS and found < share * expected - math.sqrt(expected):
            evidence.append(
                f"{when} temperature 0 the right first token was among the candidates of {found} drafts in {drafts}, "
                f"where it expected {expected:.0f}"
            )
    foreign = examination.foreign_context if examination is not None else None
    if not evidence or foreign is not None and foreign.gain < -LEAST_CONTEXT_GAIN - 2 * foreign.error:
        return []
    if foreign is not None:
        evidence.append(
            f"another request's context foretells {examination.num_positions} positions as well as their own "
            f"({-foreign.gain:.2f} nats per token between them)"
        )
    checks = "" if examination is None else "; RoPE layout, mask token and stacked scales were tried otherwise in vain"
    return [
        Cause("pair", f"another target than the drafter was trained for, or a damaged fc: {'; '.join(evidence)}"),
        Cause("layers", f"{_REMEDIES['layers']}, far from the trained ones{checks}"),
        Cause("scales", "wrongly dequantized weights"),
        *([] if examination is not None else [Cause("mask", _REMEDIES["mask"]), Cause("rope", _REMEDIES["rope"])]),
    ]


def report(causes: Sequence[Cause], counts: DraftCounts, drafter: str, target: str) -> str:
    """The one message of the guard."""
    numbered = " ".join(f"({index}) {cause.text}." for index, cause in enumerate(causes, 1))
    return (
        f"The drafter {drafter!r} looks broken, not the text hard. Output stays right, but less is accepted than could "
        f"be: of {counts.drafts} drafts the first token was accepted {counts.first_acceptance:.0%} of the time, and "
        f"among its candidates {counts.in_lattice:.0%}. Likely causes, the likeliest first: {numbered} "
        f"Check with: lilicorr doctor {drafter} --target {target}"
    )
