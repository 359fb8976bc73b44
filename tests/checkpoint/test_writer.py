# SPDX-License-Identifier: Apache-2.0
"""The writer of checkpoints: interrupted, killed, resumed, refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_lilicorr.checkpoint import writer
from vllm_lilicorr.checkpoint.plan import Part, Plan, PlannedTensor
from vllm_lilicorr.checkpoint.reader import Checkpoint
from vllm_lilicorr.checkpoint.writer import check_places, partial_folder, write_checkpoint

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
PLANNED = {"a": ("U8", (3, 5)), "b": ("F32", ()), "c": ("BF16", (7,)), "d": ("F8_E4M3", (2, 2)), "e": ("F32", (9, 4))}


def value(name: str) -> torch.Tensor:
    dtype, shape = PLANNED[name]
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randint(0, 100, shape, generator=generator).to(torch.float32).to(DTYPES[dtype])


def make_plan(made: list[str] | None = None, stop_at: str | None = None, how: int = 0, **settings: object) -> Plan:
    """One tensor per part. `made` collects what was made; `stop_at` raises, or kills this process with signal `how`."""

    def part(name: str) -> Part:
        def make():
            if name == stop_at:
                if how:
                    os.kill(os.getpid(), how)
                raise KeyboardInterrupt
            if made is not None:
                made.append(name)
            return {name: value(name)}, {"module": name}

        return Part(name, (PlannedTensor(name, *PLANNED[name]),), make)

    return Plan([part(name) for name in PLANNED], {"config.json": {"a": 1}}, settings=settings)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three files: a and b, c and d, e."""
    monkeypatch.setattr(writer, "MAX_FILE_BYTES", 20)


def assert_whole(folder: Path) -> None:
    assert not partial_folder(folder).exists()
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.tensors) == set(PLANNED)
    by_safetensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name in PLANNED:
        for found in (checkpoint.read(name), by_safetensors[name]):
            assert found.dtype == value(name).dtype and found.shape == value(name).shape
            assert torch.equal(found.float(), value(name).float())
    assert json.loads((folder / "config.json").read_text()) == {"a": 1}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Would catch wrong offsets, a number at an address that its dtype cannot have, and an index that disagrees."""
    counted: list[int] = []
    written = write_checkpoint(tmp_path / "made", make_plan(), counted.append)
    assert (written.num_files, written.num_reused) == (3, 0)
    assert [report["module"] for report in written.reports] == list(PLANNED)
    assert sum(counted) == make_plan().num_bytes
    assert_whole(tmp_path / "made")
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == make_plan().num_bytes


def test_wide_numbers_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a float32 at an odd address: readers map it in place and some refuse."""
    monkeypatch.setattr(writer, "MAX_FILE_BYTES", 10**6)
    write_checkpoint(tmp_path / "made", make_plan())
    assert_whole(tmp_path / "made")
    for entry in Checkpoint.open(tmp_path / "made").tensors.values():
        assert entry.begin % DTYPES[entry.dtype].itemsize == 0
    assert not list((tmp_path / "made").glob("*.index.json"))


@pytest.mark.parametrize("stop_at", PLANNED)
def test_an_interrupted_run_goes_on(tmp_path: Path, stop_at: str) -> None:
    """Would catch work done twice, a folder that looks whole too early, and an interruption that says nothing."""
    first: list[str] = []
    with pytest.raises(KeyboardInterrupt, match=r"of 3 files are finished in .*made\.partial\. Run the same command"):
        write_checkpoint(tmp_path / "made", make_plan(first, stop_at))
    assert not (tmp_path / "made").exists()
    assert not (partial_folder(tmp_path / "made") / "checkpoint" / "config.json").exists()
    second: list[str] = []
    written = write_checkpoint(tmp_path / "made", make_plan(second))
    assert_whole(tmp_path / "made")
    finished = set(PLANNED) - set(second)
    assert finished <= set(first) and len(set(first) - finished) <= 1
    assert written.num_reused == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}[stop_at]
    assert [report["module"] for report in written.reports] == list(PLANNED)


