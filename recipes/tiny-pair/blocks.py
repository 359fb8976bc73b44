# SPDX-License-Identifier: Apache-2.0
"""Training blocks: anchors in rollouts, and the tokens each slot should predict."""

from pathlib import Path

import numpy as np
import torch
from rollouts import repeated, shard_path
from settings import Settings
from torch import Tensor


class Blocks:
    """Training blocks from the rollout shards: a batch depends on its step alone."""

    def __init__(self, folder: Path, settings: Settings):
        self.settings = settings
        self.shards = [
            torch.load(shard_path(folder, i), mmap=True, weights_only=True) for i in range(settings.rollout_shards)
        ]
        self.weights = [self.anchor_weights(shard["tokens"]) for shard in self.shards]

    def anchor_weights(self, tokens: Tensor) -> np.ndarray:  # [rows, anchors] fp64
        """How often each generated position becomes an anchor, rows summing to one.

        A loop is easy and fills most of a rollout, but few of an engine's steps:
        blocks whose tokens were generated before are drawn less often.
        """
        s = self.settings
        first = tokens.shape[1] - s.rollout_new_tokens
        marks = repeated(tokens, first, s.block_size)
        # The mark of the block at anchor p is at its last token, p + block_size - 1.
        ends = (torch.arange(first, tokens.shape[1] - 1) + s.block_size - 1).clamp_max(tokens.shape[1] - 1)
        weights = torch.where(marks[:, ends], s.repeated_anchor_weight, 1.0).double()
        return (weights / weights.sum(-1, keepdim=True)).numpy()

    def batch(self, stream: int, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens [B, T+1], features [B, T, nf*D], final [B, T, D], anchors [B, N]."""
        s = self.settings
        rng = np.random.default_rng((s.seed, 4, stream, step))
        number = rng.integers(len(self.shards))
        shard, weights = self.shards[number], self.weights[number]
        index = np.sort(rng.choice(s.rollout_rows, s.rows_per_step, replace=False))
        rows = torch.from_numpy(index)
        tokens = shard["tokens"][rows].long()
        # From the first generated token (the anchor right after prefill) on.
        low = tokens.shape[1] - s.rollout_new_tokens
        positions = np.arange(low, tokens.shape[1] - 1)
        anchors = np.stack([rng.choice(positions, s.anchors_per_row, replace=False, p=weights[row]) for row in index])
        anchors = torch.from_numpy(np.sort(anchors, axis=1))
        return tokens, shard["features"][rows], shard["final"][rows], anchors


def block_targets(tokens: Tensor, anchors: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """True next tokens [B, N, S] of each slot, and which of them exist."""
    positions = anchors[..., None] + torch.arange(1, slots + 1)
    exists = positions < tokens.shape[1]
    positions = positions.clamp_max(tokens.shape[1] - 1)
    return tokens.gather(1, positions.flatten(1)).view(positions.shape), exists
