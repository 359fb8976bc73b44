# SPDX-License-Identifier: Apache-2.0
"""Every check finds what it is for, and says nothing of a whole pair."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from broken import FIRST, Case, write_pair
from broken_cases import CASES, DEEP_CASES
from safetensors.torch import load_file, save_file

from vllm_lilicorr.checkpoint.deep_values import deep_findings
from vllm_lilicorr.checkpoint.doctor import CHECKS, examine
from vllm_lilicorr.checkpoint.findings import Finding, Level, exit_code
from vllm_lilicorr.checkpoint.inspection import inspect
from vllm_lilicorr.checkpoint.reader import Checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copy(whole: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    drafter, target = whole
    return shutil.copytree(drafter, tmp_path / "drafter"), shutil.copytree(target, tmp_path / "target")


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is not Level.OK]


def matching(findings: list[Finding], case: Case) -> list[Finding]:
    return [
        finding
        for finding in findings
        if (finding.check, finding.level) == (case.check, case.level) and re.search(case.message, finding.sentence)
    ]


def test_a_whole_pair_is_clean(whole: tuple[Path, Path]) -> None:
    """Would catch a check that cries wolf, on headers and on values."""
    subject, findings = examine(*whole)
    assert bad(findings) == []
    assert bad(deep_findings(subject.drafter)) == []
    assert exit_code(findings, strict=True) == 0
    assert {"files", "geometry", "tensors", "quantization", "vocabulary", "mask token", "target tensors"} <= {
        finding.check for finding in findings
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_broken(case: Case, copy: tuple[Path, Path]) -> None:
    """Would catch a broken checkpoint that is called whole, a traceback, or a check that does nothing."""
    case.damage(*copy)
    _, findings = examine(*copy)
    (found,) = matching(findings, case)
    assert found.value and (found.rule or case.check == "geometry")
    assert case.check == "geometry" or found.remedy
    assert exit_code(findings, strict=True) >= (2 if case.level is Level.ERROR else 1)
    _, without = examine(*copy, skip=[case.check])
    assert not matching(without, case)


@pytest.mark.parametrize("case", DEEP_CASES, ids=lambda case: case.name)
def test_broken_values(case: Case, copy: tuple[Path, Path]) -> None:
    """Would catch a checkpoint whose headers are whole and whose values are not."""
    case.damage(*copy)
    subject, findings = examine(*copy)
    assert exit_code(findings) == 0
    (found,) = matching(deep_findings(subject.drafter), case)
    assert found.remedy


def test_each_check_has_its_case() -> None:
    """Would catch a new check that nothing shows to work."""
    assert {*CHECKS, "files", "target files", "geometry"} == {case.check for case in CASES}


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """Would catch a traceback for a typing mistake."""
    (tmp_path / "file").write_text("")
    for name, what in (("file", "is a file"), ("nothing", "does not exist")):
        _, findings = examine(tmp_path / name)
        assert [finding.level for finding in findings] == [Level.ERROR]
        assert what in findings[0].sentence


def test_the_caches_links_are_followed(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Would catch every checkpoint from the Hugging Face cache refused: its snapshots are links to blobs."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(whole[0].iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert bad(examine(snapshot, whole[1])[1]) == []


def test_a_folder_inside_a_repository(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Would catch a drafter that is a subfolder of its target's repository refused for the cache's links."""
    repository = tmp_path / "models--someone--pair"
    folder = repository / "snapshots" / "0123abcd" / "drafter"
    (repository / "blobs").mkdir(parents=True)
    folder.mkdir(parents=True)
    for file in whole[0].iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (folder / file.name).symlink_to(f"../../../blobs/{file.name}")
    assert bad(examine(folder, whole[1])[1]) == []


def test_hidden_files_are_no_weights(copy: tuple[Path, Path]) -> None:
    """Would catch a start stopped by the "._" files that a Mac leaves beside every copied file."""
    drafter, target = copy
    (target / "._model.safetensors").write_bytes(b"\0\5\x16\7")
    assert bad(examine(drafter, target)[1]) == []


