# SPDX-License-Identifier: Apache-2.0
"""Records what Model Runner V2's speculators draft, from outside: no product code takes part."""

from typing import Any

import torch
from host_syncs import HostSyncs
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler, DFlash2Speculator

from vllm_lilicorr.engine.speculator import LiLiCorrSpeculator

# Tensors that a captured graph reads or writes: their addresses may never change.
FIXED = (
    "anchor_hidden",
    "anchor_valid",
    "hidden_states",
    "draft_tokens",
    "draft_logits",
    "sample_indices",
    "limit_top_k",
    "limit_top_p",
)


class Recorder:
    """Wraps vLLM's speculator classes; `drafts` grows with every step of any engine."""

    def __init__(self) -> None:
        self.clear(watch=False)
        recorder = self
        propose, sample = DFlash2Speculator.propose, CandidateSampler.sample
        generate, add_elsewhere = LiLiCorrSpeculator._generate_draft, LiLiCorrSpeculator._add_elsewhere

        def recorded_sample(self, candidate_ids, scores, num_reqs, *rest, **named):
            if recorder._inputs is None:
                recorder._lattice = (candidate_ids.clone(), scores.clone())
            return sample(self, candidate_ids, scores, num_reqs, *rest, **named)

        def recorded_add_elsewhere(self, lattice, logits, sampling):
            recorder._lattice = (lattice.candidate_ids.clone(), lattice.edge_logits.clone())
            recorder._inputs = (logits.clone(), sampling)
            return add_elsewhere(self, lattice, logits, sampling)

        def recorded_propose(self, input_batch, *rest, dummy_run=False, **named):
            tokens = propose(self, input_batch, *rest, dummy_run=dummy_run, **named)
            if not dummy_run:
                recorder._record(self, input_batch.req_ids, tokens)
            return tokens

        def watched_generate(self, num_reqs, *rest, **named):
            if not recorder._watch:
                return generate(self, num_reqs, *rest, **named)
            with HostSyncs() as syncs:
                generate(self, num_reqs, *rest, **named)
            recorder._watched(self, num_reqs, syncs)

        DFlash2Speculator.propose = recorded_propose
        LiLiCorrSpeculator._generate_draft = watched_generate
        LiLiCorrSpeculator._add_elsewhere = recorded_add_elsewhere
        CandidateSampler.sample = recorded_sample

    def clear(self, watch: bool) -> None:
        """Forgets everything; with `watch`, operators and addresses are recorded too."""
        self.drafts: list[dict[str, Any]] = []
        self.speculator: str | None = None
        self.watched = {"host_syncs": [], "operators": [], "addresses": {}, "batch_sizes": []}
        self._watch = watch
        self._inputs: tuple[torch.Tensor, Any] | None = None  # of a step that may draw

    def _record(self, speculator: Any, request_ids: list[str], tokens: torch.Tensor) -> None:
        kind = type(speculator)
        self.speculator = f"{kind.__module__}.{kind.__qualname__}"
        num_reqs, num_slots = tokens.shape
        candidate_ids, scores = self._lattice
        positions = speculator.sample_pos[: num_reqs * num_slots].view(num_reqs, num_slots)
        states = speculator.sample_idx_mapping[: num_reqs * num_slots].view(num_reqs, num_slots)
        for row, request_id in enumerate(request_ids[:num_reqs]):
            draft = {
                "request": int(request_id.partition("-")[0]),
                "anchor_position": int(positions[row, 0]) - 1,
                "tokens": tokens[row].tolist(),
                "candidate_ids": candidate_ids[row].tolist(),
                "edge_logits": scores[row].tolist(),
            }
            if self._inputs is not None:
                logits, sampling = self._inputs
                draft["logits"] = logits.view(num_reqs, num_slots, -1)[row].tolist()
                draft["draft_logits"] = speculator.draft_logits[states[row, 0]].tolist()
                draft |= {name: getattr(sampling, name)[row].item() for name in ("temperature", "top_k", "top_p")}
            self.drafts.append(draft)

    def _watched(self, speculator: Any, num_reqs: int, syncs: HostSyncs) -> None:
        watched = self.watched
        watched["host_syncs"] += syncs.found
        watched["operators"] = sorted(syncs.seen.union(watched["operators"]))
        watched["batch_sizes"].append(num_reqs)
        tensors = {name: getattr(speculator, name) for name in FIXED}
        head = speculator.model.model.lilicorr
        tensors |= {f"head.{name}": value for name, value in vars(head).items()}
        tensors |= {f"head.{name}": value for name, value in head.named_parameters()}
        tensors["target_embeddings"] = speculator.target_embeddings.weight
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                addresses = watched["addresses"].setdefault(name, [])
                if value.data_ptr() not in addresses:
                    addresses.append(value.data_ptr())
