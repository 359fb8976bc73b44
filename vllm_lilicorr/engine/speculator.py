# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr on vLLM's Model Runner V2, where the CUDA build runs.

vLLM's speculator runs the backbone, keeps the anchors and walks the lattice with
its own kernel: the walk draws the noise that the rejection sampler expects and
caches the realised proposal (-inf outside the K candidates). The lattice is
scored by this plugin's head, which vLLM calls as the drafter's `model.lilicorr`.

A draft step may be captured as a FULL CUDA graph. Nothing here waits for the
device, and what a step reads or writes keeps its address: anchors, `draft_logits`
and the walk's buffers are allocated once for max_num_seqs requests, the head's
buffers in `prepare`, before any capture.
"""

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator as InTreeSpeculator

from vllm_lilicorr.engine.target_layers import token_embedding, without_lora


class LiLiCorrSpeculator(InTreeSpeculator):
    """vLLM's speculator with this plugin's drafter and head, also for targets with LoRA adapters."""

    target_embeddings: nn.Module

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
