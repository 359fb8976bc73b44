# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2's acceptance is watched in the scheduler."""

import logging
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_lilicorr.engine.acceptance_watch import WINDOW, AcceptanceWatch
from vllm_lilicorr.method.geometry import ARCHITECTURE
from vllm_lilicorr.plugin import register


@pytest.fixture
def warnings(caplog):
    with caplog.at_level(logging.WARNING, "vllm.lilicorr"):
        yield lambda: [record.message for record in caplog.records if record.name == "vllm.lilicorr"]


def test_noise_is_told_once(warnings):
    """Would catch a drafter that drafts noise for days without a word, or a warning at every window."""
    watch = AcceptanceWatch("d", "t")
    for draft in range(3 * WINDOW):
        watch.observe(int(draft % 50 == 0))
    (message,) = warnings()
    assert f"last {WINDOW} drafts of the drafter 'd'" in message
    assert "accepted 2.1% of the time" in message
    assert message.endswith("lilicorr doctor d --target t")


def test_hard_text_is_left_alone(warnings):
    """Would catch an alarm about text that is merely hard, or one long bad answer among good ones."""
    watch = AcceptanceWatch("d", "t")
    for draft in range(4 * WINDOW):
        watch.observe(3 * (draft % 12 == 0))
    for _ in range(WINDOW - 1):
        watch.observe(0)
    assert warnings() == []


@pytest.mark.parametrize(
    ("architecture", "uses_v2", "guard", "speaks"),
    [
        (ARCHITECTURE, True, True, True),
        (ARCHITECTURE, True, False, False),
        (ARCHITECTURE, False, True, False),
        ("DFlashDraftModel", True, True, False),
    ],
)
def test_the_scheduler_counts_for_our_drafter_only(architecture, uses_v2, guard, speaks, warnings):
    """Would catch other drafters' engines that are watched, a switch without effect, or counts that never arrive."""
    register()
    SchedulerConfig.get_scheduler_cls(SimpleNamespace(scheduler_cls=None, async_scheduling=False))
    draft = SimpleNamespace(architectures=[architecture], model="drafter")
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=draft),
        use_v2_model_runner=uses_v2,
        additional_config={"lilicorr": {"guard": guard}},
        model_config=SimpleNamespace(model="target"),
    )
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    scheduler = SimpleNamespace(vllm_config=config, log_stats=True, num_spec_tokens=7)
    stats = None
    for _ in range(WINDOW):
        stats = Scheduler.make_spec_decoding_stats(scheduler, stats, 7, 0, None, "a")
    assert stats.num_drafts == WINDOW
    assert len(warnings()) == speaks
