# SPDX-License-Identifier: Apache-2.0
"""The candidates of a batch of drafts and the scores of every transition between them."""

from dataclasses import dataclass

import torch

from vllm_lilicorr.kernels.reference import IMPOSSIBLE


@dataclass(frozen=True)
class Lattice:
    """What a walk reads.

    Attributes:
        candidate_ids: [R, S, K] int64, every one a token of the vocabulary, most probable first.
        log_probs: [R, S, K] fp32 under the drafter's softmax over the full vocabulary.
        edge_logits: [R, S, K, K] fp32: entry [r, s, i, j] scores candidate j of slot s
            after candidate i of slot s - 1. Slot 0 follows the anchor alone: its K rows are equal.
    """

    candidate_ids: torch.Tensor
    log_probs: torch.Tensor
    edge_logits: torch.Tensor

    def tokens(
        self,
        path: torch.Tensor,  # [R, S] int64 ranks
    ) -> torch.Tensor:
        """The path's token ids [R, S] int64."""
        return self.candidate_ids.gather(2, path[:, :, None])[:, :, 0]


def finite_log_probs(
    log_probs: torch.Tensor,  # [..., K] fp32, best first; -inf or NaN where the drafter's logits are
) -> torch.Tensor:
    """The same with IMPOSSIBLE in place of what is not a number or minus infinity."""
    return log_probs.nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE).clamp_min(IMPOSSIBLE)


def possible_edges(
    edge_logits: torch.Tensor,  # [R, S, K, K] fp32
    log_probs: torch.Tensor,  # [R, S, K] fp32, of `finite_log_probs`
) -> torch.Tensor:
    """Edge logits by which no walk takes an impossible candidate.

    Every row keeps at least rank 0, so that a slot with no possible candidate still
    has a defined path. A score that is not a number counts as 0.
    """
    impossible = log_probs <= IMPOSSIBLE
    impossible[..., 0] = False
    edge_logits = edge_logits.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return edge_logits.masked_fill(impossible[:, :, None], -torch.inf)
