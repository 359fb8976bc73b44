# SPDX-License-Identifier: Apache-2.0
"""Drafting for requests that sample: the distribution q that each token is drawn from.

Rejection sampling is exact for any q that the draft was really drawn from, and accepts
a token with probability sum_v min(p(v), q(v)). So q should look like what the target
will sample, temperature, top-k and top-p included, and it should not bet everything on
K candidates when the target may say something else.

A slot's proposal therefore has K + 1 entries: its candidates, and "elsewhere", the rest
of the vocabulary. With u the drafter's own distribution in that slot at the request's
temperature and M the share of it that lies on the candidates,

    q(candidate j | candidate i) = M softmax(z_i / (ROW_TEMPERATURE T))_j
    q(v | candidate i)           = u(v)                   for v outside the candidates
    q(v | elsewhere)             = u(v)                   for every v

so the correlator decides between candidates and the drafter how much it trusts them all.
After a token from elsewhere there is no edge row, and the slot falls back to u. Rows
are flattened (ROW_TEMPERATURE) because they say what is best, not how often: the head is
trained on the target's most probable text. top-k and top-p keep of each row what they
would keep of the target's.
"""

from dataclasses import dataclass

import torch

from vllm_lilicorr.method.lattice import Lattice
from vllm_lilicorr.method.walks import follow, rows_along

# Best of 1, 1.2, 1.4, 1.7, 2, 2.5, 3.3 on two trained pairs at temperatures 0.4, 0.7 and 1
# (docs/drafting.md has the table).
ROW_TEMPERATURE = 2.0
_BISECTIONS = 24


@dataclass(frozen=True)
class Sampling:
    """How the requests of a batch sample.

    Attributes:
        temperature: [R] fp32; 0 for a request that takes the most probable token.
        top_k: [R] integers, at least 1, or None where no request limits it.
        top_p: [R] fp32 in (0, 1], or None where no request limits it.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None

    @property
    def divisor(self) -> torch.Tensor:
        """Temperatures [R] to divide by: 1 for requests that do not sample."""
        return torch.where(self.temperature == 0, torch.ones_like(self.temperature), self.temperature)


@dataclass(frozen=True)
class Noise:
    """The randomness of one draft step.

    Attributes:
        race: [R, S, K + 1] fp32, independent draws of the exponential distribution.
        elsewhere: [R, S] fp64, independent uniform draws of [0, 1).
    """

    race: torch.Tensor
    elsewhere: torch.Tensor

    @classmethod
    def empty(cls, num_reqs: int, num_slots: int, top_k: int, device: torch.device) -> "Noise":
        return cls(
            torch.empty(num_reqs, num_slots, top_k + 1, device=device),
            torch.empty(num_reqs, num_slots, dtype=torch.float64, device=device),
        )

    def draw(self, row: int | None = None, generator: torch.Generator | None = None) -> "Noise":
        """Fills the noise of one request, or of all, from a generator; returns itself."""
        for noise, fill in ((self.race, torch.Tensor.exponential_), (self.elsewhere, torch.Tensor.uniform_)):
            fill(noise if row is None else noise[row], generator=generator)
        return self


def keep_probable(
    probs: torch.Tensor,  # [N, V] fp32
    top_k: torch.Tensor | None,  # [N] integers
    top_p: torch.Tensor | None,  # [N] fp32
) -> torch.Tensor:
    """Probabilities [N, V] with zeros outside each row's top-k and top-p; they no longer sum to 1.

    What is kept is everything above a threshold found by bisection, so it differs from
    a sort's answer by entries within 2**-24 of the largest probability.
    """
    largest = probs.amax(dim=-1, keepdim=True)
    threshold = torch.zeros_like(largest)
    if top_k is not None:
        low, high = torch.zeros_like(largest), largest  # the answer is the smallest with at most k entries
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            fits = (probs >= middle).sum(-1, keepdim=True) <= top_k[:, None]
            low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
        threshold = torch.where(top_k[:, None] < probs.shape[-1], high, threshold)
    if top_p is not None:
        kept = torch.where(probs >= threshold, probs, 0.0)
        wanted = top_p[:, None] * kept.sum(-1, keepdim=True)
        low, high = torch.zeros_like(largest), largest  # the answer is the largest that still has the mass
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            enough = torch.where(kept >= middle, kept, 0.0).sum(-1, keepdim=True) >= wanted
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        threshold = torch.where(top_p[:, None] < 1, torch.maximum(threshold, low), threshold)
    return torch.where(probs >= threshold, probs, 0.0)


def proposal_rows(
    edge_logits: torch.Tensor,  # [R, S, K, K] fp32
    candidate_mass: torch.Tensor,  # [R, S] fp32: the drafter's probability of all candidates, at the temperature
    kept_probs: torch.Tensor,  # [R, S, K] fp32: of each candidate, 0 outside top-k and top-p
    elsewhere_mass: torch.Tensor,  # [R, S] fp32: of the rest of the vocabulary, 0 outside top-k and top-p
    sampling: Sampling,
) -> torch.Tensor:
    """Each slot's proposal after each predecessor, [R, S, K + 1, K + 1] fp32, rows sum to 1.

    The last row follows a token from elsewhere, the last column is elsewhere.
    """
    temperature = sampling.divisor[:, None, None, None]
    rows = torch.softmax(edge_logits / (ROW_TEMPERATURE * temperature), dim=-1)
    if sampling.top_k is not None or sampling.top_p is not None:
        rows = keep_probable_candidates(rows, candidate_mass, sampling)
    rows = rows * candidate_mass[:, :, None, None]
    rows = torch.cat((rows, kept_probs[:, :, None]), dim=2)
    rows = torch.cat((rows, elsewhere_mass[:, :, None, None].expand(-1, -1, rows.shape[2], 1)), dim=3)
    return rows / rows.sum(dim=-1, keepdim=True)


def keep_probable_candidates(
    rows: torch.Tensor,  # [R, S, K, K] fp32, sum to 1
    candidate_mass: torch.Tensor,  # [R, S] fp32
    sampling: Sampling,
) -> torch.Tensor:
    """Rows with zeros where the request's top-k or top-p would not reach."""
    ordered, order = rows.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:
        rank = torch.arange(rows.shape[-1], device=rows.device)
        keep &= rank < sampling.top_k[:, None, None, None]
    if sampling.top_p is not None:
        before = (ordered.cumsum(dim=-1) - ordered) * candidate_mass[:, :, None, None]
        keep &= before < sampling.top_p[:, None, None, None]
    return torch.zeros_like(rows).scatter_(-1, order, torch.where(keep, ordered, 0.0))


