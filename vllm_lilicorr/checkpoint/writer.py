# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint so that a folder of its name is always whole, and goes on where it was interrupted.

Everything is made in FOLDER.partial, beside FOLDER, and one rename at the end gives it its name. Finished files are
kept with their SHA-256, so that a second run of the same command verifies them and writes only the others. Tensors
are made and written one part at a time: memory is bounded by the largest part.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lilicorr.checkpoint.headers import DTYPE_BITS
from vllm_lilicorr.checkpoint.plan import Part, Plan, PlannedTensor, Written
from vllm_lilicorr.checkpoint.reader import INDEX_NAME

if TYPE_CHECKING:
    import torch

MAX_FILE_BYTES = 512 * 2**20
_READ_BYTES = 2**20
_PLAN_NAME = "plan.json"
_CHECKPOINT_NAME = "checkpoint"  # what FOLDER.partial holds until it is renamed to FOLDER


def partial_folder(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}.partial")


def check_places(source: Path, destination: Path) -> None:
    """Refuses places that cannot be, before anything is read.

    Raises:
        ValueError: the destination exists, lies in the source, or has no folder to lie in.
    """
    if destination.exists() or destination.is_symlink():
        raise ValueError(f"{destination} exists; nothing is overwritten. Name a new folder, or remove this one.")
    if not destination.parent.is_dir():
        raise ValueError(f"{destination.parent} is no folder; the checkpoint is written into it. Make it first.")
    if Path(os.path.realpath(destination)).is_relative_to(os.path.realpath(source)):
        raise ValueError(f"{destination} lies in {source}, which is only read. Name a folder outside it.")


def write_checkpoint(
    destination: Path,
    plan: Plan,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Written:
    """Writes the planned checkpoint, or what an interrupted run of the same plan left to be written.

    Args:
        destination: the folder to make.
        advance: called with the number of bytes that were written, or found written.

    Raises:
        ValueError: the unfinished folder belongs to another plan or to a running command, or a file cannot be read or
            written.
        KeyboardInterrupt: with a message that says what is finished and how to go on.
    """
    partial = partial_folder(destination)
    files = _files(plan.parts)
    try:
        with _locked(partial):
            _begin(partial, plan, files)
            reports, num_reused = _write_files(partial, plan, files, advance)
            (partial / _CHECKPOINT_NAME).rename(destination)
    except KeyboardInterrupt:
        finished = sum((partial / f"{name}.json").exists() for name in files)
        raise KeyboardInterrupt(
            f"interrupted; {finished} of {len(files)} files are finished in {partial}. Run the same command again "
            "to go on, or remove that folder."
        ) from None
    except OSError as error:
        raise ValueError(
            f"{error.filename or destination} cannot be read or written ({error.strerror}). Mend that and run the "
            f"same command again: finished files are kept in {partial}."
        ) from None
    shutil.rmtree(partial)
    return Written(reports, len(files), num_reused)


def _write_files(
    partial: Path, plan: Plan, files: Mapping[str, list[Part]], advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], int]:
    """Reports of all parts, and the number of files that an earlier run had finished."""
    folder = partial / _CHECKPOINT_NAME
    reports: list[dict[str, Any]] = []
    num_reused = 0
    for name, parts in files.items():
        record = _verified(folder / name, partial / f"{name}.json")
        if record is None:
            record = _write_file(folder / name, partial / f"{name}.json", parts, advance)
        else:
            num_reused += 1
            advance(sum(part.num_bytes for part in parts))
        reports += record["reports"]
    _write_others(folder, plan, files)
    _sync(folder)
    return reports, num_reused


