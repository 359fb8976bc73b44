# SPDX-License-Identifier: Apache-2.0
"""The adaptive benchmark's arithmetic, and its steady load on a counted engine."""

import math
from types import SimpleNamespace

import pytest

from vllm_lilicorr.measure.adaptive_bench import loads, summarize
from vllm_lilicorr.measure.load import run_load


def test_ratio_and_its_bounds():
    """Catches a ratio of means, and bounds of single runs instead of their mean."""
    speeds = {"none": [100.0, 200.0, 100.0], "adaptive": [110.0, 240.0, 110.0]}
    found = summarize(speeds)["adaptive"]
    logs = [math.log(1.1), math.log(1.2), math.log(1.1)]
    center = sum(logs) / 3
    deviation = math.sqrt(sum((value - center) ** 2 for value in logs) / 2)
    assert found["ratio"] == pytest.approx(math.exp(center))
    assert found["lower"] == pytest.approx(math.exp(center - 4.30 * deviation / math.sqrt(3)))


def test_one_run_has_no_bound():
    """Catches a single run that is reported as certain."""
    assert summarize({"none": [1.0], "adaptive": [2.0]})["adaptive"]["lower"] == 0.0


def test_loads_cover_what_was_promised():
    """Catches a load step or a change of text that is left out."""
    found = loads((1, 32), {1: 100.0, 32: 1000.0}, 2.0)
    assert list(found) == ["easy, 1", "easy, 32", "hard, 1", "hard, 32", "easy, hard, easy, 1", "easy, 1, 32, 1"]
    assert [phase["kind"] for phase in found["easy, hard, easy, 1"]] == ["easy", "hard", "easy"]
    assert [phase["concurrency"] for phase in found["easy, 1, 32, 1"]] == [1, 32, 1]
    assert found["hard, 32"][0]["tokens"] == 2000


class CountingEngine:
    """Yields two tokens per request and step."""

    def __init__(self) -> None:
        self.in_flight: dict[str, list[int]] = {}
        self.most_by_step: list[int] = []

    def add_request(self, name, prompt, sampling) -> None:
        self.in_flight[name] = [0, sampling.max_tokens]

    def abort_request(self, names) -> None:
        for name in names:
            del self.in_flight[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.in_flight)

    def step(self):
        self.most_by_step.append(len(self.in_flight))
        outputs = []
        for name, progress in list(self.in_flight.items()):
            progress[0] = min(progress[0] + 2, progress[1])
            finished = progress[0] == progress[1]
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    finished=finished,
                    outputs=[SimpleNamespace(token_ids=range(progress[0]))],
                )
            )
            if finished:
                del self.in_flight[name]
        return outputs


def test_load_is_steady_and_counted():
    """Catches a batch that runs empty at the end of a phase, tokens counted twice, and requests left behind."""
    engine = CountingEngine()
    requests = {"easy": [{"prompt": "x", "max_tokens": 5, "temperature": 0.0}]}
    phases = [
        {"kind": "easy", "concurrency": number, "tokens": tokens} for number, tokens in ((2, 20), (5, 40), (1, 6))
    ]
    results = run_load(SimpleNamespace(llm_engine=engine), requests, phases)
    assert sorted(set(engine.most_by_step)) == [1, 2, 5]
    assert [result["tokens"] >= phase["tokens"] for result, phase in zip(results, phases, strict=True)] == [True] * 3
    assert sum(result["tokens"] for result in results) <= 2 * sum(engine.most_by_step)
    assert not engine.in_flight
