# SPDX-License-Identifier: Apache-2.0
"""Stage 4: the target continues prompts; tokens, features and final states are kept.

A shard holds rows of one prompt length, so that every row generates in step:
    tokens    [rows, T + 1] int16
    features  [rows, T, n * D] bf16, outputs of the feature layers
    final     [rows, T, D] bf16, states the target's LM head reads
"""

from pathlib import Path

import numpy as np
import torch
from corpus import distinct_ngrams, sample_windows
from optim import Progress, save_atomic
from settings import Settings
from target import Target
from torch import Tensor


def serving_copy(target: Target) -> Target:
    """The target with BF16 weights and activations, as it is served."""
    copy = Target(target.settings)
    copy.load_state_dict(target.state_dict())
    return copy.bfloat16().eval()


@torch.no_grad()
def generate(
    target: Target,
    prompts: Tensor,  # [B, P] int64
    new_tokens: int,
    sampled: Tensor,  # [B] bool: draw at temperature 1, otherwise take the argmax
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """A shard for these prompts; the eos token does not end a row."""
    batch, prompt_length = prompts.shape
    length = prompt_length + new_tokens - 1
    layers = target.settings.feature_layers
    cache = target.new_cache(batch, length)
    tokens, start = prompts, 0
    pieces, features, finals = [prompts], [], []
    for _ in range(new_tokens):
        final, feature = target.cached(tokens, cache, start, layers)
        start += tokens.shape[1]
        logits = target.logits(final[:, -1]).float()
        # Gumbel-max: the argmax of logits plus noise is a draw from the softmax.
        uniform = torch.rand(logits.shape, generator=generator).clamp_min(1e-10)
        noise = -(-uniform.log()).log() * sampled[:, None]
        tokens = (logits + noise).argmax(-1, keepdim=True)
        pieces.append(tokens)
        features.append(feature)
        finals.append(final)
    return {
        "tokens": torch.cat(pieces, 1).short(),
        "features": torch.cat(features, 1),
        "final": torch.cat(finals, 1),
    }


def distinct_ratio(shard: dict[str, Tensor], new_tokens: int) -> float:
    """Mean over rows of distinct 4-grams / 4-grams of the generated part."""
    rows = shard["tokens"][:, -new_tokens:].numpy()
    return float(np.mean([distinct_ngrams(row) for row in rows]))


def repeated(tokens: Tensor, prompt_length: int, n: int) -> Tensor:
    """[B, T] bool: the n-gram ending here was generated before in the same row."""
    marks = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, values in enumerate(tokens.tolist()):
        seen = set()
        for end in range(prompt_length + n, len(values) + 1):
            gram = tuple(values[end - n : end])
            marks[row, end - 1] = gram in seen
            seen.add(gram)
    return marks


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:03d}.pt"


def make_rollouts(folder: Path, corpus: Path, target: Target, settings: Settings) -> None:
    """Writes the training shards that are still missing."""
    folder.mkdir(parents=True, exist_ok=True)
    stream = np.load(corpus / "train.npy")
    copy = serving_copy(target)
    progress = Progress("rollouts", 0, settings.rollout_shards, "tokens", every=1)
    for index in range(settings.rollout_shards):
        path = shard_path(folder, index)
        if path.exists():
            progress.last_step = index + 1
            continue
        rng = np.random.default_rng((settings.seed, 2, index))
        length = settings.rollout_prompts[index % len(settings.rollout_prompts)]
        rows = settings.rollout_rows
        prompts = torch.from_numpy(sample_windows(stream, rows, length, rng))
        sampled = torch.arange(rows) < rows * settings.rollout_sampled
        generator = torch.Generator().manual_seed(settings.seed + index)
        new_tokens = settings.rollout_new_tokens
        shard = generate(copy, prompts, new_tokens, sampled, generator)
        save_atomic(shard, path)
        progress.update(index + 1, rows * new_tokens, distinct=distinct_ratio(shard, new_tokens))


def held_out_rollouts(path: Path, corpus: Path, target: Target, settings: Settings) -> list[dict[str, Tensor]]:
    """Greedy rollouts on held-out prompts, one shard per prompt length."""
    if path.exists():
        return torch.load(path, weights_only=True)
    stream = np.load(corpus / "held_out.npy")
    copy = serving_copy(target)
    shards = []
    for index, length in enumerate(settings.held_out_prompts):
        rng = np.random.default_rng((settings.seed, 3, index))
        windows = sample_windows(stream, settings.held_out_rows, length, rng)
        greedy = torch.zeros(len(windows), dtype=torch.bool)
        shards.append(
            generate(
                copy,
                torch.from_numpy(windows),
                settings.held_out_new_tokens,
                greedy,
                torch.Generator(),
            )
        )
    save_atomic(shards, path)
    return shards
