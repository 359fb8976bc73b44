# SPDX-License-Identifier: Apache-2.0
"""A steady load on an engine in this process: as many requests in flight as a phase wants, all the time.

Without a tail: runs that wait for their last requests measure how batches empty, which
drafting changes too. A phase ends after a number of output tokens; what is still in
flight goes on into the next phase, unless that wants fewer requests or other ones.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any


def run_load(
    llm: Any, requests: Mapping[str, Sequence[Mapping[str, Any]]], phases: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Serves requests, of each kind again from the first after the last, through all phases.

    Args:
        llm: vllm.LLM in this process.
        requests: by kind; each has prompt, max_tokens (all of which it yields) and temperature.
        phases: each with kind, concurrency and tokens.

    Returns:
        For every phase its seconds and its tokens (a step's tokens count whole).
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    supplies = {kind: itertools.cycle(several) for kind, several in requests.items()}
    names = itertools.count()
    yielded: dict[str, int] = {}  # tokens of each request in flight, the oldest first
    results, last_kind = [], None
    for phase in phases:
        wanted = phase["concurrency"] if phase["kind"] == last_kind else 0
        while len(yielded) > wanted:
            engine.abort_request([yielded.popitem()[0]])
        last_kind = phase["kind"]
        tokens, began = 0, time.perf_counter()
        while tokens < phase["tokens"]:
            while len(yielded) < phase["concurrency"]:
                request, name = next(supplies[phase["kind"]]), f"load-{next(names)}"
                sampling = SamplingParams(
                    temperature=request["temperature"], max_tokens=request["max_tokens"], ignore_eos=True
                )
                engine.add_request(name, {"prompt": request["prompt"]}, sampling)
                yielded[name] = 0
            for output in engine.step():
                count = len(output.outputs[0].token_ids)
                tokens += count - yielded[output.request_id]
                yielded[output.request_id] = count
                if output.finished:
                    del yielded[output.request_id]
        results.append({"seconds": time.perf_counter() - began, "tokens": tokens})
    engine.abort_request(list(yielded))
    while engine.has_unfinished_requests():
        engine.step()
    return results
