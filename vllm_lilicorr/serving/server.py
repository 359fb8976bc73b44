# SPDX-License-Identifier: Apache-2.0
"""One vLLM OpenAI server as a child process: started, watched, and gone afterwards."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

# Phrases of vLLM's log, in the order of a start, and what they mean to a person.
PHASES = (
    ("Resolved architecture", "reading the configuration"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading the target"),
    ("Loading drafter model", "loading the drafter"),
    ("for vLLM's torch.compile", "compiling"),
    ("Application startup", "opening the port"),
)
OFFLINE_LOOPBACK = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
PR_SET_PDEATHSIG = 1
# After its leader, a group gets this many seconds: Python's resource tracker is a member
# of it and removes the shared memory of processes that were killed.
GROUP_PATIENCE = 5.0


class ServerFailedError(RuntimeError):
    """The server ended, or was not ready in time."""


class ServerProcess:
    """`lilicorr serve` in a process group of its own.

    Use as a context manager: whatever happens inside, nothing of the group is
    left running. Should this process be killed without a chance to clean up, the
    kernel sends the server SIGTERM, and its children follow it.
    """

    def __init__(
        self,
        arguments: list[str],
        port: int,
        log_file: Path,
        environment: dict[str, str],
    ) -> None:
        """Args: what follows `serve`; the port to open on loopback; variables to set."""
        self.command = [
            sys.executable, "-m", "vllm_lilicorr.cli", "serve", *arguments,
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = log_file
        self.environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready = False

    def __enter__(self) -> "ServerProcess":
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def wait_until_ready(self, timeout: float, on_progress: Callable[[str, float], None] | None = None) -> float:
        """Waits for /health.

        Args:
            timeout: Seconds.
            on_progress: Called a few times a second with the phase and the seconds passed.

        Returns:
            Seconds it took.
        """
        began = time.monotonic()
        while True:
            passed = time.monotonic() - began
            if self._process.poll() is not None:
                code = self._process.returncode
                raise self.failure(f"The server ended with exit code {code} before it was ready.")
            if passed > timeout:
                raise self.failure(f"The server was not ready after {timeout:.0f} s.")
            if self._healthy():
                self._was_ready = True
                return passed
            if on_progress:
                on_progress(self._phase(), passed)
            time.sleep(0.25)

    def metrics(self) -> str:
        """The text of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            return response.read().decode()

    def stop(self, patience: float | None = None) -> None:
        """Ends the server, politely first, and then all that is left of its group.

        Args:
            patience: Seconds that the server gets to end by itself. Without it, a server
                that was never ready gets few: it has no requests to finish.
        """
        if self._process is None:
            return
        if patience is None:
            patience = 15.0 if self._was_ready else 3.0
        group = self._process.pid
        try:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None
            _end_group(group, GROUP_PATIENCE)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _phase(self) -> str:
        text = self.log_file.read_text(errors="replace")
        reached = [words for phrase, words in PHASES if phrase in text]
        return reached[-1] if reached else "importing vLLM"

    def failure(self, what: str) -> ServerFailedError:
        """An error that says what happened, what the log says about it, and where the log is."""
        lines = [line for line in self.log_file.read_text(errors="replace").splitlines() if line]
        errors = [line for line in lines if "Error" in line or "Fatal" in line]
        shown = "\n".join(f"    {line[-300:]}" for line in (errors or lines)[-6:])
        return ServerFailedError(f"{what} Its log, {self.log_file}, ends with\n{shown}")


def _end_group(group: int, patience: float) -> None:
    """Waits for a process group to be empty, then kills what is left of it."""
    deadline = time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError):
        try:
            while time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(0.05)
        finally:
            os.killpg(group, signal.SIGKILL)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
