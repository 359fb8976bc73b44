# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by every suite: the environment, and the trained pair that is tested."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

# Read when vLLM is imported. One process: a test can look into the engine.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def pytest_configure() -> None:
    """Gives each parallel worker a core of its own: threads of two engines that share cores wait for each other."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@dataclass(frozen=True)
class Pair:
    """A trained target and its LiLiCorr drafter, as folders."""

    target: Path
    drafter: Path


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The embedded pair, or the folder in LILICORR_TEST_PAIR that holds target/ and drafter/."""
    import vllm_lilicorr

    embedded = Path(vllm_lilicorr.__file__).parent / "assets" / "tiny-pair"
    folder = Path(os.environ.get("LILICORR_TEST_PAIR") or embedded)
    for name in ("target", "drafter"):
        if not (folder / name / "config.json").is_file():
            pytest.fail(
                f"{folder / name} has no config.json; set LILICORR_TEST_PAIR to a folder with target/, drafter/."
            )
    return Pair(folder / "target", folder / "drafter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes seconds runs before what starts engines and servers."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
