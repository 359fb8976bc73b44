# SPDX-License-Identifier: Apache-2.0
"""What a user writes in --speculative-config, made into what vLLM understands.

vLLM runs LiLiCorr under its method "dflash"; the drafter's architecture selects
the correlator. Every check here runs before any weight is read.
"""

import difflib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from transformers import PretrainedConfig

from vllm_lilicorr.checkpoint.findings import raise_errors
from vllm_lilicorr.checkpoint.layout import attention_window
from vllm_lilicorr.checkpoint.location import local_folder
from vllm_lilicorr.checkpoint.pair import config_findings
from vllm_lilicorr.checkpoint.reader import Checkpoint, scan
from vllm_lilicorr.engine.options import KEY, Options
from vllm_lilicorr.method.geometry import ARCHITECTURE, DrafterGeometry, is_lilicorr_config

METHOD = "lilicorr"
VLLM_METHOD = "dflash"
_LOST_OBJECT = (
    "Dotted options such as --speculative-config.num_speculative_tokens replace the whole "
    "--speculative-config object in vLLM: put every key into one JSON object, or start the server with "
    "`lilicorr serve`, which merges them."
)


def translate(
    raw: Mapping[str, Any],
    read_config: Callable[[str, str | None], Mapping[str, Any] | None],
    target_config: PretrainedConfig,
    default_walk: str | None = None,
) -> tuple[dict[str, Any], Options | None]:
    """A speculative config for vLLM, with what the checkpoint knows filled in, and our own options.

    Args:
        raw: the user's keys, with underscores.
        read_config: drafter and revision to its config.json, None where there is none.
        target_config: the target's (text) configuration.
        default_walk: the walk where the user's keys name none.

    A value that the user set is never replaced. Only a checkpoint's content makes it
    LiLiCorr: with the method "dflash" or none, any other drafter comes back unchanged,
    without options.

    Raises:
        ValueError: a value is outside what this drafter or pair allows.
    """
    config = dict(raw)
    method, model = config.get("method"), config.get("model")
    if method not in (METHOD, VLLM_METHOD, None):
        if difflib.get_close_matches(str(method).lower(), [METHOD], cutoff=0.75):
            raise ValueError(f'method {method!r} in the speculative config is none of vLLM\'s; write "{METHOD}".')
        return config, None
    if not model:
        if method == VLLM_METHOD:
            return config, None
        raise ValueError(f"The speculative config {config!r} names no drafter. {_LOST_OBJECT}")
    if method is None and "/" not in model:  # a built-in method's name, or a dotted class
        return config, None
    drafter_config = read_config(model, config.get("revision"))
    if drafter_config is None or not is_lilicorr_config(drafter_config):
        if method != METHOD and KEY not in config:
            return config, None
        found = "no config.json" if drafter_config is None else f"architectures {drafter_config.get('architectures')}"
        raise ValueError(
            f'"{METHOD}" needs a {ARCHITECTURE} checkpoint, but {model!r} has {found}. Name a LiLiCorr drafter, '
            f'or use method "dflash" without "{KEY}" options for a plain DFlash one.'
        )
    geometry = DrafterGeometry.from_config(drafter_config)
    config["method"] = VLLM_METHOD
    _check_draft_length(config, geometry)
    if geometry.conv_kernel_size and config.get("num_speculative_tokens_per_batch_size"):
        raise ValueError(
            "num_speculative_tokens_per_batch_size is set, but this drafter's convolutions run over blocks of one "
            "length, fixed at start; leave it out, and choose one num_speculative_tokens."
        )
    raise_errors(
        config_findings(geometry, drafter_config, target_config.to_dict()),
        f"The drafter {model!r} does not fit this target",
    )
    options = _take_options(config, geometry, default_walk)
    config.setdefault("num_speculative_tokens", geometry.num_slots)
    if config.get("rejection_sample_method", "standard") == "standard":
        config.setdefault("draft_sample_method", "greedy" if options.walk == "greedy" else "probabilistic")
    return config, options


def _take_options(config: dict[str, Any], geometry: DrafterGeometry, default_walk: str | None) -> Options:
    """Our own keys, taken out of the speculative config."""
    given = config.pop(KEY, {})
    options = Options.from_mapping(
        {"walk": default_walk} | given if default_walk and isinstance(given, Mapping) else given
    )
    if options.candidate_topk is not None and options.candidate_topk > geometry.top_k:
        raise ValueError(
            f"candidate_topk={options.candidate_topk}, but this drafter was trained with {geometry.top_k} candidates "
            f"per slot; use 1..{geometry.top_k}."
        )
    draws = config.get("draft_sample_method")
    if (options.walk, draws) == ("greedy", "probabilistic"):
        raise ValueError(
            'walk="greedy" draws nothing, but draft_sample_method="probabilistic" asks for drawn drafts; '
            'leave one of them out, or use walk="sampled".'
        )
    return options


def refuse_pipeline_parallel(size: int) -> None:
    """Raises ValueError for the V1 runner with more than one pipeline stage."""
    if size > 1:
        raise ValueError(
            f"pipeline_parallel_size={size}, but on model runner V1 LiLiCorr needs the target's embedding and features "
            "on one rank; use pipeline_parallel_size=1 (tensor parallelism works)."
        )


def _check_draft_length(config: Mapping[str, Any], geometry: DrafterGeometry) -> None:
    length = config.get("num_speculative_tokens")
    if length is None:
        return
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= geometry.num_slots:
        raise ValueError(
            f"num_speculative_tokens={length!r}, but this drafter was trained with block_size "
            f"{geometry.block_size}; use 1..{geometry.num_slots}."
        )


# Where the engine that is being configured keeps downloads; None is the Hugging Face cache.
download_dir: ContextVar[str | None] = ContextVar("download_dir", default=None)


def rewrite_draft_config(
    inner: Callable[[PretrainedConfig], PretrainedConfig], download_dir: str | None, config: PretrainedConfig
) -> PretrainedConfig:
    """vLLM's own override of a drafter's configuration, then one dialect for LiLiCorr's.

    Older exports call a LiLiCorr drafter "DFlashDraftModel" and may keep block_size
    inside dflash_config. A window without use_sliding_window is lost where config.json
    is read as Qwen3's. The quantization becomes what the tensors are, whatever is
    declared. Used through functools.partial: it travels to vLLM's other processes by
    pickle.

    Raises:
        ValueError: a quantized weight of the drafter cannot be decoded.
    """
    model = config.name_or_path
    config = inner(config)
    values = config.to_dict()
    if is_lilicorr_config(values):
        config.architectures = [ARCHITECTURE]
        nested = dict(values["dflash_config"])
        nested.setdefault("block_size", values.get("block_size"))
        config.dflash_config = nested
        config.block_size = nested["block_size"]
        if model:  # vLLM also rewrites a configuration without a name, to learn its class
            folder = local_folder(model, getattr(config, "_commit_hash", None), download_dir, fetch=True)
            if folder is not None:
                checkpoint, _ = scan(folder)
                nested.update(attention_window(checkpoint.config))
                _replace_quantization(config, checkpoint)
    return config


def _replace_quantization(config: PretrainedConfig, checkpoint: Checkpoint) -> None:
    from vllm.platforms import current_platform

    from vllm_lilicorr.engine.drafter_quantization import stored_quantization

    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    own_lm_head = DrafterGeometry.from_config(config.to_dict()).has_own_lm_head
    found = stored_quantization(checkpoint, own_lm_head, on_cpu=current_platform.is_cpu())
    if found is not None:
        config.quantization_config = found
