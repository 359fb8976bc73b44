# SPDX-License-Identifier: Apache-2.0
"""Counters of speculative decoding and what is derived from them."""

from types import SimpleNamespace

import pytest

from vllm_lilicorr.measure.acceptance import SpeculationCounts

PROMETHEUS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 93.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.796030664107994e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 651.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 120.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="10"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 30.0
"""


def test_the_text_of_a_server():
    """Creation times summed as counts, or position 10 sorted before 2."""
    counts = SpeculationCounts.from_prometheus(PROMETHEUS)
    assert counts == SpeculationCounts(93, 651, 120, (80, 30, 10))
    assert counts.acceptance_length == pytest.approx(1 + 120 / 93)
    assert counts.acceptance_by_position == pytest.approx((80 / 93, 30 / 93, 10 / 93))


def test_a_server_without_speculation():
    """Division by zero, or an acceptance length of 0: each step still yields one token."""
    counts = SpeculationCounts.from_prometheus("# TYPE other counter\nother_total 1\n")
    assert counts == SpeculationCounts()
    assert counts.acceptance_length == 1.0


def test_an_engines_metrics_agree_with_the_text():
    """Offline and served figures that cannot be compared."""
    metrics = [
        SimpleNamespace(name="vllm:spec_decode_num_drafts", value=93),
        SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=651),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=120),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[80, 30, 10]),
        SimpleNamespace(name="vllm:prompt_tokens", value=7),
    ]
    assert SpeculationCounts.from_engine(metrics) == SpeculationCounts.from_prometheus(PROMETHEUS)


def test_differences_and_sums():
    """A warm-up counted into the result; positions of the first reading missing."""
    later, earlier = SpeculationCounts(10, 70, 20, (8, 7, 5)), SpeculationCounts(4, 28, 6, (3, 2, 1))
    assert later - earlier == SpeculationCounts(6, 42, 14, (5, 5, 4))
    assert later - SpeculationCounts() == later
    assert SpeculationCounts() + later == later
    assert (later - earlier) + earlier == later
