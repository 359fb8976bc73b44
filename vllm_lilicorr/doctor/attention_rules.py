# SPDX-License-Identifier: Apache-2.0
"""Which attention backend vLLM picks for a drafter on a GPU, told without the GPU and without vLLM.

vLLM tries its backends in an order that depends on the GPU and takes the first that
accepts the layer. The drafter chooses for itself: only `attention_backend` inside the
speculative config overrides it, not the target's `--attention-backend`. The tables
hold what the backends of vLLM 0.31 to 0.33 accept; a test compares every prediction
with vLLM's own selection. Not covered: batch-invariant mode, decode context
parallelism, KV connectors, and KV cache types outside COVERED_KV_CACHE_DTYPES.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FLOAT_KV = ("auto", "float16", "bfloat16")
COVERED_KV_CACHE_DTYPES = (*FLOAT_KV, "fp8", "fp8_e4m3", "fp8_e5m2")
HALF_DTYPES = ("float16", "bfloat16")
Capability = tuple[int, int]


@dataclass(frozen=True)
class DrafterAttention:
    """What decides the backend of a drafter's attention layers.

    Attributes:
        head_dim: width of one head.
        non_causal: whether any layer attends in both directions inside the block.
        has_sinks: whether layers have learned attention sinks.
        dtype: of the activations: "bfloat16", "float16" or "float32".
        kv_cache_dtype: of the drafter's KV cache, as vLLM names it.
        block_size: tokens of a KV cache block where the user set --block-size, else None.
        target_head_dim: width of one head of the target: vLLM judges a block_size by it,
            for the drafter too.
    """

    head_dim: int
    non_causal: bool = True
    has_sinks: bool = False
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    target_head_dim: int = 128

    @property
    def has_fp8_cache(self) -> bool:
        return self.kv_cache_dtype.startswith("fp8")


def is_non_causal(config: Mapping[str, Any]) -> bool:
    """Whether vLLM needs a non-causal backend for the drafter of this config.json.

    In vLLM's order: top-level is_causal, dflash_config.causal, and without either the
    layers with full attention are non-causal, those with a sliding window causal.
    """
    for value in (config.get("is_causal"), (config.get("dflash_config") or {}).get("causal")):
        if value is not None:
            return not value
    layer_types = config.get("layer_types")
    if not isinstance(layer_types, list) or not layer_types:
        return True
    return any(kind != "sliding_attention" for kind in layer_types)


def predict_backend(capability: Capability, attention: DrafterAttention) -> str | None:
    """The backend that vLLM picks by itself; None where none accepts the layer."""
    return next((name for name in _priorities(capability, attention) if not refusal(name, capability, attention)), None)


def refusal(backend: str, capability: Capability, attention: DrafterAttention) -> str | None:
    """Why a backend does not take these layers on this GPU; None where it does."""
    rules = _BACKENDS[backend]
    if not rules.takes_head_dim(capability, attention.head_dim):
        return f"it has no kernel for head_dim {attention.head_dim}"
    if attention.dtype not in rules.dtypes:
        return f"it does not compute in {attention.dtype}"
    if attention.kv_cache_dtype not in rules.kv_cache_dtypes:
        return f"it reads no KV cache of type {attention.kv_cache_dtype}"
    page = rules.page(capability, attention)
    if attention.block_size is not None and attention.block_size % page:
        return f"its KV cache blocks are multiples of {page} tokens, not {attention.block_size}"
    if not rules.capabilities[0] <= capability <= rules.capabilities[1]:
        return "it does not run on this GPU"
    if attention.has_sinks and not rules.takes_sinks(capability):
        return "it has no attention sinks on this GPU"
    if attention.has_fp8_cache and not rules.takes_fp8_cache(capability, attention):
        return "it reads an FP8 KV cache on other GPUs or head widths only"
    return None


def _priorities(capability: Capability, attention: DrafterAttention) -> tuple[str, ...]:
    first = ("FLASH_ATTN", "FLASHINFER")
    if capability[0] == 10 and not attention.non_causal:
        first = first[::-1]
    return (*first, "TRITON_ATTN", "FLEX_ATTENTION")


def _flash_attn_head_dim(capability: Capability, head_dim: int) -> bool:
    has_version_4 = capability[0] in (9, 10, 11)
    return head_dim % 8 == 0 and head_dim <= (512 if has_version_4 else 256)


def _flash_attn_fp8_cache(capability: Capability, attention: DrafterAttention) -> bool:
    """Version 3 on Hopper up to 256 wide, version 4 there at 512; version 4 on SM10x up to 128 wide."""
    if capability[0] == 9:
        return attention.head_dim <= 256 or attention.head_dim == 512
    return capability[0] == 10 and attention.head_dim <= 128


def _flash_attn_page(capability: Capability, attention: DrafterAttention) -> int:
    """Version 4 has kernels with larger pages: for FP8 at 512 wide on Hopper, for 256 wide on SM10x."""
    if capability[0] == 9 and attention.target_head_dim == 512 and attention.kv_cache_dtype in ("fp8", "fp8_e4m3"):
        return 64
    if capability[0] == 10 and attention.target_head_dim == 256 and not attention.has_fp8_cache:
        return 128
    return 16


@dataclass(frozen=True)
class _Backend:
    """What one backend accepts: the first and the last capability, types, widths, sinks, blocks."""

    capabilities: tuple[Capability, Capability]
    dtypes: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    takes_head_dim: Callable[[Capability, int], bool]
    takes_sinks: Callable[[Capability], bool]
    takes_fp8_cache: Callable[[Capability, DrafterAttention], bool] = lambda capability, attention: True
    page: Callable[[Capability, DrafterAttention], int] = lambda capability, attention: 16


_ANY = ((0, 0), (99, 9))
_BACKENDS = {
    "FLASH_ATTN": _Backend(
        capabilities=((8, 0), _ANY[1]),
        dtypes=HALF_DTYPES,
        kv_cache_dtypes=(*FLOAT_KV, "fp8", "fp8_e4m3"),
        takes_head_dim=_flash_attn_head_dim,
        takes_sinks=lambda capability: capability[0] in (9, 10),
        takes_fp8_cache=_flash_attn_fp8_cache,
        page=_flash_attn_page,
    ),
    "FLASHINFER": _Backend(
        capabilities=((8, 0), (12, 1)),
        dtypes=HALF_DTYPES,
        kv_cache_dtypes=COVERED_KV_CACHE_DTYPES,
        takes_head_dim=lambda capability, head_dim: head_dim in (64, 128, 256, 512),
        # With FlashInfer's prebuilt kernels, which vLLM's images bring.
        takes_sinks=lambda capability: capability == (9, 0) or capability[0] in (10, 12),
    ),
    "TRITON_ATTN": _Backend(
        capabilities=_ANY,
        dtypes=(*HALF_DTYPES, "float32"),
        kv_cache_dtypes=COVERED_KV_CACHE_DTYPES,
        takes_head_dim=lambda capability, head_dim: head_dim >= 32,
        takes_sinks=lambda capability: True,
    ),
    "FLEX_ATTENTION": _Backend(
        capabilities=_ANY,
        dtypes=(*HALF_DTYPES, "float32"),
        kv_cache_dtypes=FLOAT_KV,
        takes_head_dim=lambda capability, head_dim: True,
        takes_sinks=lambda capability: False,
    ),
}
BACKENDS = tuple(_BACKENDS)
