# SPDX-License-Identifier: Apache-2.0
"""A server before it is started: what vLLM would make of its options, its models and its machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_lilicorr.checkpoint.pair import text_config
from vllm_lilicorr.doctor.attention_rules import COVERED_KV_CACHE_DTYPES, DrafterAttention, is_non_causal
from vllm_lilicorr.doctor.engine_arguments import EngineArguments
from vllm_lilicorr.doctor.machines import Machine
from vllm_lilicorr.method.geometry import DrafterGeometry

_DTYPES = {"half": "float16", "float": "float32"}
_CACHE_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}  # all others that are covered: 2, or 4 in float32
_STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_RECURRENT_KEYS = ("hybrid_override_pattern", "layers_block_type", "mamba_num_heads", "linear_num_value_heads")
# Of RoPE types whose max_position_embeddings already is the extended length.
_EXTENDED_ROPE_TYPES = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True)
class PlannedServer:
    """What the rules look at.

    Attributes:
        arguments: the options for `vllm serve`.
        machine: where it would run.
        geometry: of the drafter.
        drafter: its config.json.
        target: the target's config.json; None where no target is known.
        target_quantization: the target's hf_quant_config.json, if it has one.
        vllm_version: (major, minor) of vLLM.
    """

    arguments: EngineArguments
    machine: Machine
    geometry: DrafterGeometry
    drafter: Mapping[str, Any]
    target: Mapping[str, Any] | None = None
    target_quantization: Mapping[str, Any] | None = None
    vllm_version: tuple[int, int] = (0, 33)

    @property
    def speculative(self) -> Mapping[str, Any]:
        return self.arguments.speculative

    @property
    def target_text(self) -> Mapping[str, Any]:
        return text_config(self.target) if self.target else {}

    @property
    def num_drafted(self) -> int:
        return _size(self.speculative, "num_speculative_tokens") or self.geometry.num_slots

    @cached_property
    def dtype(self) -> str:
        """Of the activations of both models: the drafter takes the target's."""
        stated = self.arguments.dtype
        if stated == "auto":
            stated = str(self.target_text.get("dtype") or self.target_text.get("torch_dtype") or "bfloat16")
            return "float16" if stated == "float16" else "bfloat16"
        return _DTYPES.get(stated, stated)

    @cached_property
    def target_kv_cache_dtype(self) -> str:
        """`--kv-cache-dtype`; "auto" is what the target's quantization declares, if it declares any."""
        stated = self.arguments.kv_cache_dtype
        return (self._declared_kv_cache_dtype() or "auto") if stated == "auto" else stated

    @property
    def drafter_kv_cache_dtype(self) -> str:
        """The drafter's own, else the target's."""
        return str(self.speculative.get("kv_cache_dtype") or self.target_kv_cache_dtype)

    def _declared_kv_cache_dtype(self) -> str | None:
        declared = (self.target or {}).get("quantization_config") or self.target_quantization or {}
        if not isinstance(declared, Mapping):
            return None
        inner = declared.get("quantization")
        inner = inner if isinstance(inner, Mapping) else declared
        scheme = (
            inner.get("kv_cache_scheme")
            or declared.get("kv_cache_scheme")
            or inner.get("kv_cache_quant_algo")
            or declared.get("kv_cache_quant_algo")
        )
        if isinstance(scheme, Mapping):
            if scheme.get("type") != "float":
                return None
            scheme = {"8": "fp8", "4": "nvfp4"}.get(str(scheme.get("num_bits")))
        return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower())

    @cached_property
    def attention(self) -> DrafterAttention:
        """What decides the drafter's attention backend."""
        sinks = (self.drafter.get("dflash_config") or {}).get("attention_sink_bias")
        return DrafterAttention(
            head_dim=self.geometry.head_dim,
            non_causal=is_non_causal(self.drafter),
            has_sinks=bool(sinks),
            dtype=self.dtype,
            kv_cache_dtype=self.drafter_kv_cache_dtype,
            block_size=self.arguments.block_size,
            target_head_dim=head_width(self.target_text),
        )

    def drafter_kv_bytes(self, kv_cache_dtype: str) -> int:
        """Bytes of the drafter's KV cache for one token, on one rank."""
        heads = max(1, self.geometry.num_key_value_heads // self.arguments.tensor_parallel_size)
        each = self._cache_bytes(kv_cache_dtype)
        return 2 * self.geometry.num_hidden_layers * heads * self.geometry.head_dim * each

    def _cache_bytes(self, kv_cache_dtype: str) -> int:
        return _CACHE_BYTES.get(kv_cache_dtype, 4 if self.dtype == "float32" else 2)

    @property
    def has_hybrid_target(self) -> bool:
        """Whether the target has layers with a recurrent state (Mamba, gated delta)."""
        text = self.target_text
        kinds = str(text.get("layer_types"))
        return any(text.get(key) for key in _RECURRENT_KEYS) or "mamba" in kinds or "linear_attention" in kinds

    @cached_property
    def hybrid_block_tokens(self) -> int | None:
        """Tokens in one KV cache block of a Mamba-2 target; None for other targets and other caches.

        vLLM makes a block of an attention layer at least as large as the state of a Mamba
        layer: an SSM state [heads, head_dim, state], and a convolution state of
        conv_kernel - 1 + drafted tokens rows, two bytes each.
        """
        text = self.target_text
        names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
        heads, width, state, groups, taps = sizes = [_size(text, name) for name in names]
        kv_heads = _size(text, "num_key_value_heads") or _size(text, "num_attention_heads")
        if not all(sizes) or not kv_heads or self.target_kv_cache_dtype not in COVERED_KV_CACHE_DTYPES:
            return None
        ranks = self.arguments.tensor_parallel_size
        stated = self.arguments.mamba_ssm_cache_dtype
        stated = text.get("mamba_ssm_cache_dtype") if stated == "auto" else stated
        ssm = heads * width * state * _STATE_BYTES.get(str(stated), 4)
        convolution = 2 * (heads * width + 2 * groups * state) * (taps - 1 + self.num_drafted)
        per_token = 2 * max(1, kv_heads // ranks) * head_width(text) * self._cache_bytes(self.target_kv_cache_dtype)
        unit = max(16, self.arguments.block_size or 0)  # tokens that a block is rounded up to
        return unit * -(-(ssm + convolution) // (ranks * per_token * unit))


def head_width(text: Mapping[str, Any]) -> int:
    """Width of one attention head of a model, 128 where its configuration does not say."""
    stated = _size(text, "head_dim") or _size(text, "attention_head_dim")
    hidden, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
    return stated or (max(1, hidden // heads) if hidden and heads else 128)


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """A dimension of a config.json; None where it is missing or cannot be one."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def rope_type(config: Mapping[str, Any]) -> str:
    """The kind of position encoding that a config.json names."""
    rope = _rope(config)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model reaches by its own config.json, its RoPE scaling included; None where it does not say."""
    length, factor = _size(config, "max_position_embeddings"), _rope(config).get("factor")
    if length is None or not isinstance(factor, int | float) or not 1 <= factor < 1e6:
        return length
    return length if rope_type(config) in _EXTENDED_ROPE_TYPES else int(length * factor)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {}