def test_config_json_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch an unfinished folder that looks whole, to someone who looks into DST.partial."""
    plan = make_plan()
    plan = Plan(plan.parts, {"config.json": {"a": 1}, "hf_quant_config.json": {}})
    write_text, names = writer._write_text, []
    monkeypatch.setattr(writer, "_write_text", lambda path, text: (names.append(path.name), write_text(path, text)))
    write_checkpoint(tmp_path / "made", plan)
    assert names[-3:] == ["model.safetensors.index.json", "hf_quant_config.json", "config.json"]


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Would catch a state that only an orderly end leaves behind: kill -9 between two files, then resume."""
    code = (
        "from pathlib import Path; import signal, test_writer as t\n"
        "t.writer.MAX_FILE_BYTES = 20\n"
        f"t.write_checkpoint(Path({str(tmp_path / 'made')!r}), t.make_plan(None, 'e', signal.SIGKILL))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "made").exists()
    made: list[str] = []
    assert write_checkpoint(tmp_path / "made", make_plan(made)).num_reused == 2
    assert made == ["e"]
    assert_whole(tmp_path / "made")


def test_a_finished_file_that_changed_is_written_again(tmp_path: Path) -> None:
    """Would catch a disk's or a user's damage being taken over because a record says finished."""
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "made", make_plan(None, "e"))
    damaged = partial_folder(tmp_path / "made") / "checkpoint" / "model-00002-of-00003.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert write_checkpoint(tmp_path / "made", make_plan()).num_reused == 1
    assert_whole(tmp_path / "made")


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    """Would catch files of two formats in one checkpoint."""
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "made", make_plan(None, "e", source=1))
    with pytest.raises(ValueError, match="begun with other options"):
        write_checkpoint(tmp_path / "made", make_plan(source=2))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Would catch a user's folder that happens to be called DST.partial being filled and then removed."""
    mine = partial_folder(tmp_path / "made")
    mine.mkdir()
    (mine / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that no unfinished command left"):
        write_checkpoint(tmp_path / "made", make_plan())
    assert [path.name for path in mine.iterdir()] == ["letter.txt"]
    shutil.rmtree(mine)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    mine.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is no folder"):
        write_checkpoint(tmp_path / "made", make_plan())
    assert not list(elsewhere.iterdir())


def test_two_commands_do_not_write_one_folder(tmp_path: Path) -> None:
    """Would catch two runs that overwrite each other's files."""
    seen = []

    def interfere(num_bytes: int) -> None:
        if not seen:
            seen.append(num_bytes)
            with pytest.raises(ValueError, match="another command"):
                write_checkpoint(tmp_path / "made", make_plan())

    write_checkpoint(tmp_path / "made", make_plan(), interfere)
    assert seen
    assert_whole(tmp_path / "made")


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a run of minutes that ends in "No space left on device"."""
    made: list[str] = []
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(ValueError, match="GiB are free"):
        write_checkpoint(tmp_path / "made", make_plan(made))
    assert made == []


def test_a_disk_that_fails_ends_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a traceback where the disk fills up or fails, and work lost with it."""

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "made", make_plan(None, "e"))
    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "fsync", fail)
        with pytest.raises(ValueError, match=r"\(No space left on device\).*finished files are kept"):
            write_checkpoint(tmp_path / "made", make_plan())
    assert write_checkpoint(tmp_path / "made", make_plan()).num_reused == 2
    assert_whole(tmp_path / "made")


def test_places(tmp_path: Path) -> None:
    """Would catch a checkpoint overwritten, written into its own source, or into nowhere."""
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(ValueError, match="exists; nothing is overwritten"):
        check_places(source, source)
    with pytest.raises(ValueError, match="which is only read"):
        check_places(source, source / "made")
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(ValueError, match="which is only read"):
        check_places(source, link / "made")
    with pytest.raises(ValueError, match="is no folder"):
        check_places(source, tmp_path / "nowhere" / "made")
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match="exists"):
        check_places(source, dangling)
    check_places(source, tmp_path / "made")
