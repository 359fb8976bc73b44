# SPDX-License-Identifier: Apache-2.0
"""Registration in a fresh process: idempotent, optional, and all or nothing."""

import os
import subprocess
import sys

import pytest

REPORT = """
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
registered = ModelRegistry.models["LiLiCorrDraftModel"].module_name
print("WRAPS", hasattr(EngineArgs.create_speculative_config, "__wrapped__"), registered)
"""


def run(code: str, **environment: str) -> str:
    """Output of a fresh interpreter; its exit status must be 0."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", **environment}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def test_importing_the_package_imports_nothing() -> None:
    """Would catch a front end that pays for torch or vLLM when it only looks the plugin up."""
    code = "import sys, vllm_lilicorr.plugin; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    assert run(code).strip().endswith("[]")


def test_entry_point_registers_once() -> None:
    """Would catch a plugin that vLLM does not find, or that wraps its own wrapper when called again."""
    output = run(
        "from vllm.plugins import load_general_plugins as load\n"
        "load()\n"
        "from vllm_lilicorr.plugin import register\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "first = EngineArgs.create_speculative_config\n"
        "register(); register()\n"
        "assert EngineArgs.create_speculative_config is first\n"
        "import sys\n"
        "print('HEAVY', 'vllm.v1.worker.gpu_model_runner' in sys.modules)\n" + REPORT
    )
    assert "WRAPS True vllm_lilicorr.engine.drafter" in output
    assert "HEAVY False" in output


def test_disabled_leaves_vllm_untouched() -> None:
    """Would catch a switch that only hides messages."""
    output = run("from vllm_lilicorr.plugin import register; register()\n" + REPORT, LILICORR_DISABLE="1")
    assert "WRAPS False vllm.model_executor.models.lilicorr" in output


def test_unclear_switch_is_refused() -> None:
    """Would catch LILICORR_DISABLE=maybe read as false."""
    code = "from vllm_lilicorr.plugin import register\ntry: register()\nexcept ValueError as e: print('SAID', e)"
    assert "SAID LILICORR_DISABLE='maybe' is neither true nor false; use 1 or 0." in run(code, LILICORR_DISABLE="maybe")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("import vllm; vllm.__version__ = '0.35.1'", "does not fit vLLM 0.35.1: this version was not tested"),
        (
            "import dataclasses, vllm_lilicorr.engine.seams as s\n"
            "s.CONFIG_SEAMS = (dataclasses.replace(s.CONFIG_SEAMS[0], parameters=('target',)), *s.CONFIG_SEAMS[1:])",
            "EngineArgs.create_speculative_config takes ['target_model_config', 'target_parallel_config'], expected",
        ),
    ],
    ids=["version", "signature"],
)
def test_a_vllm_that_does_not_fit_is_left_untouched(change: str, message: str) -> None:
    """Would catch half of the seams replaced, silence, or the same warning over and over."""
    output = run(change + "\nfrom vllm_lilicorr.plugin import register; register(); register()\n" + REPORT)
    assert "WRAPS False vllm.model_executor.models.lilicorr" in output
    assert output.count(message) == 1
    assert "Tested versions: 0.31, 0.32, 0.33." in output


def test_spec_method_lists_lilicorr() -> None:
    """Would catch --spec-method lilicorr refused by the parser."""
    output = run(
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as P\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        "from vllm_lilicorr.plugin import register; register()\n"
        "a = AsyncEngineArgs.add_cli_args(P()).parse_args(['--spec-method', 'lilicorr', '--spec-model', 'd'])\n"
        "print('PARSED', a.spec_method, a.spec_model)"
    )
    assert "PARSED lilicorr d" in output
