# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr on vLLM's V1 model runner, where the CPU build runs.

vLLM's DFlash proposer runs the backbone; this class keeps each request's anchor,
scores the lattice, walks it, and hands the realised proposal rows to the
rejection sampler.
"""

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_lilicorr.engine.target_layers import token_embedding, without_lora
from vllm_lilicorr.engine.trace import LatticeTrace
from vllm_lilicorr.method.walks import greedy_walk, sampled_walk
from vllm_lilicorr.settings import Settings

# On a CPU a head this narrow is faster in float32 than in bfloat16 (1.1 against 1.7 ms
# for one request at width 128; equal at 256): small products, and norms that convert.
FLOAT32_HEAD_WIDTH = 128


class ProposalBuffer:
    """Proposal distributions over the vocabulary, kept between steps.

    Memory: 4 * V bytes a row, for as many rows (requests * slots) as any step has
    needed. Only the K entries that the last step wrote are cleared.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._probs = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self._written: torch.Tensor | None = None

    def fill(
        self,
        candidate_ids: torch.Tensor,  # [N, K] int64
        rows: torch.Tensor,  # [N, K] fp32
    ) -> torch.Tensor:
        """Rows scattered to the vocabulary, [N, V] fp32, zero elsewhere; valid until the next call."""
        num_rows, vocab_size = candidate_ids.shape[0], self._probs.shape[1]
        if num_rows > self._probs.shape[0]:
            self._probs = self._probs.new_zeros(num_rows, vocab_size)
        elif self._written is not None:
            self._probs[: self._written.shape[0]].scatter_(1, self._written, 0.0)
        self._written = candidate_ids
        return self._probs[:num_rows].scatter_(1, candidate_ids, rows)


class LiLiCorrProposer(DFlashProposer):
    """A DFlash proposer whose block is one path through the candidate lattice."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner=None) -> None:
        if vllm_config.model_config.is_hybrid:
            raise ValueError(
                f"The target {vllm_config.model_config.model!r} has recurrent layers, but speculation on them needs "
                "Model Runner V2: the CPU build's convolution keeps the states of rejected drafts, so that the output "
                "would change, and model runner V1 may split the drafter's layers over KV-cache groups. Serve it with "
                "vLLM's CUDA build, or without speculation."
            )
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        settings = Settings.from_environment()
        traces = settings.trace_file and get_tensor_model_parallel_rank() == 0  # every rank has the same lattice
        self._trace = LatticeTrace(settings.trace_file, settings.trace_lines) if traces else None
        self._proposals = ProposalBuffer(vllm_config.model_config.get_vocab_size(), device)
        self._anchor_hidden: torch.Tensor
        self._anchor_valid: torch.Tensor
        self._anchor_positions: torch.Tensor
        self._anchor_token_ids: torch.Tensor

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.model.model.embed_tokens = without_lora(self.model.model.embed_tokens)
        self.model.lm_head = without_lora(self.model.lm_head)
        self._embed = without_lora(token_embedding(target_model))
        head = self.model.model.lilicorr
        if self.device.type == "cpu" and head.geometry.head_width <= FLOAT32_HEAD_WIDTH:
            head.float()
        head.prepare()
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Runs the head once, so that no request pays for its first call."""
        num_slots, width = self.num_speculative_tokens, self.hidden_size
        states = torch.zeros(num_slots, width, dtype=self.dtype, device=self.device)
        self._anchor_hidden = torch.zeros(1, width, dtype=self.dtype, device=self.device)
        self._anchor_valid = torch.zeros(1, dtype=torch.bool, device=self.device)
        _, _, edge_logits = self._lattice(states)
        ones = torch.ones(edge_logits.shape[:3], device=self.device)
        sampled_walk(edge_logits, ones[:, 0, 0], ones)

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,  # [num_context, D] after fc
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Keeps each request's anchor: its last committed row, once rejected tokens are dropped."""
        num_reqs = cad.batch_size()
        starts = cad.query_start_loc[:num_reqs].long()
        ends = cad.query_start_loc[1 : num_reqs + 1].long()
        if num_rejected_tokens_gpu is not None:
            ends = ends - num_rejected_tokens_gpu[:num_reqs]
        self._anchor_valid = ends > starts
        last = (ends - 1).clamp_min(0)
        self._anchor_hidden = self.model.model.hidden_norm(target_hidden_states[last])
        if self._trace is not None:
            positions = target_positions[0] if target_positions.dim() == 2 else target_positions
            self._anchor_positions = positions[last] + 1
            self._anchor_token_ids = next_token_ids
        return super().set_inputs_first_pass(
            target_token_ids,
            next_token_ids,
            target_positions,
            target_hidden_states,
            token_indices_to_sample,
            cad,
            num_rejected_tokens_gpu,
        )

    def _lattice(
        self,
        hidden_states: torch.Tensor,  # [R * S, D]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Candidate ids and log-probabilities [R, S, K], edge logits [R, S, K, K]."""
        candidate_ids, log_probs = self.model.compute_candidates(hidden_states)
        num_reqs = self._anchor_valid.shape[0]
        candidate_ids = candidate_ids.view(num_reqs, self.num_speculative_tokens, -1)
        log_probs = log_probs.view_as(candidate_ids)
        edge_logits = self.model.model.lilicorr(
            self._embed(candidate_ids),
            log_probs,
            hidden_states.view(num_reqs, self.num_speculative_tokens, -1),
            self._anchor_hidden,
            self._anchor_valid,
        )
        return candidate_ids, log_probs, edge_logits

    def _sample_draft_tokens(
        self,
        hidden_states: torch.Tensor,  # [R * S, D]
        sampling_metadata: SamplingMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens [R * S] int64 and, where requests sample, their proposals [R * S, V] fp32."""
        candidate_ids, log_probs, edge_logits = self._lattice(hidden_states)
        proposals = None
        if sampling_metadata.all_greedy or not self._enable_probabilistic_draft_probs:
            path = greedy_walk(edge_logits)
        else:
            noise = torch.empty_like(log_probs).exponential_()
            for row, generator in sampling_metadata.generators.items():
                noise[row].exponential_(generator=generator)
            path, rows = sampled_walk(edge_logits, sampling_metadata.temperature, noise)
            proposals = self._proposals.fill(candidate_ids.flatten(0, 1), rows.flatten(0, 1))
        draft_token_ids = candidate_ids.gather(2, path[:, :, None])[:, :, 0]
        if self._trace is not None:
            self._trace.write(
                self._runner.input_batch.req_ids,
                self._anchor_positions,
                self._anchor_token_ids,
                candidate_ids,
                log_probs,
                edge_logits,
                path,
                draft_token_ids,
            )
        return draft_token_ids.flatten(), proposals
