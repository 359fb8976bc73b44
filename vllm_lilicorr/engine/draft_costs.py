# SPDX-License-Identifier: Apache-2.0
"""Times the target and the drafter at start-up, by the number of tokens and requests."""

import time
from collections.abc import Callable
from typing import Any

import torch

# Timing ends here, however slow the models are: the larger batches are then extrapolated.
_MAX_SECONDS = 3.0
_REPEATS = 3


@torch.inference_mode()
def measure_costs(proposer: Any, runner: Any) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of the target's forward pass by tokens, and of a draft by requests.

    Takes about _MAX_SECONDS at most, more only for the smallest batches of a very slow model. Every rank of
    a tensor-parallel group runs the same batches: the first rank's clock ends a series for all.
    """
    num_slots, max_reqs = proposer.num_speculative_tokens, proposer.max_batch_size
    most_tokens = min(max_reqs * (1 + num_slots), proposer.max_num_tokens)
    requests = _powers_of_two(max_reqs)
    tokens = sorted({*_powers_of_two(most_tokens), min(1 + num_slots, most_tokens)})

    def run_target(num_tokens: int) -> None:
        hidden_states, _ = runner._dummy_run(num_tokens)
        runner.model.compute_logits(hidden_states[:num_tokens])

    with proposer.without_dummy_run():
        target = _curve(run_target, tokens, proposer.agreed)
    drafter = _curve(proposer.dummy_draft, requests, proposer.agreed)
    return target, drafter


def _curve(run: Callable[[int], None], counts: list[int], agreed: Callable[[bool], bool]) -> dict[int, float]:
    """The fastest of a few runs of each count, the first run left out."""
    end = time.perf_counter() + _MAX_SECONDS / 2
    curve: dict[int, float] = {}
    for count in counts:
        run(count)
        times = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            run(count)
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - began)
        curve[count] = min(times)
        if not agreed(time.perf_counter() < end):
            break
    return curve


def _powers_of_two(largest: int) -> list[int]:
    return [2**exponent for exponent in range(largest.bit_length()) if 2**exponent < largest] + [largest]
