# SPDX-License-Identifier: Apache-2.0
"""A server process is started, watched, and gone afterwards, whatever happens."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from vllm_lilicorr.serving.preflight import choose_port
from vllm_lilicorr.serving.server import ServerFailedError, ServerProcess

# Answers /health after a moment; has a child, as vLLM's server has; ignores SIGTERM if told so.
FAKE_SERVER = """
import http.server, signal, subprocess, sys, time
port, behaviour = int(sys.argv[1]), sys.argv[2]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
if behaviour == "fails":
    print("ValueError: the drafter does not fit", flush=True)
    child.kill()
    sys.exit(3)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour == "hangs":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"text of " + self.path.encode())
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_server(tmp_path: Path, behaviour: str) -> ServerProcess:
    """A ServerProcess that runs the script above instead of vLLM."""
    (tmp_path / "fake.py").write_text(FAKE_SERVER)
    port = choose_port(None)
    server = ServerProcess(["MODEL"], port, tmp_path / "server.log", {})
    server.command = [sys.executable, str(tmp_path / "fake.py"), str(port), behaviour]
    return server


def child_of(server: ServerProcess) -> int:
    """Process id of the fake server's child."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for line in server.log_file.read_text().splitlines():
            if line.startswith("child "):
                return int(line.split()[1])
        time.sleep(0.05)
    raise AssertionError("the fake server did not start")


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    """Whether the process ends in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


def test_the_command_is_our_own_launcher(tmp_path):
    """A server started by another way than `lilicorr serve` lacks the preloaded libraries."""
    command = ServerProcess(["M", "--x"], 1234, tmp_path / "log", {}).command
    assert command[1:] == ["-m", "vllm_lilicorr.cli", "serve", "M", "--x", "--host", "127.0.0.1", "--port", "1234"]


@pytest.mark.parametrize("behaviour", ["polite", "stubborn"])
def test_nothing_of_the_group_is_left(tmp_path, behaviour):
    """Children of the server running on after it ended, or after it refused to end."""
    server = fake_server(tmp_path, behaviour)
    with server:
        server.wait_until_ready(timeout=20)
        child, parent = child_of(server), server._process.pid
        assert server.metrics() == "text of /metrics"
        server.stop(patience=1.0)
        assert gone_within(child, 5) and gone_within(parent, 5)


def test_an_error_inside_stops_the_server_too(tmp_path):
    """Ctrl-C while streaming leaving a server behind."""
    server = fake_server(tmp_path, "polite")
    with pytest.raises(KeyboardInterrupt), server:
        server.wait_until_ready(timeout=20)
        child = child_of(server)
        raise KeyboardInterrupt
    assert gone_within(child, 5)


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path):
    """Waiting out the whole timeout for a server that is long gone, then saying nothing of why."""
    with (
        fake_server(tmp_path, "fails") as server,
        pytest.raises(ServerFailedError, match="exit code 3(.|\n)*the drafter does not fit"),
    ):
        server.wait_until_ready(timeout=60)


def test_a_server_that_hangs_is_given_up(tmp_path):
    """Waiting forever; and no sign of life while waiting."""
    phases = []
    with fake_server(tmp_path, "hangs") as server:
        with pytest.raises(ServerFailedError, match="not ready after 1 s"):
            server.wait_until_ready(1.0, lambda phase, seconds: phases.append(phase))
    assert set(phases) == {"importing vLLM"}


def test_the_server_does_not_survive_a_killed_parent(tmp_path):
    """SIGKILL gives the parent no chance to clean up."""
    (tmp_path / "fake.py").write_text(FAKE_SERVER)
    parent_code = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from vllm_lilicorr.serving.server import ServerProcess
        server = ServerProcess(["M"], 1, Path({str(tmp_path / "server.log")!r}), {{}})
        server.command = [sys.executable, {str(tmp_path / "fake.py")!r}, "1", "hangs"]
        with server:
            print(server._process.pid, flush=True)
            time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    server_pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone_within(server_pid, 10)
