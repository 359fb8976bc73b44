# SPDX-License-Identifier: Apache-2.0
"""The header of one safetensors file: names, dtypes, shapes and places of its tensors.

Format (github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header
length, a JSON object of that length, then the tensors' bytes without gaps. Nothing
but the header is read, and nothing in it is believed before it is checked.
"""

import json
import operator
from pathlib import Path
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class HeaderError(Exception):
    """A file is no whole safetensors file; the message says what is wrong with it, and the rule."""


class TensorEntry(NamedTuple):
    """One stored tensor.

    Attributes:
        dtype: the format's own word, such as "BF16", "U8" or "F8_E4M3".
        shape: as stored; a packed weight's last dimension counts bytes.
        file: the file that holds it.
        begin: its first byte in that file.
        end: the byte after its last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        HeaderError: the file is truncated, is no safetensors file, or contradicts itself.
        OSError: the file cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise HeaderError(f"{size} bytes long, but a safetensors file begins with 8 bytes of header length")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise HeaderError(f"announces a header of {length:,} bytes, but at most {MAX_HEADER_BYTES:,} are allowed")
        if 8 + length > size:
            raise HeaderError(f"{size:,} bytes long, but its header alone takes {8 + length:,}: it is truncated")
        text = stream.read(length)
    entries = [_entry(name, value, file, 8 + length) for name, value in _parse(text).items() if name != "__metadata__"]
    entries.sort(key=operator.attrgetter("begin", "end"))
    _check_places(entries, 8 + length, size)
    return entries


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise HeaderError("begins with no JSON header: it is no safetensors file, or it is damaged") from None
    if not isinstance(header, dict):
        raise HeaderError("has a header that is no JSON object")
    return header


def _entry(name: str, value: Any, file: Path, start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        bits = DTYPE_BITS[dtype]
    except (KeyError, TypeError, ValueError):
        raise HeaderError(
            f"describes tensor {name!r} in a way that the format does not know ({value!r:.120})"
        ) from None
    size = 1
    for number in (begin, end, *shape):
        if type(number) is not int or number < 0:
            raise HeaderError(f"gives tensor {name!r} shape {shape} and bytes {begin}..{end}, but both must be counts")
    for number in shape:
        size *= number
    needed = (size * bits + 7) // 8
    if end - begin != needed:
        raise HeaderError(
            f"gives tensor {name!r} ({dtype} {shape}) {end - begin:,} bytes, but its shape needs {needed:,}"
        )
    return TensorEntry(name, dtype, shape, file, start + begin, start + end)


def _check_places(entries: list[TensorEntry], start: int, size: int) -> None:
    place = start
    for entry in entries:
        if entry.begin != place:
            fault = "overlaps the tensor before it" if entry.begin < place else "leaves a gap before it"
            raise HeaderError(f"stores tensor {entry.name!r} where it {fault}, but tensors must follow each other")
        place = entry.end
    if place > size:
        raise HeaderError(f"{size:,} bytes long, but its tensors end at {place:,}: it is truncated")
    if place < size:
        raise HeaderError(f"{size:,} bytes long, but its tensors end at {place:,}: the rest belongs to no tensor")
