# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder: configuration and tensor headers first, values one tensor at a time.

Nothing outside the folder is read. A file may be a link (the Hugging Face cache
keeps snapshots as links), but only into the folder or into that cache's blobs.
"""

import gc
import json
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lilicorr.checkpoint.findings import Finding, Level, some
from vllm_lilicorr.checkpoint.headers import HeaderError, TensorEntry, read_header

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "config.json"
QUANTIZATION_NAME = "hf_quant_config.json"
INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 100_000_000
_DOWNLOAD_AGAIN = "Download or export it again."


class CheckpointError(ValueError):
    """A folder is no whole checkpoint; the message lists every reason."""


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of a checkpoint say.

    Attributes:
        folder: where it lies.
        config: config.json.
        hf_quant_config: hf_quant_config.json, or None where there is none.
        tensors: every tensor, by its name as stored.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    hf_quant_config: dict[str, Any] | None = None
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads the headers.

        Raises:
            CheckpointError: anything about the files is wrong.
        """
        checkpoint, findings = scan(folder)
        errors = [finding.sentence for finding in findings if finding.level is Level.ERROR or not checkpoint.tensors]
        if errors:
            raise CheckpointError("\n".join(errors))
        return checkpoint

    @classmethod
    def configuration(cls, folder: Path) -> "Checkpoint":
        """config.json and hf_quant_config.json alone, empty where they cannot be read; no tensors."""
        return cls(folder, _read_object(folder, CONFIG_NAME, []) or {}, _read_object(folder, QUANTIZATION_NAME, []))

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors.values())

    def read_scalar(self, name: str) -> float:
        """The first number of a tensor stored as F32, F16 or BF16, without torch."""
        entry = self.tensors[name]
        width, code = {"F32": (4, "<f"), "F16": (2, "<e"), "BF16": (2, "<f")}[entry.dtype]
        data = self._bytes(entry, width)
        return struct.unpack(code, b"\0\0" + data if entry.dtype == "BF16" else data)[0]

    def read(self, name: str) -> "torch.Tensor":
        """One tensor, in its stored dtype and shape; it owns its memory."""
        import torch

        entry = self.tensors[name]
        dtype = torch_dtypes()[entry.dtype]
        if not entry.num_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(self._bytes(entry, entry.num_bytes), dtype=dtype).reshape(entry.shape)

    def _bytes(self, entry: TensorEntry, count: int) -> bytearray:
        data = bytearray(count)
        with entry.file.open("rb") as stream:
            stream.seek(entry.begin)
            if stream.readinto(data) != count:
                raise CheckpointError(f"{entry.file} became shorter while it was read. {_DOWNLOAD_AGAIN}")
        return data


def torch_dtypes() -> "dict[str, torch.dtype]":
    """The format's words for dtypes, as far as torch has them."""
    import torch

    return {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "I64": torch.int64,
        "U64": torch.uint64,
        "F64": torch.float64,
    }


def scan(folder: Path) -> tuple[Checkpoint, list[Finding]]:
    """Reads what can be read of a folder, and says what is wrong with the rest."""
    collecting = gc.isenabled()
    gc.disable()  # a large index makes a million objects and no garbage: collecting costs half of the time
    try:
        return _scan(folder)
    finally:
        if collecting:
            gc.enable()


def _scan(folder: Path) -> tuple[Checkpoint, list[Finding]]:
    findings: list[Finding] = []
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        findings.append(
            Finding("files", Level.ERROR, f"{folder} {what}", "a checkpoint is a folder", "Name its folder.")
        )
        return Checkpoint(folder), findings
    config = _read_object(folder, CONFIG_NAME, findings)
    if config is None and not findings:
        findings.append(
            Finding(
                "files",
                Level.ERROR,
                f"{folder} has no {CONFIG_NAME}",
                "it holds the drafter's dimensions",
                "Name the folder that holds it, or download the checkpoint again.",
            )
        )
    quantization = _read_object(folder, QUANTIZATION_NAME, findings)
    tensors = _read_tensors(folder, findings)
    return Checkpoint(folder, config or {}, quantization, tensors), findings


def is_inside(folder: Path, path: Path) -> bool:
    real, root = _real(path), _real(folder)
    if real.is_relative_to(root):
        return True
    snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
    return snapshots is not None and real.is_relative_to(snapshots.parent / "blobs")


def _real(path: Path) -> Path:
    """Where a path leads. A link to itself leads to itself; Path.resolve raises for one before Python 3.13."""
    return Path(os.path.realpath(path))


def _refuse(findings: list[Finding], value: str, rule: str, remedy: str = _DOWNLOAD_AGAIN) -> None:
    findings.append(Finding("files", Level.ERROR, value, rule, remedy))


