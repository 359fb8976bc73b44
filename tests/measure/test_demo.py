# SPDX-License-Identifier: Apache-2.0
"""The demo with real servers: what it shows, and that nothing of it is left running."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.slow
MARK = "LILICORR_TEST_MARK"
# tests/conftest.py sets these for engines inside the test process; a user has none of them.
NOT_A_USERS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
START_TIMEOUT = 600


def _listen_to_ctrl_c() -> None:
    """As at a terminal: a suite that runs in the background was told to ignore it, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Demo:
    """A running `lilicorr demo`, and all processes that came of it."""

    def __init__(self, pair, folder: Path, *options: str) -> None:
        self.folder = folder
        self.output = folder.parent / "output.txt"
        self._mark = uuid.uuid4().hex
        environment = {name: text for name, text in os.environ.items() if name not in NOT_A_USERS}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm_lilicorr.cli", "demo",
                    "--target", str(pair.target), "--drafter", str(pair.drafter),
                    "--folder", str(folder), *options,
                ],
                stdout=file, stderr=subprocess.STDOUT, env={**environment, MARK: self._mark, "COLUMNS": "120"},
                preexec_fn=_listen_to_ctrl_c,
            )  # fmt: skip

    def wait_for(self, words: str) -> None:
        """Until the output holds `words`."""
        deadline = time.monotonic() + START_TIMEOUT
        while words not in self.output.read_text():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.2)

    def left_running(self) -> list[str]:
        """Command lines of living processes that inherited our mark, after a moment to end."""
        for _ in range(50):
            found = [line for pid, line in self._marked() if pid != self.process.pid]
            if not found:
                return []
            time.sleep(0.2)
        return found

    def _marked(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                        yield int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue


@pytest.fixture
def demo(pair, tmp_path) -> Iterator[Demo]:
    pytest.importorskip("vllm")
    running = Demo(pair, tmp_path / "demo", "--max-tokens", "24", "--dtype", "float32")
    yield running
    if running.process.poll() is None:
        running.process.terminate()
        running.process.wait(60)


def test_it_runs_to_the_end(demo):
    """Any part of the main job not working: plugin, launcher, server, streaming, counters, lattice."""
    code = demo.process.wait(2 * START_TIMEOUT)
    printed = demo.output.read_text()
    assert code == 0, printed
    for words in ("without", "speed-up", "Acceptance length", "accepted, by position", "One real lattice"):
        assert words in printed
    assert "Acceptance length 1.00" not in printed
    assert "first" not in printed.partition("same tokens")[2].partition("median")[0], "float32 is exact"
    ElementTree.parse(demo.folder / "lattice.svg")
    assert demo.left_running() == []


@pytest.mark.parametrize(
    ("moment", "signal_number", "exit_code"),
    [
        ("$ lilicorr serve", signal.SIGINT, 130),
        ("── class", signal.SIGTERM, 143),
    ],
    ids=["Ctrl-C while starting", "SIGTERM while streaming"],
)
def test_nothing_is_left_after_an_interruption(demo, moment, signal_number, exit_code):
    """A server that goes on holding its port and memory."""
    demo.wait_for(moment)
    time.sleep(2)
    demo.process.send_signal(signal_number)
    assert demo.process.wait(60) == exit_code, demo.output.read_text()
    assert "Traceback" not in demo.output.read_text()
    assert demo.left_running() == []
