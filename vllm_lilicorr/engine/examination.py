# SPDX-License-Identifier: Apache-2.0
"""Would the drafter have drafted better if one thing about it were otherwise?

A block of slots is drafted in parallel, from the target's features up to its anchor. So
every position of text that was already served shows how likely the drafter finds each
of the S tokens that came next, whatever was accepted then. An examination asks that
again under alternatives: the other RoPE layout, another mask token, rescaled
projections, features of other layers or of another request. All of them see the same
positions, so a difference is not the text's.

It runs the drafter's own layers on copies of what it saw; no KV cache is read or
written. Plain DFlash layers on one rank only: a drafter with convolutions, or shared
by several ranks, is not examined.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

# Rows of random numbers by which the sizes of projections are measured.
_ROWS_PROBED = 32
# Tokens looked at on either end of the vocabulary for one that was never trained, and the cosine of two such.
_ENDS, _ALIKE = 256, 0.9
# A broken drafter is sure of itself, and an alternative must not win by being less sure: all are scored
# at the best of these temperatures.
_TEMPERATURES = (1.0, 1.5, 2.0, 3.0)
# Positions whose logits are held at once: 34 MB of fp32 at 7 slots and a vocabulary of 152k, a few times.
_ANCHORS_AT_ONCE = 8


@dataclass(frozen=True)
class Transcript:
    """What the drafter saw of one request from its first token on.

    Attributes:
        num_prompt_tokens: how many of the first tokens were the prompt.
        token_ids: [T + 1] int64: those with features and the one after them.
        context: [T, D] features after fc.
        layers: [T, D_target] outputs of single target layers, by layer.
    """

    num_prompt_tokens: int
    token_ids: torch.Tensor
    context: torch.Tensor
    layers: Mapping[int, torch.Tensor]

    def anchors(self, num_slots: int, at_most: int) -> torch.Tensor:
        """Positions [N] int64 that are followed by `num_slots` tokens, spread evenly over the answer."""
        first, end = max(self.num_prompt_tokens, 1), len(self.token_ids) - num_slots
        every = torch.arange(first, max(end, first))
        stride = max(1, math.ceil(len(every) / max(at_most, 1)))
        return every[::stride]


@dataclass(frozen=True)
class Alternative:
    """One thing that is otherwise; empty for what stays as it is.

    Attributes:
        gate, up, value: factors of these projections, per layer.
        target_layer_ids: layers whose outputs are the features.
        foreign_context: the features are another request's.
    """

    is_neox_style: bool | None = None
    mask_token_id: int | None = None
    gate: tuple[float, ...] = ()
    up: tuple[float, ...] = ()
    value: tuple[float, ...] = ()
    target_layer_ids: tuple[int, ...] = ()
    foreign_context: bool = False

    @property
    def kind(self) -> str:
        """What is otherwise, by the keys of method/health.py."""
        if self.is_neox_style is not None:
            return "rope"
        if self.mask_token_id is not None:
            return "mask"
        return "layers" if self.target_layer_ids else "scales"

    @property
    def description(self) -> str:
        """The value that is otherwise, for a message."""
        if self.is_neox_style is not None:
            return f"is_neox_style {str(self.is_neox_style).lower()}"
        if self.mask_token_id is not None:
            return f"mask token {self.mask_token_id} (never trained)"
        if self.target_layer_ids:
            return f"target_layer_ids {list(self.target_layer_ids)}"
        if self.value:
            return "values of the size of the keys"
        if all(factor == 1 for factor in self.gate):
            return "up projections of the size of gate"
        return "gate projections of the size of up" if all(f == 1 for f in self.up) else "gate and up of one size"


class Examiner:
    """Scores alternatives on transcripts; needs vLLM's DFlash drafter with its weights loaded."""

    def __init__(self, drafter: Any, num_slots: int) -> None:
        self._drafter, self._model, self._num_slots = drafter, drafter.model, num_slots
        self.is_neox_style: bool = self._model.layers[0].self_attn.rotary_emb.is_neox_style
        self.mask_token_id: int = self._model.mask_token_id

    @staticmethod
    def can_examine(drafter: Any) -> bool:
        """Whether the drafter's layers are those that are known here."""
        model = drafter.model
        attention = model.layers[0].self_attn
        return not (
            hasattr(model.layers[0], "attention_conv")
            or attention.v_scale is not None
            or attention.attention_sink_bias is not None
            or attention.causal
            or model.has_separate_mask_embedding
        )

    def projection_sizes(self) -> list[dict[str, float]]:
        """Per layer, the root mean square of the weights of each of its stacked projections.

        Measured through the layers on random rows, so that packed weights count as what they mean.
        """
        sizes = []
        for layer in self._model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            generator = torch.Generator().manual_seed(0)
            width = layer.input_layernorm.weight.shape[0]
            rows = torch.randn(_ROWS_PROBED, width, generator=generator).to(layer.input_layernorm.weight)
            qkv = attention.qkv_proj(rows)[0].float()
            query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
            gate, up = mlp.gate_up_proj(rows)[0].float().chunk(2, dim=-1)
            parts = {"query": query, "key": key, "value": value, "gate": gate, "up": up}
            sizes.append({name: (part.square().mean().item() / width) ** 0.5 for name, part in parts.items()})
        return sizes

    def alternatives(self, target_layer_ids: Sequence[int], num_target_layers: int) -> list[Alternative]:
        """What is worth asking of any drafter, the wrong context last."""
        masks = [Alternative(mask_token_id=token) for token in self._likely_mask_tokens()]
        sizes = self.projection_sizes()

        def factors(of: str, to: str, power: float = 1.0) -> tuple[float, ...]:
            return tuple((layer[to] / layer[of]) ** power for layer in sizes)

        ones = (1.0,) * len(sizes)
        scales = [
            Alternative(gate=factors("gate", "up"), up=ones),
            Alternative(gate=ones, up=factors("up", "gate")),
            Alternative(gate=factors("gate", "up", 0.5), up=factors("up", "gate", 0.5)),
            Alternative(value=factors("value", "key")),
        ]
        return [
            Alternative(is_neox_style=not self.is_neox_style),
            *masks,
            *scales,
            *(Alternative(target_layer_ids=ids) for ids in likely_target_layers(target_layer_ids, num_target_layers)),
            Alternative(foreign_context=True),
        ]

    def _likely_mask_tokens(self) -> list[int]:
        """Up to two tokens that the target was never trained on, as mask tokens are: at the ends of the
        vocabulary, with embeddings that hardly differ from another's."""
        vocab_size = self._model.config.vocab_size
        ends = {*range(min(_ENDS, vocab_size)), *range(max(vocab_size - _ENDS, 0), vocab_size)}
        tokens = torch.tensor(sorted(ends - {self.mask_token_id}), device=self._model.norm.weight.device)
        embeddings = F.normalize(self._model.embed_input_ids(tokens).float(), dim=-1)
        nearest = (embeddings @ embeddings.T).fill_diagonal_(-1).amax(1)
        found = nearest.topk(min(2, len(tokens)))
        return [
            token
            for token, near in zip(tokens[found.indices].tolist(), found.values.tolist(), strict=True)
            if near > _ALIKE
        ]

    def score(self, transcripts: Sequence[Transcript], alternative: Alternative, num_anchors: int) -> torch.Tensor:
        """Mean log-probability of the S tokens that followed at each position, [N] fp32 on the CPU.

        Every transcript must have positions; the same ones are taken for every alternative.
        """
        rows = []
        for index, transcript in enumerate(transcripts):
            anchors = transcript.anchors(self._num_slots, max(1, num_anchors // len(transcripts)))
            context = self._context(transcripts, index, alternative)
            for piece in anchors.to(transcript.context.device).split(_ANCHORS_AT_ONCE):
                rows.append(self._log_probs(transcript, piece, context, alternative))
        log_probs = torch.cat(rows, dim=1).mean(2)  # [temperatures, N]
        return log_probs[log_probs.mean(1).argmax()].cpu()

    def _context(self, transcripts: Sequence[Transcript], index: int, alternative: Alternative) -> torch.Tensor:
        transcript = transcripts[index]
        if alternative.foreign_context:
            other = transcripts[(index + 1) % len(transcripts)].context
            length = len(transcript.context)
            return other.repeat(math.ceil(length / len(other)), 1)[:length]
        if alternative.target_layer_ids:
            return self.combine(transcript, alternative.target_layer_ids)
        return transcript.context

    def combine(self, transcript: Transcript, layer_ids: Sequence[int]) -> torch.Tensor:
        """Features [T, D] of these layers; vLLM hands layers over in ascending order, whatever the config's."""
        layers = [transcript.layers[layer] for layer in sorted(layer_ids)]
        return self._drafter.combine_hidden_states(torch.cat(layers, dim=-1))

    def _log_probs(
        self,
        transcript: Transcript,
        anchors: torch.Tensor,  # [N] int64
        features: torch.Tensor,  # [T, D]
        alternative: Alternative,
    ) -> torch.Tensor:
        """Log-probabilities [temperatures, N, S] fp32 of the tokens that followed."""
        model, num_slots = self._model, self._num_slots
        device = features.device
        neox = self.is_neox_style if alternative.is_neox_style is None else alternative.is_neox_style
        mask_token_id = self.mask_token_id if alternative.mask_token_id is None else alternative.mask_token_id
        tokens = transcript.token_ids.to(device)
        shape = (len(anchors), 1 + num_slots)
        block = torch.full(shape, mask_token_id, dtype=torch.int64, device=device)
        block[:, 0] = tokens[anchors]
        positions = anchors[:, None] + torch.arange(1 + num_slots, device=device)
        rows = torch.arange(len(features), device=device)
        mask = F.pad(rows < anchors[:, None], (0, 1 + num_slots), value=True)[:, None, None]  # [N, 1, 1, T + 1 + S]
        normed = model.hidden_norm(features)
        states = model.embed_input_ids(block.flatten())
        for index, layer in enumerate(model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            factor = alternative.value[index] if alternative.value else 1.0
            _, keys, values = self._attended(attention, normed, rows, neox, factor)
            query, key, value = (
                part.unflatten(0, shape).transpose(1, 2)
                for part in self._attended(attention, layer.input_layernorm(states), positions.flatten(), neox, factor)
            )
            keys, values = (part.transpose(0, 1).expand(len(anchors), -1, -1, -1) for part in (keys, values))
            mixed = F.scaled_dot_product_attention(
                query,
                torch.cat((keys, key), dim=2),
                torch.cat((values, value), dim=2),
                attn_mask=mask,
                scale=attention.scaling,
                enable_gqa=True,
            )
            states = states + attention.o_proj(mixed.transpose(1, 2).flatten(0, 1).flatten(1))[0]
            gate, up = mlp.gate_up_proj(layer.post_attention_layernorm(states))[0].chunk(2, dim=-1)
            if alternative.gate:
                gate, up = gate * alternative.gate[index], up * alternative.up[index]
            states = states + mlp.down_proj(F.silu(gate) * up)[0]
        hidden = model.norm(states).view(*shape, -1)[:, 1:].flatten(0, 1)
        logits = self._drafter.compute_logits(hidden).float()
        right = logits.gather(1, tokens[positions[:, 1:]].view(-1, 1))[:, 0]
        scored = [right / divisor - (logits / divisor).logsumexp(-1) for divisor in _TEMPERATURES]
        return torch.stack(scored).view(-1, len(anchors), num_slots)

    def _attended(
        self,
        attention: Any,
        states: torch.Tensor,  # [N, D]
        positions: torch.Tensor,  # [N] int64
        neox: bool,
        value_factor: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [N, heads, head_dim], normalised and rotated."""
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        query, key, value = (
            part.unflatten(-1, (-1, attention.head_dim)).contiguous()
            for part in attention.qkv_proj(states)[0].split(sizes, dim=-1)
        )
        cache = attention.rotary_emb.cos_sin_cache[positions].to(states.dtype)
        query = _rotate(attention.q_norm(query), cache, neox)
        return query, _rotate(attention.k_norm(key), cache, neox), value * value_factor


def likely_target_layers(ids: Sequence[int], num_layers: int) -> list[tuple[int, ...]]:
    """Layers that `ids` may have been meant as: counted from another end of a layer, or spread evenly."""
    first, last = 1, num_layers - 2
    steps = max(len(ids) - 1, 1)
    guesses = [
        [i + 1 for i in ids],
        [i - 1 for i in ids],
        [math.floor(first + (last - first) * i / steps + 0.5) for i in range(len(ids))],
        [round(first + (last - 1 - first) * i / steps) for i in range(len(ids))],
    ]
    known = {tuple(sorted(ids))}
    likely = []
    for guess in map(tuple, guesses):
        if guess not in known and all(0 <= i < num_layers for i in guess):
            known.add(guess)
            likely.append(guess)
    return likely


def _rotate(
    states: torch.Tensor,  # [N, heads, head_dim]
    cache: torch.Tensor,  # [N, rotary_dim], cosines before sines
    neox: bool,
) -> torch.Tensor:
    cos, sin = cache[:, None].chunk(2, dim=-1)
    rotary, rest = states.split([cache.shape[-1], states.shape[-1] - cache.shape[-1]], dim=-1)
    first, second = rotary.chunk(2, dim=-1) if neox else (rotary[..., ::2], rotary[..., 1::2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(turned, dim=-1) if neox else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((rotated, rest), dim=-1)
