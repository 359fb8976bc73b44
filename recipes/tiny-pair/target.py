# SPDX-License-Identifier: Apache-2.0
"""The target: Qwen3 in plain PyTorch, parameter names as Hugging Face writes them."""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from settings import Settings
from torch import Tensor, nn

CHUNK = 256


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float()).to(x.dtype)


def rope_table(settings: Settings, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [*positions.shape, 1, head_dim / 2] fp32 (neox layout)."""
    half = settings.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float32) / half
    angle = positions.float()[..., None, None] * settings.rope_theta**-exponent
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., heads, head_dim]; halves are paired as in GPT-NeoX."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Grouped-query attention with per-head q and k norms."""

    def __init__(self, s: Settings):
        super().__init__()
        self.head_dim = s.head_dim
        self.q_proj = linear(s.hidden_size, s.num_heads * s.head_dim)
        self.k_proj = linear(s.hidden_size, s.num_kv_heads * s.head_dim)
        self.v_proj = linear(s.hidden_size, s.num_kv_heads * s.head_dim)
        self.o_proj = linear(s.num_heads * s.head_dim, s.hidden_size)
        self.q_norm = RMSNorm(s.head_dim, s.rms_norm_eps)
        self.k_norm = RMSNorm(s.head_dim, s.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x [B, T, D] -> q [B, T, heads, hd], k and v [B, T, kv heads, hd]."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q = apply_rope(self.q_norm(self.q_proj(x).view(shape)), cos, sin)
        k = apply_rope(self.k_norm(self.k_proj(x).view(shape)), cos, sin)
        return q, k, self.v_proj(x).view(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention in plain products, CHUNK queries at a time.

        Compiled, this trains faster on a CPU than the fused attention, whose
        backward pass took a third of a step.
        """
        q, k, v = (t.transpose(1, 2) for t in self.project(x, cos, sin))
        batch, heads, length, dim = q.shape
        kv_heads = k.shape[1]
        q = (q * dim**-0.5).reshape(batch * kv_heads, heads // kv_heads, length, dim)
        k, v = (t.reshape(batch * kv_heads, length, dim) for t in (k, v))
        chunks = []
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            rows, keys = torch.arange(start, end), torch.arange(end)
            scores = torch.bmm(q[:, :, start:end].flatten(1, 2), k[:, :end].mT)
            scores = scores.view(-1, heads // kv_heads, end - start, end).float()
            scores = scores.masked_fill(keys > rows[:, None], float("-inf"))
            weights = scores.softmax(-1).to(v.dtype).flatten(1, 2)
            out = torch.bmm(weights, v[:, :end])
            chunks.append(out.view(batch, heads, end - start, dim))
        out = torch.cat(chunks, dim=2).transpose(1, 2).flatten(2)
        return self.o_proj(out)

    def cached(
        self,
        x: Tensor,  # [B, T, D]
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,  # [2, B, kv heads, max length, hd]
        start: int,
    ) -> Tensor:
        """Attention of positions start..start+T-1 over the cache, which they enter."""
        q, k, v = (t.transpose(1, 2) for t in self.project(x, cos, sin))
        end = start + x.shape[1]
        cache[0, :, :, start:end] = k
        cache[1, :, :, start:end] = v
        keys, values = cache[0, :, :, :end], cache[1, :, :, :end]
        if x.shape[1] > 1:
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        else:
            # One query per request: the heads of a group become rows of one product.
            grouped = q.reshape(*keys.shape[:2], -1, self.head_dim)
            out = F.scaled_dot_product_attention(grouped, keys, values)
            out = out.reshape(q.shape)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, s: Settings):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s.hidden_size, s.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))

    def cached(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, start: int) -> Tensor:
        x = x + self.self_attn.cached(self.input_layernorm(x), cos, sin, cache, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Qwen3 language model with tied embeddings."""

    def __init__(self, s: Settings):
        super().__init__()
        self.settings = s
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        residual_std = 0.02 / math.sqrt(2 * s.num_layers)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                is_output = "o_proj" in name or "down_proj" in name
                nn.init.normal_(param, std=residual_std if is_output else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> final hidden states [B, T, D] (after the last norm)."""
        cos, sin = rope_table(self.settings, torch.arange(tokens.shape[1]))
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled("cpu"):
            x = x.bfloat16()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def new_cache(self, batch: int, length: int) -> list[Tensor]:
        s = self.settings
        shape = (2, batch, s.num_kv_heads, length, s.head_dim)
        dtype = self.embed_tokens.weight.dtype
        return [torch.zeros(shape, dtype=dtype) for _ in self.layers]

    @torch.no_grad()
    def cached(
        self,
        tokens: Tensor,  # [B, T] int64, at positions start..start+T-1
        cache: list[Tensor],
        start: int,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states [B, T, D] and the named layers' outputs [B, T, n * D]."""
        positions = torch.arange(start, start + tokens.shape[1])
        cos, sin = rope_table(self.settings, positions)
        x = self.embed_tokens(tokens)
        features = []
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            x = layer.cached(x, cos, sin, layer_cache, start)
            if index in feature_layers:
                features.append(x)
        return self.norm(x), torch.cat(features, -1) if features else x[..., :0]


def export_target(target: Target, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors (BF16)."""
    s = target.settings
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value.detach().bfloat16().contiguous() for name, value in target.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": s.eos_token_id,
        "pad_token_id": s.eos_token_id,
        "dtype": "bfloat16",
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": s.intermediate_size,
        "layer_types": ["full_attention"] * s.num_layers,
        "max_position_embeddings": s.max_position,
        "max_window_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_hidden_layers": s.num_layers,
        "num_key_value_heads": s.num_kv_heads,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_parameters": {"rope_theta": s.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": s.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": s.eos_token_id, "pad_token_id": s.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
