# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr on vLLM's Model Runner V2, where the CUDA build runs.

vLLM's speculator runs the backbone and keeps the anchors. The lattice is scored by this
plugin's head, which vLLM calls as the drafter's `model.lilicorr`, and walked by vLLM's
kernel. That kernel draws by Gumbel-max, with noise keyed by seed, position and token id:
a request's drafts do not depend on what shares its batch. For requests that sample it
walks over K candidates and one token from elsewhere (method/scores.py). `draft_logits`
then holds temperature * log q over the whole vocabulary, up to a constant per row.

A draft step may be captured as a FULL CUDA graph. Nothing here waits for the
device, and what a step reads or writes keeps its address: anchors, `draft_logits`, the
requests' limits and the walk's buffers are allocated once for max_num_seqs requests,
the head's buffers in `prepare`, before any capture.
"""

import weakref
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator as InTreeSpeculator

from vllm_lilicorr.engine.options import Options
from vllm_lilicorr.engine.target_layers import token_embedding, without_lora
from vllm_lilicorr.kernels.keep_probable import keep_probable_
from vllm_lilicorr.kernels.store_candidates import store_candidates
from vllm_lilicorr.method.lattice import IMPOSSIBLE, Lattice, possible_edges
from vllm_lilicorr.method.proposals import Sampling
from vllm_lilicorr.method.scores import proposal_scores
from vllm_lilicorr.method.walks import expected_length_walk, rows_along


class ProposalSampler(CandidateSampler):
    """vLLM's walk and, where it draws, proposals over the whole vocabulary.

    With proposals the last candidate of each slot is a token from elsewhere, whose
    score the proposals have already, as that of every other token from elsewhere.
    """

    def _cache_draft_logits(
        self,
        candidate_ids: torch.Tensor,  # [R, S, K + 1] int64
        num_sample: int,
        idx_mapping: torch.Tensor,  # [max_num_reqs * S] int64
        draft_logits: torch.Tensor,  # [max_num_reqs, S, V] fp32
    ) -> None:
        store_candidates(
            draft_logits,
            candidate_ids.flatten(0, 1)[:, :-1],
            self.scores.flatten(0, 1)[:num_sample, :-1],
            idx_mapping[:num_sample],
        )


class LiLiCorrSpeculator(InTreeSpeculator):
    """vLLM's speculator with this plugin's drafter, head and proposals, also for targets with LoRA adapters."""

    target_embeddings: nn.Module

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        options = Options.from_vllm_config(vllm_config)
        draws = self.draft_logits is not None
        self.top_k = options.candidate_topk or self.top_k
        self.candidate_sampler = ProposalSampler(
            self.max_num_reqs, self.num_speculative_steps, self.top_k + draws, device
        )
        self.walks_by_expected_length = options.walk == "expected-length"
        self.limit_top_k = torch.full((self.max_num_reqs,), self.vocab_size, dtype=torch.int32, device=device)
        self.limit_top_p = torch.ones(self.max_num_reqs, device=device)
        self._runner: weakref.ref[Any]

    def meet_runner(self, runner: Any) -> None:
        """Remembers whose requests this speculator drafts for: it has their top-k and top-p."""
        self._runner = weakref.ref(runner)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """Loads the drafter beside its target and prepares the head; dummy weights too.

        Raises:
            ValueError: the target's token embedding or the LM head is absent, of
                another width, or has added vocabulary rows.
        """
        # Above the in-tree class, whose own checks refuse an embedding with LoRA.
        model = super(InTreeSpeculator, self).load_draft_model(target_model, target_attn_layer_names)
        embedding = without_lora(token_embedding(target_model))
        lm_head = without_lora(getattr(model, "lm_head", None))
        _check_vocabulary("token embedding", embedding)
        _check_vocabulary("LM head", lm_head)
        if embedding.embedding_dim != model.config.hidden_size:
            raise ValueError(
                f"The target's token embedding is {embedding.embedding_dim} wide, but this drafter's head was trained "
                f"on embeddings of {model.config.hidden_size}; use the drafter that was trained for this target."
            )
        self.target_embeddings = embedding
        model.lm_head = lm_head
        model.model.lilicorr.prepare()
        return model

    @torch.inference_mode()
    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Drafts for a batch, as vLLM's does; the requests' limits are copied before a graph is replayed."""
        if self.draft_logits is not None:
            # vLLM moves these buffers from step to step.
            states = self._runner().sampler.sampling_states
            self.limit_top_k.copy_(states.top_k.gpu, non_blocking=True)
            self.limit_top_p.copy_(states.top_p.gpu, non_blocking=True)
        return super().propose(*args, **kwargs)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        hidden_states = self._run_model(
            num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode
        )
        num_rows = num_reqs * self.num_speculative_steps
        self._walk(num_reqs, hidden_states[self.sample_indices[:num_rows]])

    def _walk(
        self,
        num_reqs: int,
        hidden_states: torch.Tensor,  # [R * S, D]
    ) -> None:
        """Writes `draft_tokens` and, where requests may sample, `draft_logits`."""
        shape = (num_reqs, self.num_speculative_steps, self.top_k)
        if self.draft_logits is None:
            candidate_ids, log_probs = self.model.compute_candidates(hidden_states)
        else:
            candidate_ids, log_probs, logits = self.model.compute_candidates_and_logits(hidden_states)
        candidate_ids, log_probs = candidate_ids.view(shape), log_probs.view(shape)
        edge_logits = self._score_candidates(candidate_ids, log_probs, hidden_states.view(*shape[:2], -1))
        lattice = Lattice(candidate_ids, log_probs, possible_edges(edge_logits, log_probs))
        scores = lattice.edge_logits
        sampling = None
        if self.draft_logits is not None:
            req_states = self.sample_idx_mapping[: num_reqs * shape[1] : shape[1]].clamp_min(0)
            limits = (self.limit_top_k[req_states], self.limit_top_p[req_states])
            sampling = Sampling(self.temperature[req_states], *limits)
            logits = logits.float()
            candidate_ids, scores = self._add_elsewhere(lattice, logits, sampling)
        self.candidate_sampler.sample(
            candidate_ids,
            scores,
            num_reqs,
            self.sample_pos,
            self.sample_idx_mapping,
            self.temperature,
            self.seeds,
            self.draft_tokens,
            self.draft_logits,
            self.use_fp64_gumbel,
        )
        if self.walks_by_expected_length:
            self._take_longest(lattice, sampling)
        if self.enable_adaptive_verification:
            rows = self.candidate_sampler.scores[:num_reqs].flatten(0, 1)
            if sampling is not None:
                rows = self._spread(rows, lattice, logits, sampling)
            num_rows = num_reqs * shape[1]
            self._maybe_predict_acceptance(rows, self.sample_idx_mapping[:num_rows], self.sample_col[:num_rows])

    def _add_elsewhere(
        self,
        lattice: Lattice,
        logits: torch.Tensor,  # [R * S, V] fp32; afterwards -inf for candidates and outside top-k and top-p
        sampling: Sampling,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidate ids [R, S, K + 1] and scores [R, S, K + 1, K + 1], the last of each a token from elsewhere.

        `draft_logits` holds the scores of all tokens from elsewhere afterwards.
        """
        shape = lattice.candidate_ids.shape
        ids = lattice.candidate_ids.flatten(0, 1)
        req_states = self.sample_idx_mapping[: len(ids)]
        is_distribution = lattice.log_probs[:, :, 0].flatten() > IMPOSSIBLE  # others count as uniform
        candidate_logits = logits.gather(1, ids).masked_fill_(~is_distribution[:, None], 0.0)
        log_partition = keep_probable_(
            logits, is_distribution, req_states, self.temperature, self.limit_top_k, self.limit_top_p
        )
        kept_logits = logits.gather(1, ids)
        logits.scatter_(1, ids, -torch.inf)
        # With the cache: only then does every tested vLLM draw the noise that the walk compares with.
        elsewhere = gumbel_sample(
            logits,
            req_states,
            self.temperature,
            self.seeds,
            self.sample_pos[: len(ids)] - 1,  # a draw is keyed by the position before its token
            apply_temperature=True,
            is_drafting=True,
            logits_cache=self.draft_logits,
            logits_cache_col=self.sample_col[: len(ids)],
            use_fp64=self.use_fp64_gumbel,
        )[:, None]
        scores = proposal_scores(
            lattice.edge_logits,
            candidate_logits.view(shape),
            kept_logits.view(shape),
            logits.gather(1, elsewhere).view(shape[:2]),
            log_partition.view(shape[:2]),
            sampling,
        )
        return torch.cat((ids, elsewhere), dim=1).view(*shape[:2], -1), scores

    def _take_longest(self, lattice: Lattice, sampling: Sampling | None) -> None:
        """Gives requests that do not sample the path of the largest expected length."""
        num_reqs, _, top_k = lattice.candidate_ids.shape
        path = expected_length_walk(lattice.edge_logits)
        tokens = lattice.tokens(path)
        realised = rows_along(lattice.edge_logits, path)
        drafts, scores = self.draft_tokens[:num_reqs], self.candidate_sampler.scores[:num_reqs]
        if sampling is not None:
            draws = (sampling.temperature > 0)[:, None]
            tokens = torch.where(draws, drafts, tokens)
            realised = torch.where(draws[:, :, None], scores[:, :, :top_k], realised)
        drafts.copy_(tokens)
        scores[:, :, :top_k].copy_(realised)

    def _spread(
        self,
        rows: torch.Tensor,  # [R * S, K + 1] fp32: the scores that the walk drew from
        lattice: Lattice,
        logits: torch.Tensor,  # [R * S, V] fp32, of tokens from elsewhere; changed in place
        sampling: Sampling,
    ) -> torch.Tensor:
        """What each token scored, [R * S, V] fp32.

        How much of a draft is verified is decided on these rows. They must not show which token
        was drawn from elsewhere, as `rows` do: a decision by the drawn token is not lossless.
        """
        ids = lattice.candidate_ids
        greedy = (sampling.temperature == 0)[:, None].expand(ids.shape[:2]).reshape(-1, 1)
        return logits.masked_fill_(greedy, -torch.inf).scatter_(1, ids.flatten(0, 1), rows[:, : ids.shape[2]])


def _check_vocabulary(name: str, layer: nn.Module | None) -> None:
    if not isinstance(layer, VocabParallelEmbedding):
        raise ValueError(
            f"The {name} is {type(layer).__name__} on this rank, but LiLiCorr drafts over the target's whole "
            "vocabulary; use pipeline_parallel_size=1 and a target with its own token embedding and LM head."
        )
    added = layer.shard_indices.num_added_elements
    if added:
        raise ValueError(
            f"The {name} has {added} added vocabulary rows, but this drafter was trained on the original vocabulary; "
            "serve the target without added tokens, or use a drafter trained with them."
        )
