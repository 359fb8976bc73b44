# SPDX-License-Identifier: Apache-2.0
"""The shape of a LiLiCorr drafter, read from its config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "LiLiCorrDraftModel"
PROJECTOR_TYPE = "lilicorr"
MAX_TOP_K = 16
MAX_LAYERS = 1024  # far above any model: a damaged number must not make as many names of tensors

_IN_CONFIG = "in the drafter's config.json"
_CORRECT = "Correct the value to the trained one, or export the drafter again."


def is_lilicorr_config(config: Mapping[str, Any]) -> bool:
    """Whether a drafter's config.json describes a LiLiCorr drafter.

    Newer exports name the architecture; older ones say "DFlashDraftModel" and
    carry projector_type "lilicorr". Only content decides, never a file name.
    """
    architectures, nested = config.get("architectures"), config.get("dflash_config")
    if isinstance(architectures, (list, tuple)) and ARCHITECTURE in architectures:
        return True
    return isinstance(nested, Mapping) and nested.get("projector_type") == PROJECTOR_TYPE


def _wrong(name: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"{name}={value!r} {_IN_CONFIG}: {rule}. {_CORRECT}")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise _wrong(name, value, "it must be a whole number")
    return int(value)


@dataclass(frozen=True)
class DrafterGeometry:
    """Validated dimensions of one drafter; both dialects of config.json give the same value.

    Letters of the method: D hidden_size, H head_width, F factor_dim, A num_heads,
    K top_k, S at most num_slots.
    """

    block_size: int
    hidden_size: int
    target_hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    attention_bias: bool
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    conv_kernel_size: int
    conv_group_size: int
    has_own_lm_head: bool
    top_k: int
    head_width: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_dim: int
    vector_eps: float
    logit_scale: float

    @property
    def num_slots(self) -> int:
        """Tokens a block can draft: the block counts the anchor too."""
        return self.block_size - 1

    @property
    def mlp_width(self) -> int:
        return int(self.head_width * self.mlp_ratio)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DrafterGeometry":
        """Reads config.json as a mapping.

        Raises:
            ValueError: a key is missing or its value cannot be; the message
                names the key, its value, the rule and the remedy.
        """
        nested = config.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise _wrong("dflash_config", nested, "it must be an object")

        def optional(name: str, default: Any) -> Any:
            value = nested.get(name, config.get(name))
            return default if value is None else value

        def required(name: str) -> Any:
            value = optional(name, None)
            if value is None:
                raise ValueError(
                    f"The drafter's config.json has no {name}; a LiLiCorr drafter needs it, at top "
                    "level or in dflash_config. Export the drafter again, or add the trained value."
                )
            return value

        def whole(name: str, default: int | None = None) -> int:
            return _whole(name, required(name) if default is None else optional(name, default))

        def real(name: str, default: float | None = None) -> float:
            value = required(name) if default is None else optional(name, default)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise _wrong(name, value, "it must be a number")
            return float(value)

        if not optional("lilicorr_enabled", True):
            raise ValueError(
                "lilicorr_enabled=false in the drafter's config.json: this checkpoint was exported "
                'without its correlator. Use it with method "dflash", or export it with the head.'
            )
        layer_ids = required("target_layer_ids")
        if not isinstance(layer_ids, list | tuple):
            raise _wrong("target_layer_ids", layer_ids, "it must list target layers by number, counted from 0")
        hidden_size, num_attention_heads = whole("hidden_size"), whole("num_attention_heads")
        if num_attention_heads < 1:
            raise _wrong("num_attention_heads", num_attention_heads, "it must be positive")
        geometry = cls(
            block_size=whole("block_size"),
            hidden_size=hidden_size,
            target_hidden_size=whole("target_hidden_size", hidden_size),
            num_hidden_layers=whole("num_hidden_layers"),
            num_attention_heads=num_attention_heads,
            num_key_value_heads=whole("num_key_value_heads", num_attention_heads),
            head_dim=whole("head_dim", hidden_size // num_attention_heads),
            intermediate_size=whole("intermediate_size"),
            vocab_size=whole("vocab_size"),
            rms_norm_eps=real("rms_norm_eps", 1e-6),
            attention_bias=bool(optional("attention_bias", False)),
            mask_token_id=whole("mask_token_id"),
            target_layer_ids=tuple(_whole("target_layer_ids", index) for index in layer_ids),
            conv_kernel_size=whole("conv_kernel_size", 0),
            conv_group_size=whole("conv_group_size", 0),
            has_own_lm_head=bool(config.get("has_own_lm_head") or False),
            top_k=whole("lilicorr_candidate_topk"),
            head_width=whole("lilicorr_hidden_size", 0) or hidden_size,
            num_layers=whole("lilicorr_num_layers"),
            num_heads=whole("lilicorr_num_heads"),
            mlp_ratio=real("lilicorr_mlp_ratio"),
            factor_dim=whole("lilicorr_factor_dim"),
            vector_eps=real("lilicorr_vector_eps"),
            logit_scale=real("lilicorr_logit_scale"),
        )
        geometry._validate()
        return geometry

    def _validate(self) -> None:
        def check(condition: bool, value: str, rule: str) -> None:
            if not condition:
                raise ValueError(f"{value} {_IN_CONFIG}: {rule}. {_CORRECT}")

        check(self.block_size >= 2, f"block_size={self.block_size}", "a block is an anchor and at least one slot")
        check(
            1 <= self.top_k <= MAX_TOP_K and self.top_k & (self.top_k - 1) == 0,
            f"lilicorr_candidate_topk={self.top_k}",
            f"it must be a power of two from 1 to {MAX_TOP_K}",
        )
        check(
            self.num_heads > 0 and self.head_width % self.num_heads == 0,
            f"lilicorr_num_heads={self.num_heads}",
            f"it must divide lilicorr_hidden_size={self.head_width}",
        )
        check(
            bool(self.conv_kernel_size) == bool(self.conv_group_size),
            f"conv_kernel_size={self.conv_kernel_size}, conv_group_size={self.conv_group_size}",
            "both are set or neither",
        )
        check(
            not self.conv_group_size or self.hidden_size % self.conv_group_size == 0,
            f"conv_group_size={self.conv_group_size}",
            f"it must divide hidden_size={self.hidden_size}",
        )
        check(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id={self.mask_token_id}",
            f"it must be a token of the vocabulary of {self.vocab_size}",
        )
        check(
            len(self.target_layer_ids) > 0 and all(i >= 0 for i in self.target_layer_ids),
            f"target_layer_ids={list(self.target_layer_ids)}",
            "it must list target layers by number, counted from 0",
        )
        check(self.vector_eps > 0, f"lilicorr_vector_eps={self.vector_eps}", "it must be positive")
        check(self.logit_scale > 0, f"lilicorr_logit_scale={self.logit_scale}", "it must be positive")
        for name in ("num_hidden_layers", "num_layers"):
            check(getattr(self, name) <= MAX_LAYERS, f"{name}={getattr(self, name)}", f"at most {MAX_LAYERS} are known")
        for name in (
            "hidden_size",
            "target_hidden_size",
            "num_hidden_layers",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "num_layers",
            "factor_dim",
            "vocab_size",
            "mlp_width",
        ):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)}", "it must be positive")
