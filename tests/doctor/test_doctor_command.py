# SPDX-License-Identifier: Apache-2.0
"""`lilicorr doctor` and `lilicorr inspect`, as a user would type them."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from broken import write_pair

from vllm_lilicorr.cli import main

WIDTH = "100"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", WIDTH)

    def type_in(command):
        code = main(shlex.split(command))
        return code, *capsys.readouterr()

    return type_in


def change(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_a_whole_pair(pair, run):
    """Would catch a clean pair with another exit code than 0, or a table without its checks."""
    code, out, _ = run(f"doctor {pair[0]} --target {pair[1]} --deep --strict")
    assert code == 0
    assert "no warnings, no errors" in out
    for check in ("files", "tensors", "quantization", "vocabulary", "values", "vLLM", "attention backend"):
        assert re.search(rf"^ok +{check}", out, re.MULTILINE), check
    assert max(map(len, out.splitlines())) <= int(WIDTH)


def test_exit_codes(tmp_path, run):
    """Would catch a script that takes a broken drafter for a whole one."""
    drafter, target = write_pair(tmp_path)
    change(drafter, is_neox_style=False)
    assert run(f"doctor {drafter}")[0] == 0
    code, out, _ = run(f"doctor {drafter} --strict")
    assert (code, "1 warning, no errors" in out) == (1, True)
    change(drafter, vocab_size=511)
    code, out, _ = run(f"doctor {drafter} --target {target}")
    assert code == 2
    assert re.search(r"^error +vocabulary +vocab_size 511: the target's is 512", out, re.MULTILINE)
    assert "Use the drafter that was trained for this target." in out


def test_json_is_for_programs(pair, run):
    """Would catch output that a program cannot read, or findings that lack a part."""
    code, out, _ = run(f"doctor {pair[0]} --json --gpu gb10 --vllm-args {pair[1]} -tp 3")
    report = json.loads(out)
    assert code == 2
    assert (report["drafter"], report["target"], report["machine"]) == (str(pair[0]), str(pair[1]), "gb10")
    assert all(set(finding) == {"check", "level", "value", "rule", "remedy"} for finding in report["findings"])
    (error,) = (finding for finding in report["findings"] if finding["level"] == "error")
    assert (error["check"], error["value"]) == ("ranks", "tensor_parallel_size 3")


def test_vllms_arguments_name_the_pair(pair, run):
    """Would catch a pair that must be named twice."""
    config = json.dumps({"method": "lilicorr", "model": str(pair[0]), "num_speculative_tokens": 9})
    code, out, _ = run(f"doctor --vllm-args {pair[1]} --speculative-config '{config}'")
    assert code == 2
    assert "num_speculative_tokens 9" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("doctor", "No drafter is named"),
        ("doctor no/where", r"'no/where' is neither a folder nor .* hf download no/where"),
        ("doctor no-where", "'no-where' is neither a folder nor .* name an existing folder"),
        ("doctor DRAFTER --gpu gtx", "'gtx' is not a machine known here; use one of gb10"),
        ("doctor DRAFTER --vllm-args m -tp x", "vLLM's options cannot be read"),
        ("inspect no-where", "is neither a folder"),
        ("inspect TARGET", r"is no LiLiCorr drafter \(architectures \['Qwen3ForCausalLM'\]\)"),
        (f"inspect {'x' * 300}", "File name too long. Name another place"),
    ],
)
def test_mistakes_end_in_one_sentence(pair, run, command, message):
    """Would catch a traceback for a typing mistake."""
    code, out, err = run(command.replace("DRAFTER", str(pair[0])).replace("TARGET", str(pair[1])))
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert err.count("\n") == 1


def test_a_closed_pipe_is_no_error(pair):
    """Would catch a traceback after `lilicorr doctor DRAFTER | head -1`."""
    command = [sys.executable, "-m", "vllm_lilicorr.cli", "inspect", str(pair[0]), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 2


def test_inspect(pair, run):
    """Would catch an overview that leaves out a part, and sums that do not add up."""
    code, out, _ = run(f"inspect {pair[0]}")
    assert code == 0
    assert "8 tokens with the anchor: 7 drafted, 8 candidates each" in out
    assert "6 weights nvfp4-w4a16" in out
    assert "ms on DGX Spark (GB10)" in out
    code, out, _ = run(f"inspect {pair[0]} --json")
    result = json.loads(out)
    assert sum(result["part_bytes"].values()) == sum(result["dtype_bytes"].values()) == result["bytes_per_draft_step"]


def test_a_broken_checkpoint_is_not_inspected(tmp_path, run):
    """Would catch numbers printed for a checkpoint that is not whole."""
    drafter, _ = write_pair(tmp_path)
    file = sorted(drafter.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = run(f"inspect {drafter}")
    assert (code, out) == (2, "")
    assert "it is truncated" in err


def test_swapped_models_are_noticed(pair, run):
    """Would catch advice to look for another drafter, where the two names only stand in the wrong order."""
    code, out, _ = run(f"doctor {pair[1]} --target {pair[0]}")
    assert code == 2
    assert "Drafter and target are swapped" in out


def test_an_nvfp4_target_is_not_served_in_float32(tmp_path, run):
    """Would catch a start that vLLM refuses after it was called fine."""
    drafter, target = write_pair(tmp_path)
    quantized = tmp_path / "quantized"
    assert main(["quantize", str(target), str(quantized), "--format", "nvfp4-w4a16"]) == 0
    code, out, _ = run(f"doctor {drafter} --vllm-args {quantized} --dtype float32")
    assert code == 2
    assert "Use --dtype bfloat16." in out
    assert run(f"doctor {drafter} --vllm-args {quantized} --dtype bfloat16")[0] == 0


def test_no_verb_lists_the_verbs(run):
    """Would catch a bare command that leaves a new user without a hint."""
    code, _, err = run("")
    assert code == 2
    assert "inspect" in err and "quantize" in err
