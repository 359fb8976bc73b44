# SPDX-License-Identifier: Apache-2.0
"""Sources of vLLM releases that are not installed, read from their wheels.

Only Python files are kept, in .cache/vllm-sources/VERSION/vllm; nothing is installed and
nothing of CUDA is needed.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "vllm-sources"


def fetch(version: str) -> Path:
    """The folder `vllm` of a release, with its Python files in it.

    Raises:
        RuntimeError: the package index does not have the wheel, or is out of reach.
    """
    package = CACHE / version / "vllm"
    complete = package.parent / "complete"
    if complete.is_file():
        return package
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", "manylinux_2_28_x86_64", "--dest", folder, f"vllm=={version}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=900)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            raise RuntimeError(f"vllm {version} could not be downloaded: {result.stderr.strip()[-500:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(package.parent, [name for name in wheel.namelist() if name.endswith(".py")])
    complete.touch()
    return package
