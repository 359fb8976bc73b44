# SPDX-License-Identifier: Apache-2.0
"""From logits to draft tokens: the correlator head as a row of launches.

    1           partial_candidates       logits, read once
    1           project                  candidates joined; rows of features, drafter states and anchors
    1           encode                   nodes
    5 a layer   linear (the first: linear_pair), lattice_attention, linear + residual, linear, linear + residual
    1           factors
    1           linear                   outgoing and incoming vectors
    1           score_and_walk           edge logits, draft tokens

16 launches for two layers; two more where the token table would be too large (`max_table_bytes`).
Weights, nodes and vectors keep the head's dtype; products, norms, softmax and scores are fp32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_lilicorr.kernels.attention import lattice_attention
from vllm_lilicorr.kernels.candidates import partial_candidates
from vllm_lilicorr.kernels.edges import score_and_walk
from vllm_lilicorr.kernels.encode import encode
from vllm_lilicorr.kernels.factors import factors
from vllm_lilicorr.kernels.linear import linear
from vllm_lilicorr.kernels.linear_pair import linear_pair
from vllm_lilicorr.kernels.project import project
from vllm_lilicorr.kernels.reference import IMPOSSIBLE

# Rows of the embedding that are projected at a time.
TABLE_ROWS = 16384


@dataclass(frozen=True)
class HeadConstants:
    """Numbers of a head that no tensor of it holds; meanings as in a drafter's config.json.

    Attributes:
        num_heads: A.
        top_k: K as trained; fewer may be drafted.
        rms_norm_eps, logit_scale, vector_eps: fp32 constants.
    """

    num_heads: int
    top_k: int
    rms_norm_eps: float
    logit_scale: float
    vector_eps: float


class FusedHead:
    """A correlator head whose weights are prepared for the kernels.

    Nothing waits for the device, and shapes follow from the arguments' shapes alone, so a call
    may be captured in a CUDA graph; what it allocates belongs to that graph.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],  # by the names of method/head.py; bf16 or fp32
        constants: HeadConstants,
        token_embedding: torch.Tensor,  # [V, D] the target's input embedding, in the same dtype
        max_num_reqs: int,
        max_table_bytes: int = 1 << 30,
    ) -> None:
        """Prepares the weights.

        The projected token table takes V * H numbers: 311 MB in bf16 at V 151,936 and H 1024.
        It is built unless it would take more than `max_table_bytes`, or unless H = D: the
        embedding is the table then.

        Raises:
            ValueError: the head is neither bf16 nor fp32.
        """
        dtype = parameters["slot_embedding"].dtype
        if dtype not in (torch.bfloat16, torch.float32):
            # Norms are taken out of products: rows that are not normalised yet may exceed fp16.
            raise ValueError(f"dtype={dtype} of the head: the kernels need bfloat16 or float32; load it as bfloat16.")
        self.parameters = dict(parameters)
        self.constants = constants
        self.width = parameters["output_norm.weight"].shape[0]
        self.block_size = (parameters["relative_slot_bias"].shape[1] + 1) // 2
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in parameters if name.startswith("layers."))
        self.arrived = torch.zeros(max_num_reqs, dtype=torch.int32, device=token_embedding.device)
        self.token_embedding = token_embedding
        num_tokens = token_embedding.shape[0]
        self.is_projected = "token_proj.weight" in parameters
        self.token_rows: torch.Tensor | None = None if self.is_projected else token_embedding
        if self.is_projected and num_tokens * self.width * dtype.itemsize <= max_table_bytes:
            self.token_rows = token_embedding.new_empty((num_tokens, self.width))
        self._node_ids = torch.arange(
            max_num_reqs * (self.block_size - 1) * constants.top_k, device=token_embedding.device
        )
        up, norm = parameters["feature_mlp.up_proj.weight"], parameters["feature_norm.weight"]
        self.feature_weight = up.new_empty((norm.shape[0], up.shape[0]), dtype=torch.float32)
        self.feature_bias = up.new_empty(up.shape[0], dtype=torch.float32)
        num_factors = parameters["out_head.weight"].shape[0]
        self.anchor_weight = up.new_empty((self.width + num_factors, self.width))
        self.anchor_bias = up.new_empty(self.width + num_factors)
        self.edge_weight = up.new_empty((2 * num_factors, self.width))
        self.edge_bias = up.new_empty(2 * num_factors)
        self.prepare()

    @torch.no_grad()
    def prepare(self) -> None:
        """Fills what depends on the weights alone; again after a reload, at the same addresses.

        - the token table W_tok E + b;
        - the feature norm folded into the feature MLP's first layer, in fp32;
        - the anchor block of factor_input_proj over anchor_out_head, and out_head over in_head.
        """
        w = self.parameters
        if self.is_projected and self.token_rows is not None:
            for start in range(0, len(self.token_rows), TABLE_ROWS):
                rows = self.token_embedding[start : start + TABLE_ROWS]
                projected = F.linear(rows, w["token_proj.weight"], w["token_proj.bias"])
                self.token_rows[start : start + TABLE_ROWS] = projected
        up = w["feature_mlp.up_proj.weight"].float()
        self.feature_weight.copy_((up * w["feature_norm.weight"].float()).T)
        self.feature_bias.copy_(w["feature_mlp.up_proj.bias"].float() + up @ w["feature_norm.bias"].float())
        anchor_block = w["factor_input_proj.weight"][:, self.width : 2 * self.width]
        torch.cat((anchor_block, w["anchor_out_head.weight"]), out=self.anchor_weight)
        torch.cat((w["factor_input_proj.bias"], w["anchor_out_head.bias"]), out=self.anchor_bias)
        torch.cat((w["out_head.weight"], w["in_head.weight"]), out=self.edge_weight)
        torch.cat((w["out_head.bias"], w["in_head.bias"]), out=self.edge_bias)

    def draft(
        self,
        draft_tokens: torch.Tensor,  # [at least R, at least S] int64; its first R rows are written
        logits: torch.Tensor,  # [R * S, V] the drafter's, padding columns last; only read
        hidden_states: torch.Tensor,  # [R * S, D] the drafter's, after its final norm
        anchor_hidden: torch.Tensor,  # [R, D] hidden_norm(fc(target features))
        anchor_valid: torch.Tensor,  # [R] bool
        top_k: int,
        num_padding: int = 0,
        expected_length: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Candidates, scores and the walk of a step on one rank; see `draft_from_parts`."""
        keys, partitions = partial_candidates(logits, top_k, num_padding, 0)
        return self.draft_from_parts(
            draft_tokens, keys, partitions, hidden_states, anchor_hidden, anchor_valid, expected_length
        )

    def draft_from_parts(
        self,
        draft_tokens: torch.Tensor,  # [at least R, at least S] int64; its first R rows are written
        keys: torch.Tensor,  # [R * S, parts, K] int64 contiguous: of `partial_candidates`, of all ranks
        partitions: torch.Tensor,  # [R * S, parts] fp32 contiguous
        hidden_states: torch.Tensor,  # [R * S, D]
        anchor_hidden: torch.Tensor,  # [R, D]
        anchor_valid: torch.Tensor,  # [R] bool
        expected_length: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores and walks the lattices of R requests.

        Returns:
            candidate ids [R * S, K] int64, best first; log-probabilities [R * S, K] fp32, finite; edge
            logits [R, S, K, K] fp32, minus infinity for candidates that no walk may take.
        """
        w, constants = self.parameters, self.constants
        eps = constants.rms_norm_eps
        num_rows, num_reqs, top_k = keys.shape[0], anchor_hidden.shape[0], keys.shape[2]
        num_slots = num_rows // num_reqs
        ids, log_probs, feature_rows, hidden_rows, anchor_rows = project(
            keys,
            partitions,
            hidden_states,
            anchor_hidden,
            anchor_valid,
            self.feature_weight,
            self.feature_bias,
            w["pass_hidden_proj.weight"],
            w["pass_hidden_proj.bias"],
            w["context_proj.weight"],
            w["context_proj.bias"],
            constants.top_k,
            IMPOSSIBLE,
        )
        row_ids, token_rows = ids, self.token_rows
        if token_rows is None:
            embeddings = self.token_embedding.index_select(0, ids.view(-1))
            token_rows = linear(embeddings, w["token_proj.weight"], w["token_proj.bias"], None, 0.0, False, None)
            row_ids = self._node_ids[: num_rows * top_k].view(num_rows, top_k)
        nodes = encode(
            row_ids,
            token_rows,
            hidden_rows,
            feature_rows,
            w["feature_mlp.down_proj.weight"],
            w["feature_mlp.down_proj.bias"],
            w["slot_embedding"],
            w["rank_embedding"],
            num_slots,
        )
        for index in range(self.num_layers):
            layer = f"layers.{index}"
            norm, weight, bias = (
                w[f"{layer}.{name}"] for name in ("attn_norm.weight", "attn.in_proj_weight", "attn.in_proj_bias")
            )
            if index == 0:
                qkv, anchor_parts = linear_pair(
                    nodes,
                    weight,
                    bias,
                    norm,
                    anchor_rows,
                    self.anchor_weight,
                    self.anchor_bias,
                    w["anchor_norm.weight"],
                    eps,
                )
            else:
                qkv = linear(nodes, weight, bias, norm, eps, False, None)
            mixed = lattice_attention(
                qkv.view(num_reqs, num_slots * top_k, 3, constants.num_heads, -1),
                w["relative_slot_bias"],
                w["same_slot_bias"],
                top_k,
            )
            nodes = self._linear(f"{layer}.attn.out_proj", mixed.view(-1, self.width), residual=nodes)
            inner = self._linear(f"{layer}.mlp.up_proj", nodes, norm=w[f"{layer}.mlp_norm.weight"], silu=True)
            nodes = self._linear(f"{layer}.mlp.down_proj", inner, residual=nodes)
        node_factors = factors(
            nodes,
            w["output_norm.weight"],
            anchor_rows,
            w["anchor_norm.weight"],
            anchor_parts[:, : self.width],
            w["factor_input_proj.weight"],
            eps,
        )
        edge_logits = score_and_walk(
            draft_tokens,
            self.arrived,
            linear(node_factors, self.edge_weight, self.edge_bias, None, eps, False, None),
            anchor_parts[:, self.width :],
            ids,
            log_probs,
            num_slots,
            constants.logit_scale,
            constants.vector_eps,
            IMPOSSIBLE,
            expected_length,
        )
        return ids, log_probs, edge_logits

    def _linear(
        self,
        name: str,
        x: torch.Tensor,  # [M, I]
        *,
        norm: torch.Tensor | None = None,  # [I]
        silu: bool = False,
        residual: torch.Tensor | None = None,  # [M, O]
    ) -> torch.Tensor:
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        return linear(x, weight, bias, norm, self.constants.rms_norm_eps, silu, residual)
