# SPDX-License-Identifier: Apache-2.0
"""The other end of `engine_worker`: starts it, asks for runs, ends it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_lilicorr.measure.acceptance import SpeculationCounts
from vllm_lilicorr.serving.installation import find_vllm
from vllm_lilicorr.serving.launch import preload_environment
from vllm_lilicorr.serving.server import OFFLINE_LOOPBACK, ServerFailedError


@dataclass(frozen=True)
class Run:
    """One measured run of one engine."""

    seconds: float
    tokens: int
    counts: SpeculationCounts
    token_ids: list[list[int]]
    steps: tuple[int, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Output tokens, prompt processing included in the time."""
        return self.tokens / self.seconds


class EngineClient:
    """An engine process; a context manager, at whose end the process is gone."""

    def __init__(self, name: str, engine_arguments: dict[str, Any], log_file: Path) -> None:
        """Args: a name for messages; keyword arguments of vllm.LLM; where its log goes."""
        self.name = name
        self.engine_arguments = engine_arguments
        self.log_file = log_file
        self._process: subprocess.Popen[str] | None = None
        self._busy_cpu_seconds = 0.0
        self._loaded_cpu_seconds = 0.0

    def __enter__(self) -> "EngineClient":
        preload, _ = preload_environment(find_vllm(), os.environ)
        environment = {**OFFLINE_LOOPBACK, "VLLM_CPU_KVCACHE_SPACE": "1", **preload}
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_lilicorr.measure.engine_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._ask(self.engine_arguments)
        self._loaded_cpu_seconds = self._cpu_seconds()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def run(self, prompts: list[str], concurrency: int, max_tokens: int, sampling: dict[str, Any] | None = None) -> Run:
        """Completes the prompts; see engine_worker.run."""
        before = self._cpu_seconds()
        request = {"prompts": prompts, "concurrency": concurrency, "max_tokens": max_tokens, "sampling": sampling}
        answer = self._ask(request)
        self._busy_cpu_seconds += self._cpu_seconds() - before
        counts = answer["counts"]
        counts["accepted_by_position"] = tuple(counts["accepted_by_position"])
        return Run(
            answer["seconds"],
            answer["tokens"],
            SpeculationCounts(**counts),
            answer["token_ids"],
            tuple(answer["steps"]),
        )

    def run_load(self, requests: dict[str, list[dict[str, Any]]], phases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Keeps the engine under a steady load; see load.run_load."""
        before = self._cpu_seconds()
        answer = self._ask({"requests": requests, "phases": phases})
        self._busy_cpu_seconds += self._cpu_seconds() - before
        return answer["phases"]

    def waiting_cpu_seconds(self) -> float:
        """Processor time used since loading outside of runs: what the other engines were robbed of."""
        return self._cpu_seconds() - self._loaded_cpu_seconds - self._busy_cpu_seconds

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # The missing answer below says it better.
        line = self._process.stdout.readline()
        if not line:
            raise ServerFailedError(f"The engine {self.name!r} ended unexpectedly; its log: {self.log_file}")
        return json.loads(line)
