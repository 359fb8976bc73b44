# SPDX-License-Identifier: Apache-2.0
"""bfloat16 at temperature 0: where drafting changes a token, the target itself could not decide.

Kernels round differently with the number of rows, so no speculation at batch 1 and
at batch 8 differ too. A difference is excused only by the reference's own logits.
"""

import math

import pytest
from engines import Engine, greedy, tokens

pytestmark = pytest.mark.slow

MAX_TOKENS = 40
NUM_PROMPTS = 120
# Each of the two logits is rounded to bfloat16, and so is the hidden state that both come from.
RESOLUTIONS = 4


def bfloat16_spacing(value: float) -> float:
    """Distance between neighbouring bfloat16 numbers (8 significant bits) at this magnitude."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - 7)


def first_differences(served, outputs):
    """For each request that differs from its reference: (prompt, step, gap of the reference's
    logits between its own token and the served one, the spacing there)."""
    found = []
    for index, (row, output) in enumerate(zip(served, outputs, strict=True)):
        reference = list(output.outputs[0].token_ids)
        step = next((i for i, (a, b) in enumerate(zip(row, reference, strict=False)) if a != b), None)
        if step is None:
            assert len(row) == len(reference)
            continue
        logits = output.outputs[0].logprobs[step]
        assert row[step] in logits, f"prompt {index}, step {step}: the served token is none of the target's best"
        best = logits[reference[step]].logprob
        found.append((index, step, best - logits[row[step]].logprob, bfloat16_spacing(best)))
    return found


def test_differences_are_near_ties_of_the_target(pair, prompts):
    """Catches a lossy drafter that hides behind bfloat16's rounding."""
    chosen = prompts[:NUM_PROMPTS]
    options = {"dtype": "bfloat16", "logprobs_mode": "raw_logits"}
    with Engine(pair.target, **options) as engine:
        together = engine.generate(chosen, greedy(MAX_TOKENS, logprobs=4))
        alone = [engine.generate([prompt], greedy(MAX_TOKENS))[0] for prompt in chosen]
    with Engine(pair.target, pair.drafter, **options) as engine:
        drafted = tokens(engine.generate(chosen, greedy(MAX_TOKENS)))
        assert engine.counters.accepted > 0
    by_batching = first_differences(tokens(alone), together)
    by_drafting = first_differences(drafted, together)
    for index, step, gap, spacing in by_drafting:
        assert gap <= RESOLUTIONS * spacing, f"prompt {index}, step {step}: {gap} apart, bfloat16 resolves {spacing}"
    # Both counts are of rare, independent events: more than three standard deviations apart is no accident.
    assert len(by_drafting) <= len(by_batching) + 3 * math.sqrt(len(by_drafting) + len(by_batching) + 1), (
        by_drafting,
        by_batching,
    )