def test_unsharded_and_prefixed_names(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Would catch checks that know one naming only."""
    from safetensors.torch import load_file, save_file

    drafter = tmp_path / "drafter"
    drafter.mkdir()
    shutil.copy(whole[0] / "config.json", drafter)
    tensors = {}
    for file in whole[0].glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            name = name.replace("lilicorr.feature_norm", "lilicorr.feature_mlp.0")
            tensors[name if name.startswith("lilicorr.") else f"model.{name}"] = tensor
    save_file(tensors, drafter / "model.safetensors")
    assert bad(examine(drafter, whole[1])[1]) == []


def test_a_multimodal_target_is_read_inside(whole: tuple[Path, Path], copy: tuple[Path, Path]) -> None:
    """Would catch a vision-language target whose dimensions are looked for at the top level."""
    drafter, target = copy
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({"model_type": "vl", "text_config": config}))
    assert bad(examine(drafter, target)[1]) == []


def test_every_dtype_of_the_format_is_known(copy: tuple[Path, Path]) -> None:
    """Would catch a target with 6-bit weights called damaged."""
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4, 4], "data_offsets": [0, 12]}}).encode()
    (copy[1] / "more.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    assert bad(examine(*copy)[1]) == []


def test_a_second_embedding_is_another_parts(copy: tuple[Path, Path]) -> None:
    """Would catch a multimodal target refused for the small vocabulary in which it speaks."""
    file = copy[1] / "model.safetensors"
    save_file(load_file(file) | {"a.talker.embed_tokens.weight": torch.ones(10, 8)}, file)
    assert bad(examine(*copy)[1]) == []


def test_large_headers_are_read_fast(tmp_path: Path) -> None:
    """Would catch a check that takes longer than the load that it precedes, or that reads values.

    As many tensors, shards and bytes as a 70 GB pair has; the files are sparse.
    """
    count, shards, size = 164_000, 17, 430_000
    places = {}
    for shard in range(shards):
        header, offset = {}, 0
        for number in range(shard, count, shards):
            name = f"backbone.layers.{number % 88}.mixer.experts.{number // 88}.weight"
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
            offset += size
            places[name] = f"model-{shard}.safetensors"
        text = json.dumps(header).encode()
        with (tmp_path / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text("{}")
    start = time.process_time()
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.tensors) == count
    assert checkpoint.num_bytes == count * size > 70e9
    assert time.process_time() - start < 4  # twice the promise: this machine may be busy; reading 70 GB takes minutes


def test_inspection_counts_everything_once(whole: tuple[Path, Path]) -> None:
    """Would catch parameters counted packed, or bytes left out."""
    result = inspect(whole[0])
    plain = inspect(whole[0].parent / "plain")
    assert result.parameters == plain.parameters
    assert result.num_bytes == sum(result.dtype_bytes.values()) < plain.num_bytes
    assert result.formats["nvfp4-w4a16"] == 6
    assert sum(plain.parameters.values()) * 4 == plain.num_bytes == plain.bytes_per_step


def test_reading_a_tensor_gives_its_values(whole: tuple[Path, Path]) -> None:
    """Would catch a tensor read from the wrong place, or as another type."""
    import torch
    from safetensors.torch import load_file

    checkpoint = Checkpoint.open(whole[0])
    for name, expected in load_file(whole[0] / FIRST).items():
        found = checkpoint.read(name)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_nothing_outside_the_folders_is_opened(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Would catch an index or a link that makes the checks read a file of somebody else."""
    cases = [case for case in CASES if "link" in case.name or "index" in case.name]
    for number, case in enumerate(cases):
        drafter = shutil.copytree(whole[0], tmp_path / str(number) / "drafter")
        case.damage(drafter, shutil.copytree(whole[1], tmp_path / str(number) / "target"))
    script = """
import json, os, sys
from pathlib import Path
from vllm_lilicorr.checkpoint.doctor import examine
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
for folder in sorted(Path(sys.argv[1]).iterdir()):
    first = len(opened)
    examine(folder / "drafter")
    root = os.path.realpath(folder / "drafter")
    for path in opened[first:]:
        assert os.path.realpath(path).startswith(root + os.sep), path
print(len(opened))
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > len(cases)
