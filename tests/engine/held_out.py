# SPDX-License-Identifier: Apache-2.0
"""Prompts from text that no pair was trained on: PyTorch's own modules, code and prose."""

import inspect
from collections.abc import Callable

NUM_PROMPTS = 200
SHORTEST, LONGEST = 5, 400


def held_out_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """200 prompts of 5 to 400 token ids, lengths and places spread evenly, the same in every run."""
    from torch.nn.modules import activation, loss, rnn

    text = "".join(inspect.getsource(module) for module in (activation, loss, rnn))
    stride = len(text) // NUM_PROMPTS
    prompts = []
    for index in range(NUM_PROMPTS):
        length = SHORTEST + index * 139 % NUM_PROMPTS * (LONGEST - SHORTEST) // (NUM_PROMPTS - 1)
        start = index * stride
        ids = encode(text[start : start + 12 * length])
        prompts.append(ids[:length])
    return prompts
