"""A model checkpoint on disk: its config, what tensors it holds, and their values, a block of rows at a time.

Safetensors files are read with plain positioned reads rather than mapped: a mapping's pages count as this process's
memory, and a conversion is to stay within one layer. Nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.errors import CheckpointError
from workbench.models.pickled import SAMPLE_BYTES, PickledShard, sample_starts
from workbench.tensorfile import DTYPES, TensorFileError, read_header

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_REMEDY = "download it again"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the checkpoint: dtype ('float32'), shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


class SafetensorsShard:
    """One safetensors file, read lazily."""

    def __init__(self, path: Path) -> None:
        try:
            header = read_header(path)
            self._fd = os.open(path, os.O_RDONLY)
        except TensorFileError as error:
            raise CheckpointError(f"{path}: {error}; {_REMEDY}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        self.path, self.header_sha256, self._entries = path, header.sha256, header.entries

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor; a dtype that cannot be converted keeps the format's own code."""
        return {name: (DTYPES.get(entry.code, entry.code), entry.shape) for name, entry in self._entries.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the first axis, in memory of their own."""
        entry = self._entries[name]
        row = entry.nbytes // max(entry.shape[0], 1)
        out = torch.empty((stop - start, *entry.shape[1:]), dtype=getattr(torch, DTYPES[entry.code]))
        if out.numel():
            self._fill(name, out.view(torch.uint8).reshape(-1).numpy().data, entry.start + start * row)
        return out

    def sample(self, name: str) -> bytes:
        """Up to 8 blocks of 4096 bytes, evenly spaced over the tensor; all of it when it is not longer."""
        entry = self._entries[name]
        item = getattr(torch, DTYPES[entry.code]).itemsize
        size = min(SAMPLE_BYTES, entry.nbytes)
        starts = [item * value for value in sample_starts(entry.nbytes // item, item)]
        found = bytearray(size * len(starts))
        for i, start in enumerate(starts):
            self._fill(name, memoryview(found)[i * size : (i + 1) * size], entry.start + start)
        return bytes(found)

    def _fill(self, name: str, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read ({error.strerror})") from error
            if not got:
                raise CheckpointError(f"{self.path}: truncated while {name} was read; {_REMEDY}")
            done += got

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Checkpoint:
    """A checkpoint directory: config.json and safetensors or pickled weights, sharded or not.

    Everything that can be known without reading the weights is checked when it is made; CheckpointError, one line.
    `config`: config.json. `tensors`: what there is, by the checkpoint's own names. Use as a context manager.
    """

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self.path = Path(path)
        self.name = name or self.path.absolute().name
        if not self.path.is_dir():
            raise CheckpointError(f"{path}: no such directory; give a checkpoint directory or a hub id (org/name)")
        self.config = _config(self.path)
        self._shards: dict[str, SafetensorsShard | PickledShard] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            files, index = _weight_files(self.path)
            for file in files:
                self._add(file, index)
            _check_index(self.path, index, self.tensors)
        except BaseException:
            self.close()
            raise

    def _add(self, file: str, index: dict[str, str] | None) -> None:
        path = self.path / file
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though the index names it; {_REMEDY}")
        shard = SafetensorsShard(path) if file.endswith(".safetensors") else PickledShard(path)
        self._shards[file] = shard
        for name, (dtype, shape) in shard.tensors().items():
            if dtype not in ("float32", "float16", "bfloat16"):
                raise CheckpointError(f"{path}: tensor {name} is {dtype}; float32, float16 and bfloat16 can be read")
            if name in self.tensors:
                raise CheckpointError(f"{path}: tensor {name} is also in {self.tensors[name].file}; {_REMEDY}")
            self.tensors[name] = TensorInfo(dtype, shape, file)

    @property
    def dtype(self) -> str:
        """The one dtype of all tensors. CheckpointError when they differ."""
        counts = Counter(info.dtype for info in self.tensors.values())
        if len(counts) > 1:
            rare = counts.most_common()[-1][0]
            name = next(name for name, info in self.tensors.items() if info.dtype == rare)
            raise CheckpointError(
                f"{self.path}: tensors of several dtypes ({', '.join(sorted(counts))}; {name} is {rare}); "
                f"say which to store with --dtype"
            )
        return next(iter(counts))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor's first axis (all by default), in its own dtype, in memory of their own."""
        info = self.tensors[name]
        return self._shards[info.file].read(name, start, info.shape[0] if stop is None else stop)

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the checkpoint in a store: name, files (bytes, header digest), and `digest`.

        `digest` is a SHA-256 over every tensor's name, dtype, shape and sampled bytes, so that another checkpoint of
        the same geometry differs.
        """
        whole = hashlib.sha256()
        for name, info in sorted(self.tensors.items()):
            whole.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
            whole.update(self._shards[info.file].sample(name))
        files = {
            file: {"nbytes": os.stat(self.path / file).st_size, "header_sha256": shard.header_sha256}
            for file, shard in sorted(self._shards.items())
        }
        return {"name": self.name, "files": files, "digest": whole.hexdigest()}

    def modified(self) -> dict[str, int]:
        """Modification time (ns) of each weight file: tells an edit between an interrupted run and the next."""
        return {file: os.stat(self.path / file).st_mtime_ns for file in sorted(self._shards)}

    def tokenizer_files(self) -> list[Path]:
        """The files that are there of those that make a tokenizer and its generation settings, config.json included.

        transformers picks the tokenizer's class by config.json where tokenizer_config.json does not name one.
        """
        found = [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]
        return [*found, self.path / "config.json"] if found else []

    def close(self) -> None:
        """Close all files."""
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    config = _json(file, f"{path}: no config.json, so not a checkpoint; give the directory that holds config.json")
    if "quantization_config" in config:
        raise CheckpointError(f"{file}: the weights are quantized; use the float32, float16 or bfloat16 checkpoint")
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file}: no model_type; take config.json from the model's own page")
    return config


def _json(file: Path, missing: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(missing) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON; {_REMEDY}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object; {_REMEDY}")
    return value


def _weight_files(path: Path) -> tuple[list[str], dict[str, str] | None]:
    """The weight files, and for a sharded checkpoint the index's map from tensor to file."""
    for single in _SINGLE:
        if (path / single).is_file():
            return [single], None
        file = path / f"{single}.index.json"
        if file.is_file():
            index = _json(file, "").get("weight_map")
            if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
                raise CheckpointError(f"{file}: no weight_map from tensors to files; {_REMEDY}")
            for shard in index.values():
                if not re.fullmatch(r"[\w.-]+\.(safetensors|bin)", shard):
                    raise CheckpointError(f"{file}: names {shard!r}, not a weight file beside it; {_REMEDY}")
            return sorted(set(index.values())), index
    raise CheckpointError(f"{path}: no model.safetensors or pytorch_model.bin, nor an index of shards; {_REMEDY}")


def _check_index(path: Path, index: dict[str, str] | None, tensors: dict[str, TensorInfo]) -> None:
    for name, file in (index or {}).items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(f"{path / file}: tensor {name} is not in it, though the index says so; {_REMEDY}")
    if not tensors:
        raise CheckpointError(f"{path}: the weight files hold no tensors; {_REMEDY}")
