# SPDX-License-Identifier: Apache-2.0
"""The V1 proposer with an adaptive draft length: fewer tokens where they do not pay, or none at all.

A proposal becomes a list of as many tokens per request as the policy wants verified;
the proposal rows stay whole, vLLM reads the first ones. While the drafter is suspended
its context is deferred, so that a step costs little more than without speculation.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_lilicorr.engine.deferred_context import DeferredContext, committed_rows
from vllm_lilicorr.engine.draft_costs import measure_costs
from vllm_lilicorr.engine.draft_length import DraftLengthPolicy, StepView
from vllm_lilicorr.engine.options import Options
from vllm_lilicorr.engine.proposer import LiLiCorrProposer
from vllm_lilicorr.engine.step_costs import StepCosts, curves_in_seconds
from vllm_lilicorr.method.calibration import AcceptanceEstimator, path_features
from vllm_lilicorr.method.lattice import Lattice

logger = logging.getLogger("vllm.lilicorr")


class AdaptiveProposer(LiLiCorrProposer):
    """A LiLiCorr proposer that may propose less; with adaptive_length off, the same as its base."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self._options = Options.from_vllm_config(vllm_config)
        self._adapts = self._options.adaptive_length and self._may_adapt(vllm_config)
        self._num_slots = self.num_speculative_tokens
        self._target_alone = False
        self._policy: DraftLengthPolicy | None = None
        self._deferred: DeferredContext | None = None

    def _may_adapt(self, vllm_config: VllmConfig) -> bool:
        """Whether this engine can take proposals of any length; says why not."""
        if vllm_config.scheduler_config.async_scheduling:
            reason = "async scheduling needs every proposal's length in advance"
        elif vllm_config.parallel_config.data_parallel_size > 1:
            reason = "the ranks of data parallelism must draft together"
        else:
            return True
        logger.warning("adaptive_length is off: %s.", reason)
        return False

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        if not self._adapts:
            return
        # A KV-cache group of the drafter's own shares its memory with the target's: a row that is written
        # later could hit a block that is the target's by then. A connector sends blocks on as they are.
        may_defer = len(kv_cache_config.kv_cache_groups) == 1 and self.vllm_config.kv_transfer_config is None
        bounds = {} if may_defer else {"max_rows": 0}
        is_needed = None if self.vllm_config.cache_config.enable_prefix_caching else self._belongs_to_a_request
        self._deferred = DeferredContext(self._write_context, self.max_num_tokens, is_needed, **bounds)

    def start_adapting(self) -> None:
        """Measures what steps cost; until then nothing is drafted. The first rank decides for all."""
        if not self._adapts or self._policy is not None:
            return
        if self._options.cost_curve is None:  # on every rank: the models' layers need all of them
            target, drafter = measure_costs(self, self._runner)
        else:
            target, drafter = curves_in_seconds(self._options.cost_curve)
        if get_tp_group().is_first_rank:
            costs = StepCosts(target, drafter, self._num_slots)
            self._policy = DraftLengthPolicy(AcceptanceEstimator(self._num_slots), costs, self._num_slots)

    @property
    def adapts(self) -> bool:
        """Whether proposals may be shorter than asked for, or absent."""
        return self._adapts

    def propose(self, num_speculative_tokens: int, **inputs: Any) -> torch.Tensor | list[list[int]]:
        """Draft tokens [R, S] int64, or lists of 0 to S tokens per request."""
        if self._deferred is None:
            return super().propose(num_speculative_tokens, **inputs)
        cad: CommonAttentionMetadata = inputs["common_attn_metadata"]
        num_reqs = cad.batch_size()
        if not self.agreed(self._policy is not None and self._decide(num_speculative_tokens, cad, inputs)):
            self._last_draft_probs = None
            self._defer(cad, inputs)
            return [[] for _ in range(num_reqs)]
        if self._deferred.flush() and self._policy is not None:
            self._policy.exclude_from_timing()
        tokens = super().propose(num_speculative_tokens, **inputs)
        if self._policy is None:
            return tokens.tolist()
        if self._last_draft_probs is None:
            features = path_features(*self._walked, None)
            lengths = self._policy.choose(features, np.zeros(num_reqs, dtype=bool))
        else:
            is_sampled = inputs["sampling_metadata"].temperature > 0
            features = path_features(*self._walked, self._last_draft_probs.amax(dim=2), is_sampled)
            is_seeded = np.zeros(num_reqs, dtype=bool)
            is_seeded[_seeded_rows(inputs)] = True
            lengths = self._policy.choose(features, is_sampled.cpu().numpy(), is_seeded)
        return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,  # [R, at least 1] int32
        requests: dict[str, Any],
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,  # [>= R] bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each request's last token and how many it got, [R] int32; vLLM's own way takes a loop over requests."""
        if self._deferred is not None and sampled_token_ids.shape[1] == 1:
            next_token_ids = sampled_token_ids[:, 0].int()
            if not discard_request_mask[: len(next_token_ids)].any():
                return next_token_ids, torch.ones_like(next_token_ids)
        return super().prepare_next_token_ids_padded(sampled_token_ids, requests, gpu_input_batch, discard_request_mask)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,  # [R] int32
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor | None]:
        """As without speculation where nothing was verified: nothing was rejected."""
        if self._deferred is not None and not any(spec_decode_metadata.num_draft_tokens):
            return common_attn_metadata, common_attn_metadata.query_start_loc[1:] - 1, None
        return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count)

    def dummy_run(self, num_tokens: int, *args: Any, **options: Any) -> None:
        if not self._target_alone:
            super().dummy_run(num_tokens, *args, **options)

    @contextmanager
    def without_dummy_run(self) -> Iterator[None]:
        """The runner's dummy runs leave the drafter out."""
        self._target_alone = True
        try:
            yield
        finally:
            self._target_alone = False

    @torch.inference_mode()
    def dummy_draft(self, num_reqs: int) -> None:
        """The work of a draft for so many requests, on states that mean nothing."""
        super().dummy_run(min(num_reqs * (1 + self._num_slots), self.max_num_tokens), use_cudagraphs=False)
        width = self.hidden_size
        states = torch.zeros(num_reqs * self._num_slots, width, dtype=self.dtype, device=self.device)
        self._anchor_hidden = torch.zeros(num_reqs, width, dtype=self.dtype, device=self.device)
        self._anchor_valid = torch.zeros(num_reqs, dtype=torch.bool, device=self.device)
        candidate_ids, log_probs = self.model.compute_candidates(states)
        edge_logits = self._score(candidate_ids, log_probs, states)
        shape = edge_logits.shape[:3]
        lattice = Lattice(candidate_ids.view(shape), log_probs.view(shape), edge_logits)
        path_features(lattice, self._walk(edge_logits), None)

    def _decide(self, num_speculative_tokens: int, cad: CommonAttentionMetadata, inputs: dict[str, Any]) -> bool:
        num_reqs = cad.batch_size()
        num_computed = np.diff(cad.query_start_loc_cpu[: num_reqs + 1].numpy())
        rejected = inputs["num_rejected_tokens_gpu"]
        view = StepView(
            now=time.perf_counter(),
            request_ids=self._runner.input_batch.req_ids[:num_reqs],
            num_computed=num_computed,
            num_rejected=np.zeros_like(num_computed) if rejected is None else rejected[:num_reqs].cpu().numpy(),
            is_partial=self._runner.discard_request_mask.np[:num_reqs].copy(),
            find_first_positions=lambda: (
                _token_positions(inputs["target_positions"])[cad.query_start_loc[:num_reqs]].cpu().numpy()
            ),
        )
        return self._policy.begin_step(
            view, can_draft=num_speculative_tokens > 0, must_draft=bool(_seeded_rows(inputs))
        )

    def agreed(self, decision: bool) -> bool:
        """The first rank's decision: timings differ between ranks, and the drafter's layers need all of them."""
        group = get_tp_group()
        if group.world_size == 1:
            return decision
        shared = torch.tensor([decision], dtype=torch.uint8)
        torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
        return bool(shared)

    def _defer(self, cad: CommonAttentionMetadata, inputs: dict[str, Any]) -> None:
        features, rejected = inputs["target_hidden_states"], inputs["num_rejected_tokens_gpu"]
        num_reqs, num_tokens = cad.batch_size(), features.shape[0]
        if not self.eagle3_use_aux_hidden_state:  # then the runner's own buffer
            features = features.clone()
        rows = None
        if rejected is not None and rejected[:num_reqs].any():
            rows = committed_rows(cad.query_start_loc[: num_reqs + 1], rejected[:num_reqs])
        positions = _token_positions(inputs["target_positions"])[:num_tokens]
        if self._deferred.defer(features, positions, cad.slot_mapping[:num_tokens], rows) and self._policy is not None:
            self._policy.exclude_from_timing()

    def _belongs_to_a_request(
        self,
        slots: torch.Tensor,  # [N] int64
    ) -> torch.Tensor:
        """Which slots [N] bool lie in a block of a request that has not ended, scheduled in this step or not."""
        blocks = [request.block_ids[self.kv_cache_gid] for request in self._runner.requests.values()]
        held = torch.tensor([block for row in blocks for block in row], dtype=torch.int64, device=slots.device)
        return torch.isin(slots // self.block_size, held)

    @torch.inference_mode()
    def _write_context(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        states = self.model.combine_hidden_states(features)
        self.model.precompute_and_store_context_kv(states, positions, slots)


def _seeded_rows(inputs: dict[str, Any]) -> list[int]:
    """Rows of the batch that draw from a generator of their own: what they consume must not depend on timings."""
    metadata = inputs["sampling_metadata"]
    return [] if metadata.all_greedy else list(metadata.generators)


def _token_positions(
    positions: torch.Tensor,  # [N] int64, or [3, N] for M-RoPE
) -> torch.Tensor:
    """Positions [N] of the drafter's rotary embedding."""
    return positions[0] if positions.dim() == 2 else positions
