# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks inside `vllm serve`, before any weight is read.

A drafter that is not on disk yet is fetched first: it is the small part of the
pair, and a mistake in it should not wait for the target to load.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lilicorr.checkpoint.doctor import WEIGHT_CHECKS, examine
from vllm_lilicorr.checkpoint.findings import Level, raise_errors
from vllm_lilicorr.checkpoint.location import local_folder
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.doctor.diagnosis import check_serving, this_machine
from vllm_lilicorr.doctor.engine_arguments import EngineArguments
from vllm_lilicorr.doctor.gpu_rules import backend_to_set

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.lilicorr")

# How options were written is past, and this machine's CPU runs vLLM already.
_NOT_AT_START = ("options", "method", "CPU")
_COPIED = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "tensor_parallel_size",  # pipeline stages are refused where vLLM itself says that it runs on a CPU
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "linear_backend",
    "mamba_ssm_cache_dtype",
)
_LOADERS_OF_FILES = ("auto", "hf", "safetensors", "fastsafetensors")


def check_before_loading(
    engine_args: "EngineArgs", speculative: Mapping[str, Any], target_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Examines drafter, target and engine arguments; logs each warning.

    Args:
        engine_args: vLLM's.
        speculative: the speculative config, as vLLM will get it.
        target_config: the target's (text) configuration.

    Returns:
        What to add to the speculative config so that it works on this machine.

    Raises:
        ValueError: the pair, or what was asked for, has errors; the message lists them.
    """
    drafter = str(speculative["model"])
    folder = local_folder(drafter, speculative.get("revision"), engine_args.download_dir, fetch=True)
    if folder is None:
        logger.warning("The drafter %r is not on disk, so it is not checked before the target is loaded.", drafter)
        return {}
    target_folder = local_folder(engine_args.model, engine_args.revision, engine_args.download_dir, fetch=False)
    skip = ["target tensors"]  # the target's weights are vLLM's to judge
    if target_folder is None:
        skip.append("mask token")  # there is no tokenizer to ask
    if _load_format(engine_args, speculative) not in _LOADERS_OF_FILES:
        skip += WEIGHT_CHECKS
    target = Checkpoint.configuration(target_folder) if target_folder else Checkpoint(Path())
    # A multimodal target declares its quantization, and with it the KV cache's, beside its text configuration.
    declared = {key: target.config[key] for key in ("quantization_config",) if key in target.config}
    subject, findings = examine(folder, replace(target, config=declared | dict(target_config)), skip)
    arguments = _arguments(engine_args, speculative)
    left_out = list(_NOT_AT_START)
    if getattr(engine_args, "_api_process_rank", 0) >= 0 and getattr(engine_args, "_api_process_count", 1) > 1:
        left_out.append("GPU memory")  # one of several API servers: the engine is loading beside it
    server, more = check_serving(subject, arguments, this_machine(), skip=left_out)
    raise_errors([*findings, *more], f"The drafter {drafter!r}")
    for finding in (*findings, *more):
        if finding.level is Level.WARNING:
            logger.warning("%s: %s", finding.check, finding.sentence)
    if subject.geometry is not None:
        logger.info(
            "LiLiCorr drafts with %s: %s tokens per step, from %d candidates each.",
            drafter,
            speculative.get("num_speculative_tokens", subject.geometry.num_slots),
            subject.geometry.top_k,
        )
    backend = backend_to_set(server) if server else None
    if backend is None:
        return {}
    logger.info("The drafter attends through %s: vLLM's own choice does not start on this GPU.", backend)
    return {"attention_backend": backend}


def _load_format(engine_args: "EngineArgs", speculative: Mapping[str, Any]) -> str:
    """Of the drafter: its own, else the target's."""
    own = speculative.get("draft_load_config")
    stated = own.get("load_format", "auto") if isinstance(own, Mapping) else getattr(own, "load_format", None)
    return str(stated or engine_args.load_format)


def _arguments(engine_args: "EngineArgs", speculative: Mapping[str, Any]) -> EngineArguments:
    """Engine arguments as the rules read them; what a release of vLLM does not have, or leaves open, is left out."""
    given = {name: getattr(engine_args, name, None) for name in _COPIED}
    if not isinstance(given["dtype"], str):
        given["dtype"] = str(given["dtype"]).removeprefix("torch.") if given["dtype"] else None
    if not isinstance(given["max_model_len"], int) or given["max_model_len"] < 1:
        given["max_model_len"] = None
    return EngineArguments(
        target=engine_args.model,
        speculative=speculative,
        **{name: value for name, value in given.items() if value is not None},
    )