def _usable(folder: Path, name: str, findings: list[Finding]) -> bool:
    path = folder / name
    if not is_inside(folder, path):
        _refuse(
            findings,
            f"{name} is a link to {_real(path)}",
            "nothing outside the checkpoint's folder is read",
            "Copy the file into the folder.",
        )
        return False
    if path.is_symlink() and not path.exists():
        _refuse(findings, f"{name} is a link to nothing", "its file is gone")
        return False
    if path.exists() and not path.is_file():
        _refuse(findings, f"{name} is no regular file", "only regular files are read")
        return False
    return True


def _read_object(folder: Path, name: str, findings: list[Finding]) -> dict[str, Any] | None:
    path = folder / name
    if not _usable(folder, name, findings) or not path.exists():
        return None
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            _refuse(findings, f"{name} is {size:,} bytes long", f"at most {MAX_JSON_BYTES:,} are read")
            return None
        value = json.loads(path.read_bytes())
    except OSError as error:
        _refuse(findings, f"{name} cannot be read", str(error.strerror), "Give read permission, or mend the disk.")
        return None
    except (ValueError, RecursionError) as error:
        _refuse(findings, f"{name} is no JSON", f"{error}" if isinstance(error, ValueError) else "nested too deeply")
        return None
    if not isinstance(value, dict):
        _refuse(findings, f"{name} holds a JSON {type(value).__name__}", "it must hold an object")
        return None
    return value


def _read_tensors(folder: Path, findings: list[Finding]) -> dict[str, TensorEntry]:
    index = _read_object(folder, INDEX_NAME, findings)
    if (folder / INDEX_NAME).exists() and index is None:
        return {}
    weight_map = _weight_map(index, findings) if index is not None else None
    if weight_map is None and index is not None:
        return {}
    files = sorted(set(weight_map.values())) if weight_map is not None else _unlisted_files(folder, findings)
    tensors: dict[str, TensorEntry] = {}
    for name in files:
        if not _usable(folder, name, findings):
            continue
        if not (folder / name).exists():
            _refuse(findings, f"{name} is missing", f"{INDEX_NAME} lists it")
            continue
        try:
            entries = read_header(folder / name)
        except HeaderError as error:
            _refuse(findings, f"{name} {error}", "the whole file is needed")
            continue
        except OSError as error:
            _refuse(findings, f"{name} cannot be read", str(error.strerror), "Give read permission, or mend the disk.")
            continue
        twice = [entry.name for entry in entries if entry.name in tensors]
        if twice:
            _refuse(
                findings,
                f"{name} holds {some(twice)} that {tensors[twice[0]].file.name} holds too",
                "a tensor is stored once",
                "Remove the file that does not belong to this checkpoint.",
            )
        tensors.update((entry.name, entry) for entry in entries)
    if weight_map is not None:
        _compare_index(weight_map, tensors, findings)
    return tensors


def _weight_map(index: dict[str, Any], findings: list[Finding]) -> dict[str, str] | None:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(findings, f"{INDEX_NAME} has no weight_map", "it must say which file holds which tensor")
        return None
    good: set[Any] = set()
    for name, file in weight_map.items():
        if isinstance(file, str) and file in good:
            continue
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\\" in file:
            _refuse(
                findings,
                f"{INDEX_NAME} places {name!r} in {file!r}",
                "only .safetensors files of the same folder, named without a path, are read",
            )
            return None
        good.add(file)
    return weight_map


def _unlisted_files(folder: Path, findings: list[Finding]) -> list[str]:
    # Hidden files are no weights, for vLLM neither: copies from a Mac bring "._model.safetensors" along.
    files = sorted(path.name for path in folder.glob("[!.]*.safetensors"))
    if files:
        return files
    others = sorted(path.name for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
    if not others:
        _refuse(findings, f"{folder} holds no weights", "they are .safetensors files beside config.json")
        return []
    findings.append(
        Finding(
            "files",
            Level.WARNING,
            f"{folder} holds only {some(others)}",
            "weights are checked, converted and quantized from .safetensors files only",
            "Save it in the safetensors format.",
        )
    )
    return []


def _compare_index(weight_map: dict[str, str], tensors: dict[str, TensorEntry], findings: list[Finding]) -> None:
    readable = {path.name: path for path in {entry.file for entry in tensors.values()}}
    absent = [
        name
        for name, file in weight_map.items()
        if file in readable and (name not in tensors or tensors[name].file is not readable[file])
    ]
    if absent:
        _refuse(
            findings,
            f"{INDEX_NAME} places {some(absent)} in files that do not hold them",
            f"for example {absent[0]!r} in {weight_map[absent[0]]}",
        )
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        findings.append(
            Finding(
                "files",
                Level.WARNING,
                f"{INDEX_NAME} does not list {some(unlisted)}",
                "vLLM reads a tensor that the index leaves out, some programs do not",
                _DOWNLOAD_AGAIN,
            )
        )