def sampled_walk(
    lattice: Lattice,
    probs: torch.Tensor,  # [R, S, V] fp32: the drafter's logits over the vocabulary; becomes the proposal
    sampling: Sampling,
    noise: Noise,
    greedy_path: torch.Tensor,  # [R, S] int64 ranks, for requests at temperature 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a path for every request that samples.

    Returns:
        path [R, S] int64 ranks, K where the token is from elsewhere, and tokens [R, S] int64.
        `probs` holds what each token was drawn from afterwards; for a request at
        temperature 0 that is all on the token of its greedy path.

    A race (smallest noise / probability wins) serves every predecessor of a slot with
    one set of draws, because only the row that the walk reaches uses them. A token from
    elsewhere is found by its own uniform draw in the cumulated probabilities.
    """
    num_reqs, num_slots, top_k = lattice.candidate_ids.shape
    ids = lattice.candidate_ids
    is_greedy = (sampling.temperature == 0)[:, None]
    probs.div_(sampling.divisor[:, None, None])
    torch.softmax(probs, dim=-1, out=probs)
    candidate_mass = probs.gather(2, ids).sum(dim=-1)
    if sampling.top_k is not None or sampling.top_p is not None:
        limits = (limit if limit is None else limit.repeat_interleave(num_slots)
                  for limit in (sampling.top_k, sampling.top_p))  # fmt: skip
        probs.copy_(keep_probable(probs.flatten(0, 1), *limits).view_as(probs))
    kept_probs = probs.gather(2, ids)
    probs.scatter_(2, ids, 0.0)  # from here on: elsewhere
    elsewhere_mass = probs.sum(dim=-1)
    rows = proposal_rows(lattice.edge_logits, candidate_mass, kept_probs, elsewhere_mass, sampling)
    drawn = follow((rows / noise.race[:, :, None]).argmax(dim=-1))
    path = torch.where(is_greedy, greedy_path, drawn)
    realised = rows_along(rows, path)
    one_hot = torch.zeros_like(realised).scatter_(2, path[:, :, None], 1.0)
    realised = torch.where(is_greedy[:, :, None], one_hot, realised)
    from_elsewhere = path == top_k
    tokens = lattice.tokens(path.clamp_max(top_k - 1))
    tokens[from_elsewhere] = _inverse_cdf(probs[from_elsewhere], noise.elsewhere[from_elsewhere])
    scale = realised[:, :, top_k] / elsewhere_mass.clamp_min(torch.finfo(torch.float32).tiny)
    probs.mul_(scale[:, :, None]).scatter_(2, ids, realised[:, :, :top_k])
    return path, tokens


def _inverse_cdf(
    weights: torch.Tensor,  # [N, V] fp32, not all zero in any row
    uniform: torch.Tensor,  # [N] fp64 in [0, 1)
) -> torch.Tensor:
    """For each row the index [N] int64 that its uniform draw falls on; never one of weight 0."""
    cumulated = weights.double().cumsum(dim=-1)
    total = cumulated[:, -1:]
    wanted = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulated, wanted, right=True)[:, 0]
