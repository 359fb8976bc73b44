# SPDX-License-Identifier: Apache-2.0
"""What counts and comparisons say about a drafter, on made-up drafts."""

import numpy as np
import pytest

from vllm_lilicorr.method.health import SCALES, Comparison, DraftCounts, Examination, diagnose, report

NUM_SLOTS, TOP_K = 3, 4


def drafts(num_drafts: int = 200, right: float = 0.6, sureness: float = 0.6, scale: float = 1.0, seed: int = 0):
    """Counts of drafts whose first candidate is right as often as `right`, by a drafter that expects `sureness`.

    Its other candidates share what `sureness` leaves, times `sureness`; all are right as often, in proportion.
    """
    rng = np.random.default_rng(seed)
    counts = DraftCounts(NUM_SLOTS, TOP_K)
    ids = rng.permuted(np.tile(np.arange(100), (num_drafts * NUM_SLOTS, 1)), axis=1)[:, :TOP_K]
    ids = ids.reshape(num_drafts, NUM_SLOTS, TOP_K)
    probs = np.full(TOP_K, (1 - sureness) * sureness / (TOP_K - 1))
    probs[0] = sureness
    log_probs = np.tile(np.log(probs), (num_drafts, NUM_SLOTS, 1))
    truth = np.append(probs, 0.0) * right / sureness
    truth[-1] = 1 - truth.sum()
    rank = rng.choice(TOP_K + 1, num_drafts, p=truth)
    committed = np.append(ids[:, 0], np.full((num_drafts, 1), 1000), axis=1)[np.arange(num_drafts), rank]
    counts.observe(
        ids,
        log_probs,
        scale * log_probs[:, 0],
        ids[:, :, 0],
        np.full(num_drafts, NUM_SLOTS),
        (rank == 0).astype(np.int64),
        np.where(rank == 0, 2000, committed),
        np.ones(num_drafts, dtype=bool),
    )
    return counts


def keys(causes) -> list[str]:
    return [cause.key for cause in causes]


def test_counts_are_those_of_the_drafts() -> None:
    """Would catch slots counted as accepted that were not reached or not verified, and ranks of the wrong token."""
    counts = DraftCounts(NUM_SLOTS, TOP_K)
    ids = np.arange(3 * NUM_SLOTS * TOP_K).reshape(3, NUM_SLOTS, TOP_K)
    tokens = ids[:, :, 1]
    counts.observe(
        ids,
        np.log(np.full(ids.shape, 0.2)),
        np.zeros((3, TOP_K)),
        tokens,
        np.array([3, 2, 0]),
        np.array([2, 0, 0]),
        np.array([999, ids[1, 0, 3], 999]),
        np.array([True, False, True]),
    )
    assert counts.verified.tolist() == [2, 2, 1]
    assert counts.accepted.tolist() == [1, 1, 0]
    assert counts.first_rank.tolist() == [0, 1, 0, 1, 1]
    assert counts.lattices.tolist() == [2, 1] and counts.found.tolist() == [1, 1]
    assert counts.expected == pytest.approx([1.6, 0.8])
    assert counts.scale_losses == pytest.approx([2 * np.log(TOP_K)] * len(SCALES))
    assert counts.first_acceptance == 0.5 and counts.in_lattice == pytest.approx(2 / 3)


@pytest.mark.parametrize("right", [0.05, 0.1, 0.3, 0.6, 0.9])
def test_a_drafter_that_knows_its_limits_is_left_alone(right: float) -> None:
    """Would catch an alarm on hard text, where little is accepted and little was expected."""
    counts = drafts(right=right, sureness=right)
    assert diagnose(counts) == []
    calm = Examination({("rope", "is_neox_style false"): Comparison(-1.2, 0.1)}, Comparison(-0.5, 0.1), 60)
    assert diagnose(counts, calm) == []


def test_too_few_drafts_say_nothing() -> None:
    """Would catch an alarm from a handful of unlucky drafts."""
    assert keys(diagnose(drafts(200, right=0.02, sureness=0.9))) != []
    assert diagnose(drafts(40, right=0.02, sureness=0.9)) == []


