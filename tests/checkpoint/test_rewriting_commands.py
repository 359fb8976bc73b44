# SPDX-License-Identifier: Apache-2.0
"""`lilicorr quantize` and `lilicorr convert` at the command line."""

import json
from pathlib import Path

import pytest
from dialects import as_older_export
from pairs import drafter_config, write_drafter

from vllm_lilicorr.checkpoint import writer
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.checkpoint.writer import partial_folder
from vllm_lilicorr.cli import main


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return as_older_export(write_drafter(tmp_path / "drafter", drafter_config()))


def test_quantize_prints_a_table_and_a_summary(drafter: Path, tmp_path: Path, capsys) -> None:
    """Would catch a report that leaves out a module, its error, or the sizes before and after."""
    assert main(["quantize", str(drafter), str(tmp_path / "made"), "--format", "nvfp4-w4a16", "--keep", "fc"]) == 0
    printed = capsys.readouterr().out
    assert "6 changed modules" in printed and "layers.1.mlp.down_proj" in printed and "0.09" in printed
    before, after = Checkpoint.open(drafter).num_bytes, Checkpoint.open(tmp_path / "made").num_bytes
    assert f"({after / before:.0%})" in printed


def test_json_is_all_that_standard_output_holds(drafter: Path, tmp_path: Path, capsys) -> None:
    """Would catch a progress bar or a table between the braces."""
    words = ["quantize", str(drafter), str(tmp_path / "made"), "--format", "fp8", "--encoder", "builtin", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["encoder"] == "builtin" and report["quantization"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert len(report["modules"]) == 7 and report["num_reused"] == 0
    assert report["bytes_after"] == Checkpoint.open(tmp_path / "made").num_bytes


def test_convert_says_what_it_wrote(drafter: Path, tmp_path: Path, capsys) -> None:
    """Would catch a conversion that reports nothing."""
    assert main(["convert", str(drafter), str(tmp_path / "made")]) == 0
    assert f"{tmp_path / 'made'}: float. " in capsys.readouterr().out
    assert main(["convert", str(drafter), str(tmp_path / "numbered"), "--program", "sglang"]) == 0
    assert "lilicorr.feature_mlp.0.weight" in Checkpoint.open(tmp_path / "numbered").tensors


@pytest.mark.parametrize("verb", [["quantize", "--format", "nvfp4"], ["convert"]])
def test_mistakes_end_in_a_sentence(drafter: Path, tmp_path: Path, capsys, verb: list[str]) -> None:
    """Would catch a traceback, or a folder made before the mistake was noticed."""
    for words, expected in (
        ([str(tmp_path / "nowhere"), str(tmp_path / "made")], "nowhere does not exist"),
        ([str(drafter), str(drafter)], "exists; nothing is overwritten"),
        ([str(drafter), str(drafter / "made")], "which is only read"),
        ([str(drafter), str(tmp_path / "no" / "made")], "is no folder"),
        ([str(drafter), str(tmp_path / ("x" * 250))], "cannot be read or written (File name too long)"),
        ([str(drafter), str(tmp_path / ("x" * 300))], "File name too long. Name another place"),
    ):
        assert main([*verb, *words]) == 2
        error = capsys.readouterr().err.lstrip()  # after an empty progress bar
        assert error.startswith("lilicorr: ") and expected in error and "Traceback" not in error
    (drafter / "model.safetensors").write_bytes(b"short")
    assert main([*verb, str(drafter), str(tmp_path / "made")]) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]


def test_an_interrupted_command_says_how_to_go_on(
    drafter: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch Ctrl-C that ends in a traceback, loses the work, or leaves a folder that looks whole."""
    monkeypatch.setattr(writer, "MAX_FILE_BYTES", 10_000)
    words = ["quantize", str(drafter), str(tmp_path / "made"), "--format", "nvfp4-w4a16"]
    sync, count = writer.os.fsync, iter(range(1000))

    def interrupt(handle: int) -> None:
        sync(handle)
        if next(count) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(writer.os, "fsync", interrupt)
    assert main(words) == 130
    error = capsys.readouterr().err
    assert "Run the same command again to go on" in error and "Traceback" not in error
    assert not (tmp_path / "made").exists()
    monkeypatch.setattr(writer.os, "fsync", sync)
    assert main(words) == 0
    assert "files were finished before" in capsys.readouterr().out
    assert not partial_folder(tmp_path / "made").exists()
    Checkpoint.open(tmp_path / "made")
