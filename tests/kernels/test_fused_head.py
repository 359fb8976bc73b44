# SPDX-License-Identifier: Apache-2.0
"""The row of launches: what it drafts beside method/head.py, how many launches, how many bytes, in a graph."""

import pytest
import torch
from interpreted import run_interpreted

pytest.importorskip("triton")

from op_outputs import fake_outputs  # noqa: E402

from vllm_lilicorr.kernels.random_step import TINY, Step  # noqa: E402

LAUNCHES = [
    *("partial_candidates", "project", "encode"),
    *("linear_pair", "attention", "linear", "linear", "linear"),
    *("linear", "attention", "linear", "linear", "linear"),
    *("factors", "linear", "edges"),
]
# Large enough that nodes and vectors are small beside weights and logits, as they are in serving.
WIDE = {"hidden_size": 256, "vocab_size": 151936, "lilicorr_hidden_size": 256, "lilicorr_factor_dim": 256}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    calls = [("counting", "report", (num_reqs, num_reqs, 1 << 30, {})) for num_reqs in (1, 3, 16)]
    calls += [
        ("counting", "report", (1, 5, 1 << 30, WIDE)),
        ("counting", "report", (2, 6, 0, {})),
        ("counting", "report", (2, 8, 1 << 30, {"lilicorr_hidden_size": 64, "lilicorr_num_layers": 1})),
    ]
    return [report for report, _ in run_interpreted(calls, tmp_path_factory.mktemp("reports"))]


def test_drafts_what_the_plain_head_drafts(reports) -> None:
    """Would catch a layer left out, weights of another layer, a wrong anchor, or stale prepared weights."""
    for report in reports:
        assert torch.equal(report["tokens"], report["plain_tokens"])


def test_sixteen_launches_at_any_batch_size(reports) -> None:
    """Would catch a launch more on the way from logits to draft tokens; the plain head takes five times as many."""
    for report in reports[:4]:
        assert report["launches"] == LAUNCHES
        assert report["plain_launches"] >= 75
    assert len(reports[4]["launches"]) == 17, "without a token table its rows are projected, after a gather by PyTorch"


def test_weights_and_logits_are_read_once(reports) -> None:
    """Would catch a second pass over the logits or the weights; one request, so that one program's rows are all."""
    assert reports[3]["loaded_of_floor"] <= 1.15


def test_a_step_can_be_traced(tmp_path) -> None:
    """Would catch a fake implementation that promises other outputs, and anything that waits for the device."""
    ((real, _),) = run_interpreted([("op_outputs", "real_outputs", ())], tmp_path)
    assert len(real) == len(LAUNCHES)
    assert fake_outputs() == real


def test_a_reload_keeps_every_address() -> None:
    """Would catch captured graphs that read the weights of before a reload."""
    step = Step(TINY, torch.float32, "cpu", 0)
    head = step.head
    held = {name: value for name, value in vars(head).items() if isinstance(value, torch.Tensor)}
    addresses = {name: value.data_ptr() for name, value in held.items()}
    before = {name: value.clone() for name, value in held.items()}
    for tensor in step.parameters.values():
        tensor.mul_(2)
    head.prepare()
    assert {name: getattr(head, name).data_ptr() for name in held} == addresses
    for name in ("token_rows", "feature_weight", "feature_bias", "anchor_weight", "anchor_bias", "edge_weight"):
        assert not torch.equal(getattr(head, name), before[name]), name


def test_refuses_half_precision() -> None:
    """Would catch overflow where norms are taken out of products."""
    with pytest.raises(ValueError, match="load it as bfloat16"):
        Step(TINY, torch.float16, "cpu", 0)
