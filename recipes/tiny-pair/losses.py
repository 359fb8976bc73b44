# SPDX-License-Identifier: Apache-2.0
"""Losses of the drafter: cross entropy of slots, of transitions, and the logit gap."""

import torch
import torch.nn.functional as F
from blocks import block_targets
from drafter import Drafter
from head import LiLiCorrHead
from settings import Settings
from torch import Tensor, nn


def slot_weights(settings: Settings) -> Tensor:
    """[S]: acceptance counts prefixes, so early slots weigh more."""
    slots = torch.arange(settings.block_size - 1, dtype=torch.float32)
    return torch.exp(-slots / settings.slot_decay)


def backbone_loss(logits: Tensor, truth: Tensor, weight: Tensor) -> Tensor:
    """Weighted cross entropy: logits [B, N, S, V] fp32, truth and weight [B, N, S]."""
    losses = F.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none")
    return (losses * weight.flatten()).sum() / weight.sum()


def lattice(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Candidates [..., K] and their log-probabilities under the full softmax."""
    values, candidates = logits.topk(top_k, dim=-1)
    return candidates, values - logits.logsumexp(-1, keepdim=True)


def head_losses(
    start: Tensor,  # [R, K] fp32 edge logits
    pairs: Tensor,  # [R, S-1, K, K]
    candidates: Tensor,  # [R, S, K]
    truth: Tensor,  # [R, S]
    weight: Tensor,  # [R, S]
    target_logits: Tensor,  # [R, S, K] the target's own logits of the candidates
    true_logits: Tensor,  # [R, S] and of the true token
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the true transitions, and the expected target-logit gap.

    Both follow the true path while it stays in the lattice; past its first
    missing token no transition from it exists.
    """
    hits = candidates == truth[..., None]
    inside = hits.any(-1).float().cumprod(-1)
    rank = hits.float().argmax(-1)
    previous = rank[:, :-1, None, None].expand(-1, -1, 1, pairs.shape[-1])
    rows = torch.cat([start[:, None], pairs.gather(2, previous)[:, :, 0]], dim=1)
    weight = weight * inside
    total = weight.sum().clamp_min(1.0)
    log_p = rows.log_softmax(-1)
    transition = -log_p.gather(-1, rank[..., None])[..., 0]
    gap = (true_logits[..., None] - target_logits).clamp_min(0.0) * ~hits
    expected_gap = (log_p.exp() * gap).sum(-1)
    return (transition * weight).sum() / total, (expected_gap * weight).sum() / total


class LiLiCorrDrafter(nn.Module):
    """Backbone and head under the names of a checkpoint."""

    def __init__(self, settings: Settings, embedding: Tensor):
        super().__init__()
        self.backbone = Drafter(settings, embedding)
        self.lilicorr = LiLiCorrHead(settings)


def joint_losses(
    model: LiLiCorrDrafter,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    settings: Settings,
    frozen_backbone: bool,
) -> dict[str, Tensor]:
    """The three terms: ce, transition, gap."""
    tokens, features, final, anchors = batch
    slots = settings.block_size - 1
    truth, exists = block_targets(tokens, anchors, slots)
    weight = exists * slot_weights(settings)
    backbone = model.backbone
    with torch.autocast("cpu", torch.bfloat16):
        with torch.set_grad_enabled(not frozen_backbone):
            hidden, anchor = backbone(tokens, features, anchors)
            logits = backbone.logits(hidden).float()
            ce = backbone_loss(logits, truth, weight)
            candidates, log_probs = lattice(logits, settings.top_k)
        start, pairs = model.lilicorr(
            candidates.flatten(0, 1),
            log_probs.flatten(0, 1),
            hidden.flatten(0, 1),
            anchor.flatten(0, 1),
            backbone.embedding,
        )
    # The target's state at p + s predicts the token of slot s, at p + s + 1.
    at = (anchors[..., None] + torch.arange(slots)).clamp_max(final.shape[1] - 1)
    states = final[torch.arange(len(final))[:, None, None], at].float()
    table = backbone.embedding
    target_logits = (table[candidates] @ states[..., None])[..., 0]
    true_logits = (table[truth] * states).sum(-1)
    transition, gap = head_losses(
        start,
        pairs,
        candidates.flatten(0, 1),
        truth.flatten(0, 1),
        weight.flatten(0, 1),
        target_logits.flatten(0, 1),
        true_logits.flatten(0, 1),
    )
    return {"ce": ce, "transition": transition, "gap": gap}


def plain_losses(model: Drafter, batch: tuple[Tensor, Tensor, Tensor, Tensor], settings: Settings) -> dict[str, Tensor]:
    """Cross entropy alone."""
    tokens, features, _, anchors = batch
    truth, exists = block_targets(tokens, anchors, settings.block_size - 1)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, _ = model(tokens, features, anchors)
        logits = model.logits(hidden).float()
    return {"ce": backbone_loss(logits, truth, exists * slot_weights(settings))}
