# SPDX-License-Identifier: Apache-2.0
"""Commands and code in the documentation are read by the real parsers."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_lilicorr import cli

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(language: str) -> list[str]:
    return [text for document in DOCUMENTS for kind, text in FENCE.findall(document.read_text()) if kind == language]


def commands(program: str) -> list[list[str]]:
    """Command lines of one program, as words."""
    lines = [line for text in blocks("bash") for line in text.splitlines()]
    lines += [line[2:] for text in blocks("console") for line in text.splitlines() if line.startswith("$ ")]
    return [words[1:] for line in lines if (words := shlex.split(line, comments=True))[:1] == [program]]


def test_only_languages_that_are_checked():
    """A block in a language that no test reads goes stale unseen."""
    kinds = {kind for document in DOCUMENTS for kind, _ in FENCE.findall(document.read_text())}
    assert kinds <= {"bash", "console", "python", "json"}


@pytest.mark.parametrize("text", blocks("python"))
def test_python_compiles(text):
    """A typing mistake in the first code that a reader copies."""
    ast.parse(text)


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_make_targets_exist(words):
    """A target that was renamed in the Makefile."""
    result = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("words", commands("lilicorr"), ids=" ".join)
def test_lilicorr_commands_parse(words, capsys):
    """An option that does not exist, or JSON that is not JSON."""
    if "serve" in words:
        pytest.importorskip("vllm")
        dry = words if words[0] == "--dry-run" else ["--dry-run", *words]
        assert cli.main(dry) == 0
        printed = shlex.split(capsys.readouterr().out)
        config = json.loads(printed[printed.index("--speculative-config") + 1])
        assert config["method"] == "lilicorr"
        assert not any("speculative-config." in word for word in printed)
    else:
        cli.build_parser().parse_args(words)


@pytest.mark.slow
@pytest.mark.parametrize("words", [w for w in commands("vllm") + commands("lilicorr") if "serve" in w], ids=" ".join)
def test_serve_options_are_vllms(words):
    """An option that vLLM's own parser does not know."""
    argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    from vllm_lilicorr.serving.speculative_overrides import merge_speculative_overrides

    arguments, _ = merge_speculative_overrides(words[words.index("serve") + 1 :])
    parser = make_arg_parser(argparse_utils.FlexibleArgumentParser())
    namespace = parser.parse_args(arguments)
    assert namespace.model_tag
    assert namespace.speculative_config["method"] == "lilicorr"


@pytest.mark.slow
@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(text, pair, tmp_path):
    """Code that compiles and fails, or a plugin that vLLM does not find in the processes it starts."""
    pytest.importorskip("vllm")
    text = text.replace('"TARGET"', repr(str(pair.target))).replace('"DRAFTER"', repr(str(pair.drafter)))
    script = tmp_path / "example.py"
    script.write_text(text)
    # tests/conftest.py keeps engines inside the test process; a user's have processes of their own.
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip()


def test_every_verb_is_documented():
    """A new verb that nobody hears of."""
    text = (ROOT / "docs" / "getting-started.md").read_text()
    (verbs,) = (action for action in cli.build_parser()._actions if action.dest == "verb")
    for verb in verbs.choices:
        assert f"`lilicorr {verb}" in text


def test_links_lead_somewhere():
    """A link to a file that was moved."""
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
