# SPDX-License-Identifier: Apache-2.0
"""Seams against vLLM's sources: the installed release, and those that are not."""

import importlib
import re
from pathlib import Path

import pytest
import vllm
from vllm_sources import fetch

from vllm_lilicorr.engine import seams
from vllm_lilicorr.engine.seams import ALL_SEAMS, Seam, is_tested, mismatch, mismatches

INSTALLED = Path(vllm.__file__).parent


def test_installed_release_fits() -> None:
    """Would catch a seam that this vLLM no longer has."""
    assert is_tested(vllm.__version__)
    assert mismatches(ALL_SEAMS, INSTALLED) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_other_tested_releases_fit(version: str) -> None:
    """Would catch a parameter renamed or a function moved in a release that is not installed here."""
    assert is_tested(version)
    try:
        package = fetch(version)
    except RuntimeError as error:  # offline, and not fetched before
        pytest.skip(str(error))
    assert mismatches(ALL_SEAMS, package) == []


@pytest.mark.parametrize("seam", ALL_SEAMS, ids=lambda seam: f"{seam.module}:{seam.name}")
def test_every_seam_exists_at_run_time(seam: Seam) -> None:
    """Would catch a seam whose syntax fits but whose name is not importable."""
    value = importlib.import_module(seam.module)
    for name in seam.name.split("."):
        value = getattr(value, name)
    assert seam.reason
    assert seam.removal


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("num_rejected_tokens_gpu: torch.Tensor | None", "num_rejected: torch.Tensor | None", "takes .*'num_rejected'"),
        ("def set_inputs_first_pass", "def set_inputs", "has no DFlashProposer.set_inputs_first_pass"),
        ("class DFlashProposer", "class DFlash", "has no DFlashProposer.set_inputs_first_pass"),
    ],
)
def test_a_changed_signature_is_named(tmp_path: Path, before: str, after: str, problem: str) -> None:
    """Would catch a check that passes whatever vLLM looks like."""
    seam = next(seam for seam in ALL_SEAMS if seam.name == "DFlashProposer.set_inputs_first_pass")
    source = (INSTALLED / "v1/spec_decode/dflash.py").read_text()
    assert before in source
    changed = tmp_path / "vllm/v1/spec_decode/dflash.py"
    changed.parent.mkdir(parents=True)
    changed.write_text(source.replace(before, after))
    found = mismatch(seam, tmp_path / "vllm")
    assert found is not None and re.search(problem, found), found


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    """Would catch a crash where a release moved a whole module."""
    assert mismatch(ALL_SEAMS[0], tmp_path) == "vllm.engine.arg_utils is gone"


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0.0", "0.3.0", "dev"])
def test_other_versions_are_not_taken_for_tested(version: str) -> None:
    """Would catch prefix matching ("0.3" in "0.33")."""
    assert not is_tested(version)


def test_nothing_else_touches_internals() -> None:
    """Would catch a replaced attribute of vLLM outside seams.py."""
    package = Path(seams.__file__).parents[1]
    offenders = [
        f"{path.name}:{number}"
        for path in package.rglob("*.py")
        if path.name != "seams.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.startswith(("setattr(", "vllm.")) or "monkeypatch" in line
    ]
    assert offenders == []
    for folder in ("method", "checkpoint"):
        for path in (package / folder).rglob("*.py"):
            assert "import vllm\n" not in path.read_text() and "from vllm." not in path.read_text(), path
