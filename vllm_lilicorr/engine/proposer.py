# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr on vLLM's V1 model runner, where the CPU build runs.

vLLM's DFlash proposer runs the backbone; this class keeps each request's anchor,
scores the lattice, walks it, and hands the realised proposal rows to the
rejection sampler.
"""

import logging

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_lilicorr.engine.guard import Guard
from vllm_lilicorr.engine.options import Options
from vllm_lilicorr.engine.target_layers import token_embedding, without_lora
from vllm_lilicorr.engine.trace import LatticeTrace
from vllm_lilicorr.method.lattice import IMPOSSIBLE, Lattice, possible_edges
from vllm_lilicorr.method.proposals import Noise, Sampling, sampled_walk
from vllm_lilicorr.method.walks import DETERMINISTIC_WALKS, greedy_walk
from vllm_lilicorr.settings import Settings

logger = logging.getLogger("vllm.lilicorr")

# On a CPU a head this narrow is faster in float32 than in bfloat16 (1.1 against 1.7 ms
# for one request at width 128; equal at 256): small products, and norms that convert.
FLOAT32_HEAD_WIDTH = 128


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
        self._walk = DETERMINISTIC_WALKS.get(Options.from_vllm_config(vllm_config).walk, greedy_walk)
        self._proposals = torch.empty(0, vllm_config.model_config.get_vocab_size(), device=device)
        self._reported_broken = False
        self._anchor_hidden: torch.Tensor
        self._anchor_valid: torch.Tensor
        self._anchor_positions: torch.Tensor
        self._anchor_token_ids: torch.Tensor
        self._guard: Guard | None = None
        self._walked: tuple[Lattice, torch.Tensor]  # of the last draft, and its path [R, S]

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
        if Options.from_vllm_config(self.vllm_config).guard:
            self._guard = Guard(self, self.vllm_config, self._runner, target_model)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Runs head and walks once, so that no request pays for their first call.

        Raises:
            ValueError: the drafter's own weights give scores that are no numbers.
        """
        num_slots, width = self.num_speculative_tokens, self.hidden_size
        states = torch.ones(num_slots, width, dtype=self.dtype, device=self.device)
        self._anchor_hidden = torch.ones(1, width, dtype=self.dtype, device=self.device)
        self._anchor_valid = torch.ones(1, dtype=torch.bool, device=self.device)
        candidate_ids, log_probs, logits = self.model.compute_candidates_and_logits(states)
        edge_logits = self._score(candidate_ids, log_probs, states)
        if not torch.isfinite(edge_logits).all():
            raise ValueError(
                f"The drafter {self.draft_model_config.model!r} scores its candidates with values that are not "
                "numbers: weights of its correlator are NaN or infinite. Export the drafter again."
            )
        shape = edge_logits.shape[:3]
        lattice = Lattice(candidate_ids.view(shape), log_probs.view(shape), edge_logits)
        path = self._walk(edge_logits)
        sampling = Sampling(torch.ones(1, device=self.device))
        noise = Noise.empty(*shape, self.device).draw(generator=torch.Generator(self.device).manual_seed(0))
        sampled_walk(lattice, logits.float().view(*shape[:2], -1), sampling, noise, path)

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
        if self._guard is not None:
            self._guard.before(
                target_token_ids,
                next_token_ids,
                target_positions[0] if target_positions.dim() == 2 else target_positions,
                target_hidden_states,
                cad,
                num_rejected_tokens_gpu,
            )
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

    def _score(
        self,
        candidate_ids: torch.Tensor,  # [R * S, K] int64
        log_probs: torch.Tensor,  # [R * S, K] fp32
        hidden_states: torch.Tensor,  # [R * S, D]
    ) -> torch.Tensor:
        """Edge logits [R, S, K, K] of these candidates."""
        num_reqs, num_slots = self._anchor_valid.shape[0], self.num_speculative_tokens
        return self.model.model.lilicorr(
            self._embed(candidate_ids).view(num_reqs, num_slots, self.model.top_k, -1),
            log_probs.view(num_reqs, num_slots, -1),
            hidden_states.view(num_reqs, num_slots, -1),
            self._anchor_hidden,
            self._anchor_valid,
        )

    def _defined(
        self,
        edge_logits: torch.Tensor,  # [R, S, K, K] fp32
        log_probs: torch.Tensor,  # [R, S, K] fp32
    ) -> torch.Tensor:
        """Edge logits by which every walk is defined; says once whose drafts are not to be trusted."""
        if self.device.type == "cpu":
            if torch.isfinite(edge_logits.sum()) and log_probs.min() > IMPOSSIBLE:
                return edge_logits
            broken = (log_probs[:, :, 0] <= IMPOSSIBLE).any(1) | ~edge_logits.isfinite().flatten(1).all(1)
            if broken.any() and not self._reported_broken:
                self._reported_broken = True
                rows = broken.nonzero()[:, 0].tolist()
                logger.error(
                    "The drafter %r gives logits or scores that are not numbers (first seen in request %s). Output "
                    "stays right, but such drafts are guesses: try another prompt, or export the drafter again.",
                    self.draft_model_config.model,
                    ", ".join(self._runner.input_batch.req_ids[row] for row in rows),
                )
        return possible_edges(edge_logits, log_probs)

    def _logits_as_rows(
        self,
        logits: torch.Tensor,  # [R * S, V]
        log_probs: torch.Tensor,  # [R, S, K] fp32
    ) -> torch.Tensor:
        """The logits [R * S, V] fp32 in a buffer that is kept between steps; valid until the next call.

        Memory: 4 * V bytes a row, for as many rows as any step has needed. A row that is
        not a distribution counts as uniform.
        """
        num_rows = logits.shape[0]
        if num_rows > self._proposals.shape[0]:
            self._proposals = self._proposals.new_empty(num_rows, self._proposals.shape[1])
        rows = self._proposals[:num_rows].copy_(logits)
        rows[log_probs[:, :, 0].flatten() <= IMPOSSIBLE] = 0.0
        return rows

    def _noise(
        self,
        shape: torch.Size,  # R, S, K
        generators: dict[int, torch.Generator],
    ) -> Noise:
        """Noise of one step. A seeded request uses its own generator, and only in steps whose drafts
        count: how its prefill was cut into chunks must not move its stream."""
        noise = Noise.empty(*shape, self.device).draw()
        unfinished = self._runner.discard_request_mask.np
        for row, generator in generators.items():
            if not unfinished[row]:
                noise.draw(row, generator)
        return noise

    def _sample_draft_tokens(
        self,
        hidden_states: torch.Tensor,  # [R * S, D]
        sampling_metadata: SamplingMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens [R * S] int64 and, where requests sample, their proposals [R * S, V] fp32."""
        draws = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
        if draws:
            candidate_ids, log_probs, logits = self.model.compute_candidates_and_logits(hidden_states)
        else:
            candidate_ids, log_probs = self.model.compute_candidates(hidden_states)
        edge_logits = self._score(candidate_ids, log_probs, hidden_states)
        shape = edge_logits.shape[:3]
        log_probs = log_probs.view(shape)
        edge_logits = self._defined(edge_logits, log_probs)
        lattice = Lattice(candidate_ids.view(shape), log_probs, edge_logits)
        path = self._walk(edge_logits)
        proposals = None
        if draws:
            proposals = self._logits_as_rows(logits, log_probs)
            sampling = Sampling(sampling_metadata.temperature, sampling_metadata.top_k, sampling_metadata.top_p)
            noise = self._noise(shape, sampling_metadata.generators)
            path, draft_token_ids = sampled_walk(lattice, proposals.view(*shape[:2], -1), sampling, noise, path)
        else:
            draft_token_ids = lattice.tokens(path)
        self._walked = (lattice, path)
        if self._guard is not None:
            self._guard.after(lattice, draft_token_ids, sampling_metadata)
        if self._trace is not None:
            self._trace.write(
                self._runner.input_batch.req_ids,
                self._anchor_positions,
                self._anchor_token_ids,
                lattice,
                path,
                draft_token_ids,
            )
        return draft_token_ids.flatten(), proposals
