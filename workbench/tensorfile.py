"""The header of a safetensors file, read without its tensors and checked to the byte.

Both sides of a conversion need it: checkpoints arrive in this format and a store's resident part is written in it.
The file is: the header's length as a little-endian uint64, the header (JSON), then the tensors without holes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
DTYPES = {code: name for name, code in CODES.items()}
_CODE_BYTES = {
    code: nbytes
    for nbytes, codes in ((8, "F64 I64 U64 C64"), (4, "F32 I32 U32"), (2, "F16 BF16 I16 U16"))
    for code in codes.split()
} | dict.fromkeys(["I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"], 1)


class TensorFileError(ValueError):
    """The file is not a whole, valid safetensors file. `str(error)` says why, without the file's name."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: the format's own dtype code ('F32'), its shape, its first byte in the file and its bytes."""

    code: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class TensorHeader:
    """A file's tensors in the order of their bytes, where the data starts, and the header's SHA-256 (hex)."""

    entries: dict[str, TensorEntry]
    data_start: int
    file_bytes: int
    sha256: str


def read_header(path: Path) -> TensorHeader:
    """Read and check the header of `path`. TensorFileError where it is damaged; OSError where it cannot be read."""
    with open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise TensorFileError(f"truncated: {file_bytes} bytes, too few for a safetensors header")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise TensorFileError(f"header error: claims {length} bytes, the format allows {MAX_HEADER_BYTES}")
        if 8 + length > file_bytes:
            raise TensorFileError(f"truncated: the header claims {length} bytes, the file has {file_bytes}")
        raw = file.read(length)
    entries = _entries(_parse(raw), 8 + length)
    end = max((entry.start + entry.nbytes for entry in entries.values()), default=8 + length)
    if end > file_bytes:
        raise TensorFileError(f"truncated: the header promises {end} bytes, the file has {file_bytes}")
    if end < file_bytes:
        raise TensorFileError(f"header error: {file_bytes - end} bytes follow the last tensor")
    return TensorHeader(entries, 8 + length, file_bytes, hashlib.sha256(prefix + raw).hexdigest())


def _parse(raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise TensorFileError("header error: a name appears twice")
        return found

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TensorFileError("header error: not JSON") from error
    if not isinstance(header, dict):
        raise TensorFileError("header error: not a JSON object")
    return header


def _entries(header: dict[str, Any], data_start: int) -> dict[str, TensorEntry]:
    found: list[tuple[int, int, str, TensorEntry]] = []
    for name, item in header.items():
        if name == "__metadata__":
            continue
        code, shape, offsets = _fields(name, item)
        nbytes = math.prod(shape) * _CODE_BYTES[code]
        if offsets[1] - offsets[0] != nbytes:
            raise TensorFileError(
                f"header error: tensor {name} of {nbytes} bytes has a range of {offsets[1] - offsets[0]}"
            )
        found.append((offsets[0], offsets[1], name, TensorEntry(code, shape, data_start + offsets[0], nbytes)))
    found.sort(key=lambda item: item[:2])
    position = 0
    for start, end, name, _ in found:
        if start != position:
            raise TensorFileError(f"header error: tensor {name} starts at {start}, the one before ends at {position}")
        position = end
    return {name: entry for _, _, name, entry in found}


def _fields(name: str, item: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    if not isinstance(item, dict):
        raise TensorFileError(f"header error: tensor {name} is not described by an object")
    code, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(code, str) or code not in _CODE_BYTES:
        raise TensorFileError(f"header error: tensor {name} has the unknown dtype {code!r}")
    return code, tuple(_numbers(name, shape)), _pair(name, offsets)


def _numbers(name: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 2**63 for v in values):
        raise TensorFileError(f"header error: tensor {name} has a shape or range that is not whole numbers")
    return values


def _pair(name: str, values: Any) -> tuple[int, int]:
    numbers = _numbers(name, values)
    if len(numbers) != 2:
        raise TensorFileError(f"header error: tensor {name} has a range of {len(numbers)} numbers, not 2")
    return numbers[0], numbers[1]
