# SPDX-License-Identifier: Apache-2.0
"""Offline acceptance: chained blocks over held-out greedy rollouts, tokens per step.

A rollout is the target's own greedy text, so a draft is accepted as far as it
equals the rollout. Drafts are computed at every position at once; the chain then
hops from anchor to anchor as an engine would. Tokens per step are pooled:
1 + accepted tokens / steps, over all rollouts.
"""

import numpy as np
import torch
from blocks import block_targets
from drafter import Drafter
from head import LiLiCorrHead, greedy_walk
from losses import lattice
from settings import Settings
from torch import Tensor


def rounded(module: torch.nn.Module) -> None:
    """Rounds parameters to BF16 in place, as a checkpoint stores them."""
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(param.bfloat16())


def prefix_length(hits: Tensor) -> np.ndarray:
    """hits [..., S] bool -> length of the leading run of True."""
    return hits.long().cumprod(-1).sum(-1).numpy()


@torch.no_grad()
def accepted_everywhere(
    backbone: Drafter,
    head: LiLiCorrHead | None,
    shard: dict[str, Tensor],
    settings: Settings,
) -> dict[str, np.ndarray]:
    """Accepted tokens [rows, anchors] of argmax, and with a head of walk and oracle.

    Anchors run over all generated positions but the last.
    """
    counts: dict[str, list[np.ndarray]] = {}
    for row in range(0, len(shard["tokens"]), 8):
        tokens = shard["tokens"][row : row + 8].long()
        last = tokens.shape[1] - 1
        first = last + 1 - settings.held_out_new_tokens
        anchors = torch.arange(first, last).expand(len(tokens), -1)
        truth, exists = block_targets(tokens, anchors, settings.block_size - 1)
        features = shard["features"][row : row + 8]
        with torch.autocast("cpu", torch.bfloat16):
            hidden, anchor = backbone(tokens, features, anchors)
            logits = backbone.logits(hidden).float()
        candidates, log_probs = lattice(logits, settings.top_k)
        found = {"argmax": candidates[..., 0] == truth}
        found["oracle"] = (candidates == truth[..., None]).any(-1)
        if head is not None:
            flat = (t.flatten(0, 1) for t in (candidates, log_probs, hidden, anchor))
            with torch.autocast("cpu", torch.bfloat16):
                start, pairs = head(*flat, backbone.embedding)
            rank = greedy_walk(start, pairs).view(truth.shape)
            found["lilicorr"] = candidates.gather(-1, rank[..., None])[..., 0] == truth
        for name, hits in found.items():
            counts.setdefault(name, []).append(prefix_length(hits & exists))
    return {name: np.concatenate(rows) for name, rows in counts.items()}


def chain(accepted: np.ndarray) -> tuple[int, int]:
    """(steps, accepted tokens) of hopping through each row of accepted [rows, anchors]."""
    steps = total = 0
    for row in accepted:
        position = 0
        while position < len(row):
            steps += 1
            total += int(row[position])
            position += int(row[position]) + 1
    return steps, total


def tokens_per_step(
    backbone: Drafter,
    head: LiLiCorrHead | None,
    shards: list[dict[str, Tensor]],
    settings: Settings,
) -> dict[str, float]:
    """Pooled tokens per step by method; `first` is the block right after the prompt."""
    sums: dict[str, np.ndarray] = {}
    for shard in shards:
        found = accepted_everywhere(backbone, head, shard, settings)
        for name, accepted in found.items():
            row = np.array([*chain(accepted), accepted[:, 0].sum(), len(accepted)])
            sums[name] = sums.get(name, 0) + row
    result = {}
    for name, (steps, total, first, rows) in sums.items():
        result[name] = float(1 + total / steps)
        result[f"{name} first"] = float(1 + first / rows)
    return result
