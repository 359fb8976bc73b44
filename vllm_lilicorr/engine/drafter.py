# SPDX-License-Identifier: Apache-2.0
"""The LiLiCorr drafter as a vLLM model: vLLM's DFlash backbone, our correlator head.

Registered for the architecture "LiLiCorrDraftModel" in place of the in-tree class;
attribute names (`model.lilicorr`, `compute_candidates`, `has_own_lm_head`) are the
ones that vLLM's speculator reads.
"""

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3DecoderLayer
from vllm.platforms import current_platform

from vllm_lilicorr.checkpoint.layout import HEAD_PREFIX, canonical_name, check_tensors
from vllm_lilicorr.checkpoint.quantization import describe, logical_shapes
from vllm_lilicorr.engine.drafter_quantization import loadable, number_layers
from vllm_lilicorr.engine.options import Options
from vllm_lilicorr.kernels.reference import merge_candidates, partial_candidates
from vllm_lilicorr.method.geometry import DrafterGeometry
from vllm_lilicorr.method.head import LiLiCorrHead
from vllm_lilicorr.method.lattice import finite_log_probs


class LiLiCorrBackbone(DFlashQwen3Model):
    """DFlash layers (plain, or with grouped convolutions) and the head beside them."""

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = "") -> None:
        speculative_config = vllm_config.speculative_config
        geometry = DrafterGeometry.from_config(speculative_config.draft_model_config.hf_config.to_dict())
        num_speculative_tokens = speculative_config.num_speculative_tokens
        if not 1 <= num_speculative_tokens <= geometry.num_slots:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}, but this drafter was trained with "
                f"block_size {geometry.block_size}; use 1..{geometry.num_slots}."
            )
        if geometry.conv_kernel_size:
            self.decoder_layer_cls = DFlash2Qwen3DecoderLayer
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        self.lilicorr = LiLiCorrHead(geometry)


class LiLiCorrForCausalLM(DFlashQwen3ForCausalLM):
    """Drafter with candidates over the target's full vocabulary.

    The head is replicated under tensor parallelism: candidates, embeddings and
    states are the same on every rank, so is the lattice.
    """

    model_cls = LiLiCorrBackbone

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        draft_config = vllm_config.speculative_config.draft_model_config
        number_layers(draft_config.hf_config, vllm_config.model_config.get_total_num_hidden_layers())
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.geometry = self.model.lilicorr.geometry
        if self.draft_id_to_target_id is not None:
            raise ValueError(
                f"draft_vocab_size={self.config.draft_vocab_size}, but LiLiCorr candidates need the target's "
                f"vocabulary of {vllm_config.model_config.get_vocab_size()}; use a drafter trained for this target."
            )
        self.has_own_lm_head = self.geometry.has_own_lm_head
        self.top_k = Options.from_vllm_config(vllm_config).candidate_topk or self.geometry.top_k

    def compute_candidates(
        self,
        hidden_states: torch.Tensor,  # [N, D]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The top-K of each row: ids [N, K] int64, best first, and their fp32 log-probabilities
        under the softmax over the full vocabulary (padding excluded, all ranks included).

        Ids are tokens of the vocabulary whatever the logits; log-probabilities are finite.
        """
        head = self.lm_head
        logits = head.quant_method.apply(head, hidden_states)
        if get_tensor_model_parallel_world_size() == 1:
            return self._top_candidates(logits, head.shard_indices.num_org_vocab_padding)
        values, ids, partition = partial_candidates(logits, self.top_k, head.shard_indices.num_org_vocab_padding)
        # Ids travel as fp32, exact below 2**24: the CPU build gathers no integers.
        ids = (ids + head.shard_indices.org_vocab_start_index).float()
        values, ids, partitions = (tensor_model_parallel_all_gather(part) for part in (values, ids, partition))
        ids, log_probs = merge_candidates(values, ids.long(), partitions, self.top_k)
        return ids, finite_log_probs(log_probs)

    def compute_candidates_and_logits(
        self,
        hidden_states: torch.Tensor,  # [N, D]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`compute_candidates` and the logits [N, V] over the full vocabulary, of every rank."""
        logits = self.compute_logits(hidden_states)
        return *self._top_candidates(logits), logits

    def _top_candidates(self, logits: torch.Tensor, num_padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids, partition = partial_candidates(logits, self.top_k, num_padding)
        return ids, finite_log_probs(values - partition)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads any naming of checkpoint/layout.py and any format of checkpoint/quantization.py, after comparing
        every tensor with config.json.

        Raises:
            ValueError: tensors are missing, unexpected or wrongly shaped; lists them all.
        """
        tensors = {canonical_name(name): tensor for name, tensor in weights}
        check_tensors(self.geometry, logical_shapes(describe(tensors)))
        tensors = loadable(
            tensors,
            own_lm_head=self.geometry.has_own_lm_head,
            on_cpu=current_platform.is_cpu(),
            dtype=self.draft_model_config.dtype,
        )
        head = {
            name.removeprefix(HEAD_PREFIX): tensors.pop(name) for name in list(tensors) if name.startswith(HEAD_PREFIX)
        }
        super().load_weights(tensors.items())
        self.model.lilicorr.load_state_dict(head)
        self.model.lilicorr.prepare()
