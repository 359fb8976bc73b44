# SPDX-License-Identifier: Apache-2.0
"""Random heads and draft steps, for checks and timings of the kernels."""

from dataclasses import dataclass

import torch

from vllm_lilicorr.kernels import reference
from vllm_lilicorr.kernels.head import FusedHead, HeadConstants
from vllm_lilicorr.kernels.reference import IMPOSSIBLE

EPS, VECTOR_EPS, LOGIT_SCALE = 1e-6, 1e-4, 8.0


@dataclass(frozen=True)
class Shape:
    """Of a head and a step; letters as in the method's equations."""

    hidden_size: int = 4096
    width: int = 1024
    num_factors: int = 1024
    num_heads: int = 8
    mlp_width: int = 2048
    num_layers: int = 2
    block_size: int = 8
    trained_top_k: int = 8
    vocab_size: int = 151936
    num_reqs: int = 1
    num_slots: int = 7
    top_k: int = 8

    @property
    def num_rows(self) -> int:
        return self.num_reqs * self.num_slots

    @property
    def num_nodes(self) -> int:
        return self.num_rows * self.top_k


# Odd sizes, and cheap.
TINY = Shape(96, 48, 40, 3, 72, 2, 8, 8, 4099)


class Inputs:
    """Random tensors of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return (values * scale).to(self.dtype)

    def layer(self, num_out: int, num_in: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A weight [O, I] that keeps the size of normalised rows, and a bias [O]."""
        return self.normal(num_out, num_in, scale=num_in**-0.5), self.normal(num_out, scale=0.1)

    def norm(self, width: int) -> torch.Tensor:
        return (1 + 0.2 * self.normal(width).float()).to(self.dtype)

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def log_probs(self, *shape: int) -> torch.Tensor:
        """Best first; the last of the first row is impossible."""
        values = torch.randn(shape, generator=self.generator, device=self.device)
        log_probs = -3 * values.abs().sort(dim=-1).values
        log_probs[0, -1] = IMPOSSIBLE
        return log_probs


def parameters(shape: Shape, inputs: Inputs) -> dict[str, torch.Tensor]:
    """A random head by the names of method/head.py."""
    width, num_factors = shape.width, shape.num_factors
    layers = {
        "token_proj": (width, shape.hidden_size),
        "pass_hidden_proj": (width, shape.hidden_size),
        "context_proj": (width, shape.hidden_size),
        "feature_mlp.up_proj": (width, 5),
        "feature_mlp.down_proj": (width, width),
        "factor_input_proj": (width, 3 * width),
        "out_head": (num_factors, width),
        "in_head": (num_factors, width),
        "anchor_out_head": (num_factors, width),
    }
    w = {
        "feature_norm.weight": inputs.norm(5),
        "feature_norm.bias": inputs.normal(5, scale=0.1),
        "slot_embedding": inputs.normal(1, 1, shape.block_size - 1, 1, width, scale=0.3),
        "rank_embedding": inputs.normal(1, 1, 1, shape.trained_top_k, width, scale=0.3),
        "relative_slot_bias": inputs.normal(shape.num_heads, 2 * shape.block_size - 1),
        "same_slot_bias": inputs.normal(shape.num_heads),
        "output_norm.weight": inputs.norm(width),
        "anchor_norm.weight": inputs.norm(width),
    }
    for index in range(shape.num_layers):
        prefix = f"layers.{index}"
        w |= {f"{prefix}.{name}.weight": inputs.norm(width) for name in ("attn_norm", "mlp_norm")}
        w[f"{prefix}.attn.in_proj_weight"], w[f"{prefix}.attn.in_proj_bias"] = inputs.layer(3 * width, width)
        layers |= {
            f"{prefix}.attn.out_proj": (width, width),
            f"{prefix}.mlp.up_proj": (shape.mlp_width, width),
            f"{prefix}.mlp.down_proj": (width, shape.mlp_width),
        }
    for name, sizes in layers.items():
        w[f"{name}.weight"], w[f"{name}.bias"] = inputs.layer(*sizes)
    return w


class Step:
    """A random head, prepared for the kernels, and the inputs of a draft step."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, seed: int, max_table_bytes: int = 1 << 30):
        inputs = self.inputs = Inputs(dtype, device, seed)
        self.shape = shape
        self.parameters = parameters(shape, inputs)
        self.embedding = inputs.normal(shape.vocab_size, shape.hidden_size)
        constants = HeadConstants(shape.num_heads, shape.trained_top_k, EPS, LOGIT_SCALE, VECTOR_EPS)
        self.head = FusedHead(self.parameters, constants, self.embedding, shape.num_reqs, max_table_bytes)
        self.logits = inputs.normal(shape.num_rows, shape.vocab_size, scale=4.0)
        self.hidden = inputs.normal(shape.num_rows, shape.hidden_size)
        self.anchor = inputs.normal(shape.num_reqs, shape.hidden_size)
        self.valid = torch.arange(shape.num_reqs, device=device) % 2 == 0
        self.draft_tokens = torch.zeros(shape.num_reqs, shape.num_slots, dtype=torch.int64, device=device)

    def fused(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.head.draft(self.draft_tokens, self.logits, self.hidden, self.anchor, self.valid, self.shape.top_k)

    def plain(self) -> torch.Tensor:
        """Draft tokens by plain PyTorch, in the head's dtype."""
        values, ids, partition = reference.partial_candidates(self.logits, self.shape.top_k)
        scores = self.plain_head(ids, values - partition, self.hidden.dtype)
        shape = (self.shape.num_reqs, self.shape.num_slots, self.shape.top_k)
        return reference.walk(scores, ids.view(shape), False)

    def plain_head(self, ids: torch.Tensor, log_probs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        w = {name: tensor.to(dtype) for name, tensor in self.parameters.items()}
        rows = self.embedding[ids.flatten()].to(dtype)
        rows = torch.nn.functional.linear(rows, w["token_proj.weight"], w["token_proj.bias"])
        row_ids = torch.arange(len(rows), device=rows.device).view_as(ids)
        states = (self.hidden.to(dtype), self.anchor.to(dtype), self.valid)
        numbers = (self.shape.num_heads, self.shape.trained_top_k, EPS, LOGIT_SCALE, VECTOR_EPS)
        return reference.head(w, rows, row_ids, log_probs, *states, *numbers)
