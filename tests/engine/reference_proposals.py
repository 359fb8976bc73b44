# SPDX-License-Identifier: Apache-2.0
"""What the method says each token of a drawn path was drawn from, over the vocabulary."""

import torch

from vllm_lilicorr.method.lattice import Lattice
from vllm_lilicorr.method.proposals import Sampling, keep_probable, proposal_rows


def reference_proposals(
    lattice: Lattice,
    logits: torch.Tensor,  # [R, S, V] fp32: the drafter's
    sampling: Sampling,
    tokens: torch.Tensor,  # [R, S] int64: the path, which decides the rows
) -> torch.Tensor:
    """Proposals [R, S, V] fp32; rows of requests at temperature 0 mean nothing."""
    num_slots, top_k = lattice.candidate_ids.shape[1:]
    ids = lattice.candidate_ids
    probs = torch.softmax(logits / sampling.divisor[:, None, None], dim=-1)
    limits = (limit.repeat_interleave(num_slots) for limit in (sampling.top_k, sampling.top_p))
    kept = keep_probable(probs.flatten(0, 1), *limits).view_as(probs)
    elsewhere = kept.scatter(2, ids, 0.0)
    mass = elsewhere.sum(-1)
    rows = proposal_rows(lattice.edge_logits, probs.gather(2, ids).sum(-1), kept.gather(2, ids), mass, sampling)
    is_candidate = ids == tokens[:, :, None]
    path = torch.where(is_candidate.any(-1), is_candidate.long().argmax(-1), top_k)
    previous = torch.cat((torch.zeros_like(path[:, :1]), path[:, :-1]), dim=1)
    realised = rows.gather(2, previous[:, :, None, None].expand(-1, -1, 1, top_k + 1))[:, :, 0]
    spread = elsewhere * (realised[:, :, top_k:] / mass.clamp_min(1e-30)[:, :, None])
    return spread.scatter(2, ids, realised[:, :, :top_k])
