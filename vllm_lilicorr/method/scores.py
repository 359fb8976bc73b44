# SPDX-License-Identifier: Apache-2.0
"""The proposals of proposals.py as scores, for a draw by Gumbel-max over the vocabulary.

temperature * log q is needed up to one constant per slot, which cancels in every
comparison and in the softmax of the rejection sampler. With that constant chosen as
temperature * log Z, Z the drafter's partition function at the temperature,

    score(v | anything)           = logit(v)                       for v outside the candidates
    score(v | elsewhere)          = logit(v)                       for every v
    score(candidate j | i)        = temperature * (log sum_k exp(logit_k / temperature)
                                    + log softmax(z_i / (ROW_TEMPERATURE temperature))_j)

with k over the candidates: what is drawn elsewhere needs no sum over the vocabulary.
The largest score / temperature + Gumbel noise outside the candidates does not depend on
the predecessor either. So one token per slot, found before the walk, stands for the whole
rest of the vocabulary, and a walk over K + 1 tokens draws from all of it.
"""

import torch

from vllm_lilicorr.method.proposals import ROW_TEMPERATURE, Sampling, keep_probable_candidates


def proposal_scores(
    edge_logits: torch.Tensor,  # [R, S, K, K] fp32
    candidate_logits: torch.Tensor,  # [R, S, K] fp32: the drafter's logits
    kept_logits: torch.Tensor,  # [R, S, K] fp32: the same, -inf outside top-k and top-p
    elsewhere_logits: torch.Tensor,  # [R, S] fp32: of the token from elsewhere, -inf where there is none
    log_partition: torch.Tensor,  # [R, S] fp32: log Z; read only where a request limits its tokens, inf elsewhere
    sampling: Sampling,
) -> torch.Tensor:
    """Each slot's scores after each predecessor, [R, S, K + 1, K + 1] fp32; -inf where q is 0.

    The last row follows a token from elsewhere, the last column is one. A request at
    temperature 0 keeps its edge logits, and never takes a token from elsewhere.
    """
    temperature = sampling.divisor[:, None, None]
    log_mass = torch.logsumexp(candidate_logits / temperature, dim=-1)
    log_rows = torch.log_softmax(edge_logits / (ROW_TEMPERATURE * temperature[..., None]), dim=-1)
    candidate_mass = (log_mass - log_partition).exp()
    kept = keep_probable_candidates(log_rows.exp(), candidate_mass, sampling)
    rows = temperature[..., None] * (log_rows + log_mass[:, :, None, None])
    rows = rows.masked_fill(kept == 0, -torch.inf)
    rows = torch.cat((rows, kept_logits[:, :, None]), dim=2)
    rows = torch.cat((rows, elsewhere_logits[:, :, None, None].expand(-1, -1, rows.shape[2], 1)), dim=3)
    greedy = torch.nn.functional.pad(edge_logits, (0, 1, 0, 1), value=-torch.inf)
    return torch.where((sampling.temperature == 0)[:, None, None, None], greedy, rows)