def _files(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """File name to its parts: each file at most MAX_FILE_BYTES long, unless one part is longer."""
    groups: list[list[Part]] = []
    room = 0
    for part in parts:
        if not groups or part.num_bytes > room:
            groups.append([])
            room = MAX_FILE_BYTES
        groups[-1].append(part)
        room -= part.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, start=1)}


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Keeps two commands from writing into the same folder."""
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise ValueError(f"{partial} is no folder; unfinished work is kept there. Remove it.")
    partial.mkdir(exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"{partial} is being written by another command. Let it finish, or end it.") from None
    finally:
        os.close(lock)


def _begin(partial: Path, plan: Plan, files: Mapping[str, list[Part]]) -> None:
    text = json.dumps(
        {
            "settings": plan.settings,
            "json_files": plan.json_files,
            "files": {name: [[part.name, *part.tensors] for part in parts] for name, parts in files.items()},
        },
        indent=1,
        sort_keys=True,
    )
    path = partial / _PLAN_NAME
    if path.exists():
        if path.read_text() != text:
            raise ValueError(
                f"{partial} was begun with other options or from another checkpoint. Repeat that command to go on "
                "with it, or remove the folder."
            )
    elif any(not file.name.endswith(".unfinished") for file in partial.iterdir()):
        raise ValueError(f"{partial} holds files that no unfinished command left there. Remove it.")
    else:
        _write_text(path, text)
    (partial / _CHECKPOINT_NAME).mkdir(exist_ok=True)
    present = sum(file.stat().st_size for file in (partial / _CHECKPOINT_NAME).glob("*.safetensors"))
    needed, free = plan.num_bytes - present, shutil.disk_usage(partial).free
    if needed > free:
        raise ValueError(
            f"{needed / 2**30:.2f} GiB are to be written to {partial.parent}, and {free / 2**30:.2f} GiB are free. "
            "Free some space, or name a folder on another disk."
        )


def _verified(file: Path, record_file: Path) -> dict[str, Any] | None:
    """The record of a file that an earlier run finished, if its bytes are still the same."""
    if not (file.is_file() and record_file.is_file()):
        return None
    record = json.loads(record_file.read_text())
    return record if record["sha256"] == _sha256(file) else None


def _write_file(file: Path, record_file: Path, parts: Sequence[Part], advance: Callable[[int], None]) -> dict[str, Any]:
    # Wide numbers first: readers map a tensor in place, and its first byte must suit its dtype.
    tensors = sorted(
        (tensor for part in parts for tensor in part.tensors), key=lambda tensor: -DTYPE_BITS[tensor.dtype]
    )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    place = 0
    for tensor in tensors:
        begins[tensor.name] = place
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (place, place + tensor.num_bytes)
        }  # fmt: skip
        place += tensor.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = file.with_name(f"{file.name}.unfinished")
    reports = []
    with unfinished.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        start = stream.tell()
        stream.truncate(start + place)
        for part in parts:
            made, report = part.make()
            reports.append(report)
            for tensor in part.tensors:
                data = _bytes(made[tensor.name], tensor)
                stream.seek(start + begins[tensor.name])
                stream.write(data)
                advance(len(data))
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(file)
    record = {"sha256": _sha256(file), "reports": reports}
    _write_text(record_file, json.dumps(record))
    return record


def _bytes(tensor: "torch.Tensor", planned: PlannedTensor) -> memoryview:
    import torch

    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    assert tuple(tensor.shape) == planned.shape and data.nbytes == planned.num_bytes, planned
    return data


def _write_others(folder: Path, plan: Plan, files: Mapping[str, list[Part]]) -> None:
    """The index, the copies and the JSON files; config.json last, because without it a folder is no checkpoint."""
    if len(files) > 1:
        weight_map = {
            tensor.name: name for name, parts in files.items() for part in parts for tensor in part.tensors
        }  # fmt: skip
        index = {"metadata": {"total_size": plan.num_bytes}, "weight_map": weight_map}
        _write_text(folder / INDEX_NAME, json.dumps(index, indent=2))
    for path in plan.copies:
        shutil.copyfile(path, folder / path.name)
    for name, content in sorted(plan.json_files.items(), key=lambda item: item[0] == "config.json"):
        _write_text(folder / name, json.dumps(content, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(path)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
