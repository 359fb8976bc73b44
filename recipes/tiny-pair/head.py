# SPDX-License-Identifier: Apache-2.0
"""The LiLiCorr head, trainable: transition scores between candidates of a lattice.

Letters: R blocks, S slots, K candidates per slot, D drafter width, H head width.
Parameter names are those of vLLM's in-tree drafter.
"""

import torch
import torch.nn.functional as F
from settings import Settings
from target import RMSNorm
from torch import Tensor, nn


class TwoLinear(nn.Module):
    """down_proj(silu(up_proj(x)))."""

    def __init__(self, inputs: int, middle: int, outputs: int):
        super().__init__()
        self.up_proj = nn.Linear(inputs, middle)
        self.down_proj = nn.Linear(middle, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Full attention over the S*K nodes with an additive bias per head."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) * width**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [R, S*K, H], bias [heads, S*K, S*K] -> [R, S*K, H]."""
        blocks, nodes, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        dim = width // self.num_heads
        q, k, v = (t.view(blocks, nodes, self.num_heads, dim).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        scores = (q @ k.mT).float() * dim**-0.5 + bias.float()
        out = scores.softmax(-1).to(v.dtype) @ v
        return self.out_proj(out.transpose(1, 2).reshape(blocks, nodes, width))


class LatticeLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, s: Settings):
        super().__init__()
        width = s.head_hidden_size
        self.attn_norm = RMSNorm(width, s.rms_norm_eps)
        self.attn = LatticeAttention(width, s.head_num_heads)
        self.mlp_norm = RMSNorm(width, s.rms_norm_eps)
        self.mlp = TwoLinear(width, int(width * s.head_mlp_ratio), width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorrHead(nn.Module):
    """Scores anchor -> slot 0 and slot s -> slot s+1 transitions."""

    def __init__(self, s: Settings):
        super().__init__()
        width, slots, top_k = s.head_hidden_size, s.block_size - 1, s.top_k
        self.settings = s
        self.token_proj = nn.Linear(s.hidden_size, width)
        self.pass_hidden_proj = nn.Linear(s.hidden_size, width)
        self.context_proj = nn.Linear(s.hidden_size, width)
        self.feature_norm = nn.LayerNorm(5)
        self.feature_mlp = TwoLinear(5, width, width)
        self.slot_embedding = nn.Parameter(torch.randn(1, 1, slots, 1, width) * 0.02)
        self.rank_embedding = nn.Parameter(torch.randn(1, 1, 1, top_k, width) * 0.02)
        self.relative_slot_bias = nn.Parameter(torch.zeros(s.head_num_heads, 2 * s.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(s.head_num_heads))
        self.layers = nn.ModuleList(LatticeLayer(s) for _ in range(s.head_num_layers))
        self.output_norm = RMSNorm(width, s.rms_norm_eps)
        self.anchor_norm = RMSNorm(width, s.rms_norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, s.head_factor_dim)
        self.in_head = nn.Linear(width, s.head_factor_dim)
        self.anchor_out_head = nn.Linear(width, s.head_factor_dim)

    def attention_bias(self) -> Tensor:
        """[heads, S*K, S*K] fp32 from the two learned tables."""
        s = self.settings
        slot = torch.arange(s.block_size - 1).repeat_interleave(s.top_k)
        offset = slot[:, None] - slot[None, :]
        bias = self.relative_slot_bias[:, offset + s.block_size - 1]
        return bias + (offset == 0) * self.same_slot_bias[:, None, None]

    def forward(
        self,
        candidates: Tensor,  # [R, S, K] int64
        log_probs: Tensor,  # [R, S, K] fp32, over the full vocabulary
        hidden: Tensor,  # [R, S, D]
        anchor: Tensor,  # [R, D]
        embedding: Tensor,  # [V, D] the target's
    ) -> tuple[Tensor, Tensor]:
        """Edge logits: start [R, K] and pairs [R, S-1, K, K], fp32."""
        s = self.settings
        blocks, slots, top_k = candidates.shape
        rank = torch.arange(top_k, dtype=torch.float32)
        features = torch.stack(
            [
                log_probs,
                log_probs.exp(),
                log_probs - log_probs.amax(-1, keepdim=True),
                (rank / max(1, top_k - 1)).expand_as(log_probs),
                (rank == 0).float().expand_as(log_probs),
            ],
            dim=-1,
        )
        # The projected table has fewer rows than the lattice: project, then gather.
        x = self.token_proj(embedding.to(hidden.dtype))[candidates]
        x = x + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features))
        x = x + self.slot_embedding[0] + self.rank_embedding[0]
        x = x.to(hidden.dtype).view(blocks, slots * top_k, -1)
        bias = self.attention_bias()
        for layer in self.layers:
            x = layer(x, bias)
        y = self.output_norm(x).view(blocks, slots, top_k, -1)
        alpha = self.anchor_norm(self.context_proj(anchor))[:, None, None]
        joined = torch.cat([y, alpha.expand_as(y), y * alpha], dim=-1)
        phi = F.silu(self.factor_input_proj(joined))
        eps = s.head_vector_eps
        outgoing = F.normalize(self.out_head(phi).float(), dim=-1, eps=eps)
        incoming = F.normalize(self.in_head(phi).float(), dim=-1, eps=eps)
        start_out = F.normalize(self.anchor_out_head(alpha[:, 0]).float(), dim=-1, eps=eps)
        start = (start_out * incoming[:, 0]).sum(-1)
        pairs = outgoing[:, :-1] @ incoming[:, 1:].mT
        return s.head_logit_scale * start, s.head_logit_scale * pairs


def greedy_walk(start: Tensor, pairs: Tensor) -> Tensor:
    """Ranks [R, S] of the greedy path: start [R, K], pairs [R, S-1, K, K]."""
    rank = start.argmax(-1)
    path = [rank]
    for slot in range(pairs.shape[1]):
        row = pairs[:, slot].gather(1, rank[:, None, None].expand(-1, 1, pairs.shape[-1]))
        rank = row[:, 0].argmax(-1)
        path.append(rank)
    return torch.stack(path, dim=1)
