# SPDX-License-Identifier: Apache-2.0
"""The DFlash drafter: a block of masks attends to projected target features.

A block at anchor position p has block_size queries at p .. p+block_size-1: the
embedding of the token at p, then mask embeddings. Each layer attends, without a
causal mask, to keys and values of hidden_norm(fc(features)) of the positions
before p and to those of the block itself. The mask at p+i predicts the token at
p+i. Embedding and LM head are the target's. Names as in published checkpoints.
"""

import math

import torch
from settings import Settings
from target import MLP, RMSNorm, apply_rope, linear, rope_table
from torch import Tensor, nn


class BlockAttention(nn.Module):
    """Queries of N blocks per row over the row's context and their own block."""

    def __init__(self, s: Settings):
        super().__init__()
        self.head_dim = s.head_dim
        self.q_proj = linear(s.hidden_size, s.num_heads * s.head_dim)
        self.k_proj = linear(s.hidden_size, s.num_kv_heads * s.head_dim)
        self.v_proj = linear(s.hidden_size, s.num_kv_heads * s.head_dim)
        self.o_proj = linear(s.num_heads * s.head_dim, s.hidden_size)
        self.q_norm = RMSNorm(s.head_dim, s.rms_norm_eps)
        self.k_norm = RMSNorm(s.head_dim, s.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [..., D] -> k, v [..., kv heads, head_dim]."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        k = apply_rope(self.k_norm(self.k_proj(x).view(shape)), *rope)
        return k, self.v_proj(x).view(shape)

    def forward(
        self,
        x: Tensor,  # [B, N, S1, D] the blocks' states, S1 = block_size
        context: Tensor,  # [B, T, D]
        visible: Tensor,  # [B, N, T] bool: context positions before the anchor
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:  # [B, N, S1, D]
        batch, blocks, size, _ = x.shape
        length = context.shape[1]
        q = self.q_proj(x).view(batch, blocks, size, -1, self.head_dim)
        q = apply_rope(self.q_norm(q), *block_rope) * self.head_dim**-0.5
        k_ctx, v_ctx = self.keys_values(context, context_rope)
        k_blk, v_blk = self.keys_values(x, block_rope)
        kv_heads = k_ctx.shape[2]
        groups = q.shape[3] // kv_heads
        # One product per (row, kv head): [blocks * size * groups, hd] by [T, hd].
        q = q.view(batch, blocks, size, kv_heads, groups, self.head_dim)
        q = q.permute(0, 3, 1, 2, 4, 5).reshape(batch * kv_heads, -1, self.head_dim)
        k_ctx, v_ctx = (t.transpose(1, 2).reshape(batch * kv_heads, length, self.head_dim) for t in (k_ctx, v_ctx))
        k_blk, v_blk = (t.permute(0, 3, 1, 2, 4).reshape(-1, size, self.head_dim) for t in (k_blk, v_blk))
        rows = (batch, kv_heads, blocks, size * groups)
        far = torch.bmm(q, k_ctx.mT).view(*rows, length).float()
        far = far.masked_fill(~visible[:, None, :, None], float("-inf"))
        q_blk = q.view(-1, size * groups, self.head_dim)
        near = torch.bmm(q_blk, k_blk.mT).view(*rows, size).float()
        weights = torch.cat([far, near], dim=-1).softmax(-1).to(v_ctx.dtype)
        w_far = weights[..., :length].reshape(batch * kv_heads, -1, length)
        w_near = weights[..., length:].reshape(-1, size * groups, size)
        out = torch.bmm(w_far, v_ctx).view(*rows, self.head_dim)
        out = out + torch.bmm(w_near, v_blk).view(*rows, self.head_dim)
        out = out.view(batch, kv_heads, blocks, size, groups, self.head_dim)
        return self.o_proj(out.permute(0, 2, 3, 1, 4, 5).flatten(3))


class BlockLayer(nn.Module):
    """Pre-norm layer around BlockAttention."""

    def __init__(self, s: Settings):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = BlockAttention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s.hidden_size, s.drafter_intermediate_size)

    def forward(self, x: Tensor, context: Tensor, visible: Tensor, *ropes) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, visible, *ropes)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """DFlash backbone; `embedding` is the target's table, held but not trained."""

    def __init__(self, s: Settings, embedding: Tensor):
        super().__init__()
        self.settings = s
        width = len(s.feature_layers) * s.hidden_size
        self.fc = linear(width, s.hidden_size)
        self.hidden_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(s) for _ in range(s.drafter_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)
        residual_std = 0.02 / math.sqrt(2 * s.drafter_layers)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                is_output = "o_proj" in name or "down_proj" in name
                nn.init.normal_(param, std=residual_std if is_output else 0.02)

    def forward(
        self,
        tokens: Tensor,  # [B, T + 1] int64
        features: Tensor,  # [B, T, nf * D]
        anchors: Tensor,  # [B, N] int64: anchor positions p, 1 <= p <= T
    ) -> tuple[Tensor, Tensor]:
        """States of the mask slots [B, N, S, D] and head anchors [B, N, D].

        The head's anchor is the projected feature of position p - 1.
        """
        s = self.settings
        context = self.hidden_norm(self.fc(features))
        offsets = torch.arange(s.block_size)
        first = self.embedding[tokens.gather(1, anchors)]
        masks = self.embedding[s.mask_token_id].expand(*anchors.shape, s.block_size - 1, -1)
        x = torch.cat([first[:, :, None], masks], dim=2).to(context.dtype)
        visible = torch.arange(features.shape[1]) < anchors[..., None]
        block_rope = rope_table(s, anchors[..., None] + offsets)
        context_rope = rope_table(s, torch.arange(features.shape[1]))
        for layer in self.layers:
            x = layer(x, context, visible, block_rope, context_rope)
        index = (anchors - 1)[..., None].expand(-1, -1, context.shape[-1])
        return self.norm(x[:, :, 1:]), context.gather(1, index)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V] through the target's LM head."""
        return nn.functional.linear(hidden, self.embedding.to(hidden.dtype))
