# SPDX-License-Identifier: Apache-2.0
"""The correlator: scores every transition of a candidate lattice.

Equations: "LiLiCorr: Lightweight Likelihood Correlation of Parallel Drafts",
arXiv 2608.20530. Parameter names are those of vLLM's in-tree head, so a
checkpoint in that naming loads with load_state_dict.

Letters: R requests, S slots, K candidates, D drafter width, H head width,
F factor dimension, A heads.
"""

import torch
import torch.nn.functional as F
from torch import nn

from vllm_lilicorr.method.geometry import DrafterGeometry

NUM_FEATURES = 5


class LatticeAttention(nn.Module):
    """Attention over all S*K nodes of a lattice, with a learned bias per head.

    Its parameter names are torch.nn.MultiheadAttention's, as exported.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width), requires_grad=False)
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width), requires_grad=False)
        self.out_proj = nn.Linear(width, width)

    def forward(
        self,
        nodes: torch.Tensor,  # [R, S*K, H]
        bias: torch.Tensor,  # [1, A, S*K, S*K]
    ) -> torch.Tensor:
        num_reqs, num_nodes, width = nodes.shape
        qkv = F.linear(nodes, self.in_proj_weight, self.in_proj_bias)
        qkv = qkv.view(num_reqs, num_nodes, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out_proj(mixed.transpose(1, 2).reshape(num_reqs, num_nodes, width))


class FeedForward(nn.Module):
    """Linear, SiLU, Linear."""

    def __init__(self, in_features: int, width: int, out_features: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(in_features, width)
        self.down_proj = nn.Linear(width, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class CorrelatorLayer(nn.Module):
    """One pre-norm transformer layer over the nodes of a lattice."""

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        width = geometry.head_width
        self.attn_norm = nn.RMSNorm(width, eps=geometry.rms_norm_eps)
        self.attn = LatticeAttention(width, geometry.num_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=geometry.rms_norm_eps)
        self.mlp = FeedForward(width, geometry.mlp_width, width)

    def forward(self, nodes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        nodes = nodes + self.attn(self.attn_norm(nodes), bias)
        return nodes + self.mlp(self.mlp_norm(nodes))


class LiLiCorrHead(nn.Module):
    """Candidates, their log-probabilities and the drafter's states in; edge logits out.

    Call `prepare` once after the weights are loaded: it fixes the buffers that
    `forward` reads, so that their addresses never change afterwards.
    """

    def __init__(self, geometry: DrafterGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        hidden, width, factors = geometry.hidden_size, geometry.head_width, geometry.factor_dim
        self.token_proj = nn.Identity() if hidden == width else nn.Linear(hidden, width)
        self.pass_hidden_proj = nn.Linear(hidden, width)
        self.context_proj = nn.Linear(hidden, width)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES)
        self.feature_mlp = FeedForward(NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, geometry.num_slots, 1, width), requires_grad=False)
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, geometry.top_k, width), requires_grad=False)
        self.relative_slot_bias = nn.Parameter(
            torch.zeros(geometry.num_heads, 2 * geometry.block_size - 1), requires_grad=False
        )
        self.same_slot_bias = nn.Parameter(torch.zeros(geometry.num_heads), requires_grad=False)
        self.layers = nn.ModuleList(CorrelatorLayer(geometry) for _ in range(geometry.num_layers))
        self.output_norm = nn.RMSNorm(width, eps=geometry.rms_norm_eps)
        self.anchor_norm = nn.RMSNorm(width, eps=geometry.rms_norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, factors)
        self.in_head = nn.Linear(width, factors)
        self.anchor_out_head = nn.Linear(width, factors)
        self.requires_grad_(False)

    @torch.no_grad()
    def prepare(self) -> None:
        """Builds what depends on the weights alone; again after a reload, at the same addresses.

        - attention bias [1, A, N, N] for all N = num_slots * top_k nodes: the
          relative bias of slot(query) - slot(key), plus the same-slot bias;
        - embedding of (slot, rank) [1, S, K, H], and the constant features;
        - the out and in heads stacked into one product;
        - factor_input_proj split into its node, anchor and product blocks.
        """
        geometry = self.geometry
        device = self.slot_embedding.device
        slot = torch.arange(geometry.num_slots, device=device).repeat_interleave(geometry.top_k)
        offset = slot[:, None] - slot[None, :]
        bias = self.relative_slot_bias[:, offset + geometry.block_size - 1]
        bias = bias + (offset == 0) * self.same_slot_bias[:, None, None]
        self._keep("_attention_bias", bias[None])
        self._keep("_node_embedding", (self.slot_embedding + self.rank_embedding)[0])
        rank = torch.arange(geometry.top_k, device=device, dtype=torch.float32)
        fraction = rank / max(geometry.top_k - 1, 1)
        self._keep("_rank_features", torch.stack((fraction, (rank == 0).float()), dim=-1))
        node, anchor, product = self.factor_input_proj.weight.split(geometry.head_width, dim=1)
        self._keep("_node_block", node)
        self._keep("_anchor_block", anchor)
        self._keep("_product_block", product)
        self._keep("_edge_weight", torch.cat((self.out_head.weight, self.in_head.weight)))
        self._keep("_edge_bias", torch.cat((self.out_head.bias, self.in_head.bias)))

    def _keep(self, name: str, value: torch.Tensor) -> None:
        """Stores a prepared buffer, in place where it exists: captured CUDA graphs hold its address."""
        held = getattr(self, name, None)
        if held is not None and (held.dtype, held.device) == (value.dtype, value.device):
            held.copy_(value)
        else:
            setattr(self, name, value.contiguous())

    def _nodes(
        self,
        token_embeddings: torch.Tensor,  # [R, S, K, D]
        candidate_log_probs: torch.Tensor,  # [R, S, K] fp32
        hidden_states: torch.Tensor,  # [R, S, D]
    ) -> torch.Tensor:
        """The lattice's nodes before the first layer, [R, S, K, H]."""
        dtype = self.slot_embedding.dtype
        num_reqs, num_slots, top_k = candidate_log_probs.shape
        log_probs = candidate_log_probs.float()
        constant = self._rank_features[:top_k].expand(num_reqs, num_slots, top_k, 2)
        below_best = log_probs - log_probs.amax(dim=-1, keepdim=True)
        features = torch.cat((torch.stack((log_probs, log_probs.exp(), below_best), dim=-1), constant), dim=-1)
        nodes = self.token_proj(token_embeddings.to(dtype)) + self.pass_hidden_proj(hidden_states.to(dtype))[:, :, None]
        nodes = nodes + self.feature_mlp(self.feature_norm(features.to(dtype)))
        return nodes + self._node_embedding[:, :num_slots, :top_k]

    def forward(
        self,
        token_embeddings: torch.Tensor,  # [R, S, K, D] the target's input embeddings
        candidate_log_probs: torch.Tensor,  # [R, S, K] fp32, over the full vocabulary
        hidden_states: torch.Tensor,  # [R, S, D] the drafter's, after its final norm
        anchor_hidden: torch.Tensor,  # [R, D] hidden_norm(fc(target features))
        anchor_valid: torch.Tensor,  # [R] bool
    ) -> torch.Tensor:
        """Edge logits [R, S, K, K] fp32 for any S <= num_slots and K <= top_k.

        Entry [r, s, i, j] scores candidate j of slot s after candidate i of slot
        s - 1; slot 0 follows the anchor, so its K rows are equal.
        """
        dtype = self.slot_embedding.dtype
        num_reqs, num_slots, top_k = candidate_log_probs.shape
        nodes = self._nodes(token_embeddings, candidate_log_probs, hidden_states)
        nodes = nodes.flatten(1, 2)
        bias = self._lattice_bias(num_slots, top_k)
        for layer in self.layers:
            nodes = layer(nodes, bias)
        nodes = self.output_norm(nodes)
        anchor = self.context_proj(anchor_hidden.to(dtype)) * anchor_valid[:, None].to(dtype)
        anchor = self.anchor_norm(anchor)[:, None]
        factors = F.linear(nodes, self._node_block, self.factor_input_proj.bias)
        factors = factors + F.linear(anchor, self._anchor_block) + F.linear(nodes * anchor, self._product_block)
        vectors = F.linear(F.silu(factors), self._edge_weight, self._edge_bias)
        eps = self.geometry.vector_eps
        vectors = F.normalize(vectors.view(num_reqs, num_slots, top_k, 2, -1), dim=-1, eps=eps)
        outgoing, incoming = vectors.unbind(-2)
        start = F.normalize(self.anchor_out_head(anchor), dim=-1, eps=eps)  # [R, 1, F]
        sources = torch.cat((start[:, :, None].expand(-1, -1, top_k, -1), outgoing[:, :-1]), dim=1)
        return torch.matmul(sources, incoming.transpose(-1, -2)).float() * self.geometry.logit_scale

    def _lattice_bias(self, num_slots: int, top_k: int) -> torch.Tensor:
        geometry = self.geometry
        if top_k == geometry.top_k:
            num_nodes = num_slots * top_k
            return self._attention_bias[..., :num_nodes, :num_nodes]
        shape = (1, geometry.num_heads, geometry.num_slots, geometry.top_k, geometry.num_slots, geometry.top_k)
        bias = self._attention_bias.view(shape)[:, :, :num_slots, :top_k, :num_slots, :top_k]
        return bias.reshape(1, geometry.num_heads, num_slots * top_k, num_slots * top_k)