def test_a_sure_drafter_that_is_wrong_is_reported_without_an_examination() -> None:
    """Would catch silence where nothing could be examined, or remedies that were never tried missing then."""
    causes = diagnose(drafts(right=0.05, sureness=0.9))
    assert keys(causes) == ["pair", "layers", "scales", "mask", "rope"]


def test_a_drafter_that_hears_its_context_is_not_accused_of_its_target() -> None:
    """Would catch an alarm on text that makes a sound drafter too sure of itself."""
    counts = drafts(right=0.05, sureness=0.9)
    assert diagnose(counts, Examination({}, Comparison(-1.0, 0.1), 60)) == []
    assert keys(diagnose(counts, Examination({}, Comparison(0.0, 0.1), 60))) == ["pair", "layers", "scales"]


def test_the_best_alternative_comes_first() -> None:
    """Would catch causes in the order in which they were tried, and small or uncertain gains as causes."""
    asked = {
        ("rope", "is_neox_style true"): Comparison(0.6, 0.05),
        ("mask", "mask token 7"): Comparison(2.0, 0.1),
        ("mask", "mask token 8"): Comparison(1.5, 0.1),
        ("scales", "gate and up of one size"): Comparison(0.3, 0.01),
        ("layers", "target_layer_ids [1, 2]"): Comparison(0.9, 0.5),
    }
    causes = diagnose(drafts(right=0.05, sureness=0.9), Examination(asked, Comparison(0.0, 0.1), 60))
    assert keys(causes) == ["mask", "rope"] and "mask token 7" in causes[0].text


@pytest.mark.parametrize(("scale", "found"), [(0.125, True), (1.0, False), (0.5, False), (2.0, False), (16.0, True)])
def test_a_wrong_scale_of_the_scores_is_told(scale: float, found: bool) -> None:
    """Would catch a logit_scale that is off by 8 unnoticed, or an alarm where text alone moves the best scale."""
    causes = diagnose(drafts(scale=scale))
    assert keys(causes) == (["logit_scale"] if found else [])


def test_anchors_of_another_step_come_before_all_else() -> None:
    """Would catch stale anchors behind what they bring about, and one odd step taken for a cause."""
    counts = drafts(right=0.05, sureness=0.9)
    counts.anchors, counts.wrong_anchors = 30, 25
    assert keys(diagnose(counts))[0] == "anchors"
    counts = drafts()
    counts.anchor_tokens, counts.wrong_anchor_tokens = 200, 3
    assert diagnose(counts) == []


def test_drafts_that_never_change_are_told() -> None:
    """Would catch a drafter without weights taken for one on hard text."""
    counts = DraftCounts(NUM_SLOTS, TOP_K)
    ids = np.tile(np.arange(TOP_K), (120, NUM_SLOTS, 1))
    flat, none = np.full(ids.shape, -7.0), np.zeros(120, dtype=np.int64)
    rest = (none + NUM_SLOTS, none, none + 99, np.ones(120, dtype=bool))
    counts.observe(ids, flat, flat[:, 0], ids[:, :, 0], *rest)
    assert keys(diagnose(counts)) == ["dead"]


def test_a_comparison_is_of_pairs() -> None:
    """Would catch the error of two separate means, in which the text's differences drown the gain."""
    text = np.random.default_rng(0).normal(-5, 3, 50)
    comparison = Comparison.of(text + 0.5 + np.tile([0.1, -0.1], 25), text)
    assert comparison.gain == pytest.approx(0.5) and comparison.error < 0.02
    assert comparison.exceeds(0.4) and not comparison.exceeds(0.6)


def test_the_report_names_causes_and_the_command() -> None:
    """Would catch a message without a remedy."""
    counts = drafts(right=0.05, sureness=0.9)
    text = report(diagnose(counts), counts, "some/drafter", "some/target")
    assert "(1) another target" in text and "lilicorr doctor some/drafter --target some/target" in text
