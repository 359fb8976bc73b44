# SPDX-License-Identifier: Apache-2.0
"""Watches drafts while serving and says once where the drafter looks broken (model runner V1).

It counts in windows of WINDOW_DRAFTS drafts with REST_STEPS draft steps between them.
Where few first tokens are accepted, it examines the drafter (engine/examination.py), a
few alternatives per step. Nothing that is served depends on it.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_lilicorr.engine.examination import Alternative, Examiner, likely_target_layers
from vllm_lilicorr.engine.transcripts import LayerTap, Transcripts
from vllm_lilicorr.method.health import Comparison, DraftCounts, Examination, diagnose, report
from vllm_lilicorr.method.lattice import Lattice

logger = logging.getLogger("vllm.lilicorr")

WINDOW_DRAFTS, REST_STEPS = 256, 8192
# Drafts after which an examination is no longer waited for: nothing was served from its first token on.
MOST_DRAFTS = 4 * WINDOW_DRAFTS
# Positions of an examination: as many as can be had, but not fewer.
LEAST_POSITIONS, MOST_POSITIONS = 40, 80
# Seconds of one step after which the examination waits for the next.
_STEP_SECONDS = 0.1


class Guard:
    """Sees every draft of one proposer and what became of it; `before` and `after` frame each draft."""

    def __init__(self, proposer: Any, vllm_config: VllmConfig, runner: Any, target_model: nn.Module) -> None:
        self._proposer, self._runner = proposer, runner
        self._drafter_name, self._target_name = proposer.draft_model_config.model, vllm_config.model_config.model
        self._num_slots = proposer.num_speculative_tokens
        geometry = proposer.model.geometry
        self._layer_ids = geometry.target_layer_ids
        self._examines = vllm_config.parallel_config.world_size == 1 and Examiner.can_examine(proposer.model)
        is_eager = vllm_config.model_config.enforce_eager  # else hooks are not called
        self._layers = _decoder_layers(target_model) if self._examines and is_eager else None
        self._row_bytes = geometry.hidden_size * proposer.dtype.itemsize
        self._target_row_bytes = vllm_config.model_config.get_hidden_size() * proposer.dtype.itemsize
        self.is_done = False
        self._steps_to_rest = 0
        self._begin_window()

    def _begin_window(self) -> None:
        self.counts = DraftCounts(self._num_slots, self._proposer.model.top_k)
        self._made: dict[str, Any] | None = None  # what the next draft is made from
        self._last: dict[str, Any] | None = None  # a draft whose outcome is not known
        self._examination: Iterator[Examination | None] | None = None
        self._result: Examination | None = None
        self._has_rested = False
        self._has_to_wait = False
        self._transcripts: Transcripts | None = None
        if not self._examines:
            return
        tap, row_bytes = None, self._row_bytes
        if self._layers is not None:
            others = likely_target_layers(self._layer_ids, len(self._layers))
            wanted = sorted({layer for ids in (self._layer_ids, *others) for layer in ids})
            tap = LayerTap(self._layers, wanted)
            row_bytes += len(wanted) * self._target_row_bytes
        self._transcripts = Transcripts(row_bytes, tap)

    def _end_window(self) -> None:
        if self._transcripts is not None:
            self._transcripts.close()
        self._transcripts, self._last, self._made, self._examination = None, None, None, None
        self._steps_to_rest, self._has_rested = REST_STEPS, True

    def before(
        self,
        target_token_ids: torch.Tensor,  # [N] int32
        next_token_ids: torch.Tensor,  # [R] int32
        positions: torch.Tensor,  # [N] int64
        features: torch.Tensor,  # [N, D] after fc
        cad: CommonAttentionMetadata,
        num_rejected: torch.Tensor | None,  # [R] int32
    ) -> None:
        """Learns what became of the last draft, and keeps what the next one is made from."""
        if self.is_done:
            return
        if self._steps_to_rest:
            self._steps_to_rest -= 1
            return
        with self._or_off():
            self._before(target_token_ids, next_token_ids, positions, features, cad, num_rejected)

    def after(
        self,
        lattice: Lattice,
        draft_token_ids: torch.Tensor,  # [R, S] int64
        metadata: SamplingMetadata,
    ) -> None:
        """Keeps a draft until it is known what became of it, and judges what is known."""
        if self.is_done or self._made is None:
            return
        with self._or_off():
            self._after(lattice, draft_token_ids, metadata)

    @contextmanager
    def _or_off(self) -> Iterator[None]:
        """A guard must not end what it watches."""
        try:
            yield
        except Exception as error:
            logger.warning("The guard of the drafter is off: %s: %s", type(error).__name__, error)
            self._end_window()
            self.is_done = True

    def _before(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        cad: CommonAttentionMetadata,
        num_rejected: torch.Tensor | None,
    ) -> None:
        if self._has_rested:
            self._begin_window()
        num_reqs = cad.batch_size()
        bounds = cad.query_start_loc_cpu[: num_reqs + 1].numpy()
        starts, num_computed = bounds[:-1], np.diff(bounds)
        rejected = np.zeros(num_reqs, np.int64) if num_rejected is None else num_rejected[:num_reqs].cpu().numpy()
        ends = bounds[1:] - rejected
        token_ids, next_ids = target_token_ids.cpu(), next_token_ids.cpu().numpy()
        first_positions = positions.cpu().numpy()[starts]
        request_ids = self._runner.input_batch.req_ids[:num_reqs]
        is_partial = self._runner.discard_request_mask.np[:num_reqs].copy()
        if self._last is not None:
            self._learn(request_ids, token_ids.numpy()[starts], next_ids, first_positions, num_computed, rejected)
        if self._transcripts is not None:
            self._transcripts.add(request_ids, starts, ends, first_positions, is_partial, token_ids, next_ids, features)
        row = self.counts.anchors % num_reqs
        self._made = {
            "request_ids": list(request_ids),
            "positions": first_positions + num_computed - rejected,
            "is_partial": is_partial,
            "row": row,
            "anchor": features[max(int(ends[row]) - 1, 0)].clone(),
        }

    def _after(self, lattice: Lattice, draft_token_ids: torch.Tensor, metadata: SamplingMetadata) -> None:
        if draft_token_ids.shape[1] != self._num_slots:  # vLLM may ask for fewer at some batch sizes
            self._last = None
            return
        made, counts = self._made, self.counts
        row = made["row"]
        anchor = self._proposer.model.model.hidden_norm(made["anchor"][None])[0]
        counts.anchors += 1
        is_right = torch.allclose(anchor, self._proposer._anchor_hidden[row], rtol=0.05, atol=0.05)
        counts.wrong_anchors += not (is_right and bool(self._proposer._anchor_valid[row]))
        num_reqs = len(made["request_ids"])
        given = self._proposer.input_ids[: num_reqs * (1 + self._num_slots)].view(num_reqs, -1)[:, 0]
        temperature = np.zeros(num_reqs) if metadata.all_greedy else metadata.temperature[:num_reqs].cpu().numpy()
        self._last = made | {
            "anchor_token_ids": given.cpu().numpy().copy(),
            "candidate_ids": lattice.candidate_ids.cpu().numpy(),
            "log_probs": lattice.log_probs.float().cpu().numpy(),
            "start_logits": lattice.edge_logits[:, 0, 0].float().cpu().numpy(),
            "draft_token_ids": draft_token_ids.cpu().numpy(),
            "temperature": temperature,
        }
        self._judge()

    def _learn(
        self,
        request_ids: list[str],
        first_token_ids: np.ndarray,  # [R] int32
        next_token_ids: np.ndarray,  # [R] int32
        first_positions: np.ndarray,  # [R] int64
        num_computed: np.ndarray,  # [R]
        rejected: np.ndarray,  # [R]
    ) -> None:
        last = self._last
        if last["request_ids"] == request_ids:
            mine = np.arange(len(request_ids))
        else:
            row_of = {request_id: row for row, request_id in enumerate(last["request_ids"])}
            mine = np.array([row_of.get(request_id, -1) for request_id in request_ids])
        # Others were preempted, or go on with their prompt.
        goes_on = (mine >= 0) & (last["positions"][mine] == first_positions) & ~last["is_partial"][mine]
        goes_on &= num_computed <= 1 + self._num_slots
        goes_on &= last["temperature"][mine] <= 1  # hotter text is another one than the drafter was trained on
        mine, theirs = mine[goes_on], goes_on.nonzero()[0]
        if not len(mine):
            return
        counts = self.counts
        counts.anchor_tokens += len(mine)
        counts.wrong_anchor_tokens += int((last["anchor_token_ids"][mine] != first_token_ids[theirs]).sum())
        counts.observe(
            last["candidate_ids"][mine],
            last["log_probs"][mine],
            last["start_logits"][mine],
            last["draft_token_ids"][mine],
            num_computed[theirs] - 1,
            num_computed[theirs] - 1 - rejected[theirs],
            next_token_ids[theirs],
            last["temperature"][mine] == 0,
        )

    def _judge(self) -> None:
        if self._examination is None and self._transcripts is not None and self.counts.is_poor:
            self._examination = self._examine()
        begun = time.perf_counter()
        while self._examination is not None and self._result is None:
            self._result = next(self._examination)
            if self._has_to_wait or time.perf_counter() - begun > _STEP_SECONDS:
                break
        waits = self._examination is not None and self._result is None and self.counts.drafts < MOST_DRAFTS
        causes = [] if waits else diagnose(self.counts, self._result)
        if causes:
            logger.warning("%s", report(causes, self.counts, self._drafter_name, self._target_name))
            self._end_window()
            self.is_done = True
        elif self.counts.drafts >= WINDOW_DRAFTS and not waits:
            self._end_window()

    @torch.inference_mode()
    def _examine(self) -> Iterator[Examination | None]:
        """Yields None after each piece of work, and the result at last."""
        while self._transcripts.num_positions(self._num_slots) < LEAST_POSITIONS:
            self._has_to_wait = True
            yield None
        self._has_to_wait = False
        finished = self._transcripts.finished()
        transcripts = [one for one in finished if len(one.anchors(self._num_slots, MOST_POSITIONS))]
        examiner = Examiner(self._proposer.model, self._num_slots)
        asked = examiner.alternatives(self._layer_ids, len(self._layers or ()))
        captured = set(self._layer_ids).issubset(transcripts[0].layers) and all(
            set(transcripts[0].layers) == set(one.layers) for one in transcripts
        )
        if captured:
            served = examiner.combine(transcripts[0], self._layer_ids)
            captured = torch.allclose(served, transcripts[0].context, rtol=0.05, atol=0.05)
        as_served = examiner.score(transcripts, Alternative(), MOST_POSITIONS).numpy()
        compared: dict[tuple[str, str], Comparison] = {}
        foreign = None
        for alternative in asked:
            if alternative.target_layer_ids and not captured or alternative.foreign_context and len(transcripts) < 2:
                continue
            yield None
            scores = examiner.score(transcripts, alternative, MOST_POSITIONS).numpy()
            comparison = Comparison.of(scores, as_served)
            if alternative.foreign_context:
                foreign = comparison
            else:
                compared[alternative.kind, alternative.description] = comparison
        yield Examination(compared, foreign, len(as_served))


def _decoder_layers(target_model: nn.Module) -> nn.ModuleList | None:
    """The target's decoder layers, where they are kept as usual."""
    language_model = target_model.get_language_model() if hasattr(target_model, "get_language_model") else target_model
    layers = getattr(getattr(language_model, "model", language_model), "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else None
