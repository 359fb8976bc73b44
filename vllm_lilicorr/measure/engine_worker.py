# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a process of its own, driven over its standard input and output.

One JSON object per line each way. The first line in is the engine's arguments; every
further one is a run: {"prompts": [...], "concurrency": n, "max_tokens": n, "sampling":
{...} or left out}. What vLLM prints goes to standard error. Between runs the engine does nothing at all.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from vllm_lilicorr.measure.acceptance import SpeculationCounts
from vllm_lilicorr.measure.load import run_load


def main() -> None:
    """Serves runs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    engine_arguments = json.loads(sys.stdin.readline())
    llm = LLM(**engine_arguments, disable_log_stats=False)
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "phases" in request:
            _answer(answers, {"phases": run_load(llm, **request)})
        else:
            _answer(answers, run(llm, **request))


def run(
    llm: Any, prompts: list[str], concurrency: int, max_tokens: int, sampling: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Completes all prompts, `concurrency` of them in flight as long as any wait.

    Every request yields exactly `max_tokens` tokens, so that all kinds of drafting
    do the same work. `sampling` are fields of vLLM's SamplingParams, temperature 0 by default.

    Returns:
        seconds, tokens, counts (fields of SpeculationCounts), and by prompt: token_ids,
        and steps, the engine steps that yielded them.
    """
    from vllm import SamplingParams

    sampling = {"temperature": 0, **(sampling or {})}
    parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    engine = llm.llm_engine
    before = SpeculationCounts.from_engine(llm.get_metrics())
    waiting: Iterator[tuple[int, str]] = iter(enumerate(prompts))
    token_ids: dict[int, list[int]] = {}
    steps = [0] * len(prompts)
    in_flight = 0
    exhausted = False
    began = time.perf_counter()
    while True:
        while in_flight < concurrency and not exhausted:
            index, prompt = next(waiting, (-1, ""))
            if index < 0:
                exhausted = True
            else:
                engine.add_request(str(index), {"prompt": prompt}, parameters)
                in_flight += 1
        if not in_flight:
            break
        for output in engine.step():
            steps[int(output.request_id)] += 1
            if output.finished:
                token_ids[int(output.request_id)] = list(output.outputs[0].token_ids)
                in_flight -= 1
    seconds = time.perf_counter() - began
    counts = SpeculationCounts.from_engine(llm.get_metrics()) - before
    ordered = [token_ids[index] for index in range(len(prompts))]
    return {
        "seconds": seconds,
        "tokens": sum(len(ids) for ids in ordered),
        "counts": vars(counts),
        "token_ids": ordered,
        "steps": steps,
    }


def _answer(answers: TextIO, record: dict[str, Any]) -> None:
    answers.write(json.dumps(record) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
