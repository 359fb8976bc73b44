# SPDX-License-Identifier: Apache-2.0
"""An engine in this process, with its draft counters and its trace: what every exactness test runs."""

import gc
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pairs import write_checkpoint
from safetensors.torch import load_file
from vllm import LLM, RequestOutput, SamplingParams

from vllm_lilicorr.checkpoint.layout import HEAD_PREFIX

MAX_MODEL_LEN = 512
TRACE = "LILICORR_TRACE"


@dataclass(frozen=True)
class Draft:
    """One line of the trace: what was drafted for one request at one position."""

    candidate_ids: list[list[int]]
    edge_logits: list[list[list[float]]]
    path: list[int]
    draft_token_ids: list[int]


@dataclass(frozen=True)
class Step:
    """One verification: where its block started and how many of its drafts were accepted."""

    position: int
    accepted: int


@dataclass
class Counters:
    """What vLLM reports to its stat loggers, summed over all requests of one engine."""

    drafts: int = 0
    accepted: int = 0
    preemptions: int = 0


def _keep_process_groups() -> None:
    """Process groups are those of every engine in this process: none that ends may take them from the others.

    vLLM also ends an engine when its client is collected, which can be long after `Engine.close`.
    """
    from vllm.v1.engine import core

    core.cleanup_dist_env_and_memory = lambda *arguments, **options: None


_keep_process_groups()


class Engine:
    """vLLM with a target and, where one is named, a drafter. Float32 and eager unless told otherwise."""

    num_open = 0
    parked: ClassVar[list[Any]] = []

    def __init__(
        self,
        target: Path,
        drafter: Path | None = None,
        *,
        trace: Path | None = None,
        speculative: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if drafter is not None:
            options["speculative_config"] = {"method": "lilicorr", "model": str(drafter)} | (speculative or {})
        settings: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "block_size": 32,
            "enable_prefix_caching": False,
            "num_gpu_blocks_override": 1024,
            "disable_log_stats": False,
            "seed": 0,
        }
        self._trace, self._read = trace, 0
        saved = os.environ.pop(TRACE, None)
        if trace is not None:
            os.environ[TRACE] = str(trace)
        try:
            self.llm = LLM(str(target), **(settings | options))
        finally:
            os.environ.pop(TRACE, None)
            if saved is not None:
                os.environ[TRACE] = saved
        Engine.num_open += 1
        self.counters = Counters()
        # vLLM's Prometheus counters belong to the process and are reset by its next engine.
        self.llm.llm_engine.logger_manager.record = self._count

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], **options: Any
    ) -> list[RequestOutput]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False, **options)

    def _count(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        if iteration_stats is not None:
            self.counters.preemptions += iteration_stats.num_preempted_reqs
        stats = getattr(scheduler_stats, "spec_decoding_stats", None)
        if stats is not None:
            self.counters.drafts += stats.num_drafts
            self.counters.accepted += stats.num_accepted_tokens

    def take_trace(self) -> dict[str, dict[int, Draft]]:
        """What was drafted since the last call: request id to position to draft."""
        assert self._trace is not None, "the engine was built without a trace"
        drafts: dict[str, dict[int, Draft]] = {}
        with self._trace.open() as lines:
            lines.seek(self._read)
            for line in lines:
                record = json.loads(line)
                request_id = record["request_id"].rsplit("-", 1)[0]
                drafts.setdefault(request_id, {})[record["anchor_position"]] = Draft(
                    record["candidate_ids"], record["edge_logits"], record["path"], record["draft_token_ids"]
                )
        self._read = self._trace.stat().st_size
        return drafts

    @property
    def proposer(self) -> Any:
        return self.runner.drafter

    @property
    def runner(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    def close(self) -> None:
        """Frees the engine's cache. Its process groups are those of every engine in this process, so an engine
        that shares them stays, without its cache, until the last one closes."""
        Engine.num_open -= 1
        core = self.llm.llm_engine.engine_core
        executor = getattr(getattr(core, "engine_core", None), "model_executor", None)
        if not hasattr(executor, "driver_worker"):  # in processes of its own
            core.shutdown()
            return
        runner = self.runner
        runner.kv_caches.clear()
        for layer in runner.compilation_config.static_forward_context.values():
            layer.kv_cache = torch.empty(0)
        Engine.parked.append(core)
        if Engine.num_open == 0:
            for core in Engine.parked:
                core.shutdown()
            Engine.parked.clear()
        del core, executor, runner, self.llm
        gc.collect()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """The served token ids of each request's first completion."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def accepted_steps(drafts: dict[int, Draft], prompt: list[int], served: list[int]) -> list[Step]:
    """The request's verifications, rebuilt from its drafts and its served tokens.

    Raises:
        KeyError: a block started at a position where nothing was drafted.
    """
    sequence = prompt + served
    position, steps = len(prompt), []
    while position < len(sequence) - 1:
        accepted = 0
        for token, served_token in zip(drafts[position].draft_token_ids, sequence[position + 1 :], strict=False):
            if token != served_token:
                break
            accepted += 1
        steps.append(Step(position, accepted))
        position += accepted + 1
    return steps


def without_head(drafter: Path, folder: Path) -> Path:
    """A copy of a LiLiCorr drafter as a plain DFlash drafter: its backbone alone."""
    config = json.loads((drafter / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    nested = {key: value for key, value in config["dflash_config"].items() if not key.startswith("lilicorr_")}
    nested.pop("projector_type", None)
    tensors = load_file(drafter / "model.safetensors")
    backbone = {name: tensor for name, tensor in tensors.items() if HEAD_PREFIX not in name}
    return write_checkpoint(folder, config | {"dflash_config": nested}, backbone)
