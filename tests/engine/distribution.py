# SPDX-License-Identifier: Apache-2.0
"""The exact distribution of a small target's next tokens, and how far samples are from it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

MIN_EXPECTED = 5.0


@torch.inference_mode()
def joint_distribution(
    target: Path,
    prompt: list[int],
    params: SamplingParams,
    length: int,
) -> torch.Tensor:
    """P(x1, ..., x_length | prompt), [V] * length fp64, by enumerating every prefix.

    Logits come from transformers' implementation of the target, and the sampling
    parameters are applied here: nothing is shared with the engine under test.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    vocab_size = model.config.vocab_size
    joint = torch.ones((), dtype=torch.float64)
    prefixes = torch.empty(1, 0, dtype=torch.long)
    for _ in range(length):
        inputs = torch.cat((torch.tensor(prompt).expand(len(prefixes), -1), prefixes), dim=1)
        probs = sampling_probs(model(inputs).logits[:, -1].double(), params)
        joint = joint[..., None] * probs.view(*joint.shape, vocab_size)
        tokens = torch.arange(vocab_size).repeat(len(prefixes), 1)
        prefixes = torch.cat((prefixes.repeat_interleave(vocab_size, dim=0), tokens.view(-1, 1)), dim=1)
    return joint


def sampling_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Rows of probabilities after temperature, top-k and top-p; one-hot at temperature 0."""
    if params.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    probs, order = torch.softmax(logits / params.temperature, dim=-1).sort(dim=-1, descending=True)
    if params.top_k > 0:
        probs[..., params.top_k :] = 0
        probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = torch.where(before < params.top_p, probs, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, probs)


def pair_p_values(
    samples: torch.Tensor,  # [N, length] int64
    joint: torch.Tensor,  # [V] * length
) -> list[float]:
    """For each two neighbouring tokens, the chi-square probability of so large a distance.

    Pairs show a wrong conditional distribution that every single token hides.
    Cells expected fewer than five times count as one; an impossible pair gives 0.
    """
    length, vocab_size = samples.shape[1], joint.shape[0]
    values = []
    for first in range(length - 1):
        others = [axis for axis in range(length) if axis not in (first, first + 1)]
        expected = joint.sum(dim=others).flatten() * len(samples)
        cells = samples[:, first] * vocab_size + samples[:, first + 1]
        observed = torch.bincount(cells, minlength=vocab_size**2).double()
        values.append(_p_value(observed, expected))
    return values


def _p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    if observed[expected == 0].any():
        return 0.0
    common = expected >= MIN_EXPECTED
    observed, expected = (torch.cat((x[common], x[~common].sum()[None])) for x in (observed, expected))
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))
