"""Training state on disk: written whole or not at all, checked when read, the state before it kept."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from workbench.errors import TrainingError

CURRENT, PREVIOUS = "state", "state.previous"
DIGEST_BYTES = 32
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_atomic(path: Path, data: bytes) -> None:
    """Write to a temporary name, flush to the device, rename. TrainingError when the file system refuses."""
    _write_atomic(path, [data])


def _write_atomic(path: Path, parts: Iterable[Any], digest: bool = False) -> None:
    """With `digest`, SHA-256 of the parts comes first in the file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as stream:
            found = hashlib.sha256()
            if digest:
                stream.write(bytes(DIGEST_BYTES))
            for part in parts:
                if digest:
                    found.update(part)
                stream.write(part)
            if digest:
                stream.seek(0)
                stream.write(found.digest())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainingError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another --out"
        ) from error


def sync_directory(path: Path) -> None:
    """Make renames in this directory last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_state(folder: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Make this the current state; the one that was current becomes the previous one."""
    fresh = folder / (CURRENT + ".new")
    _write_atomic(fresh, _body({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, meta), digest=True)
    if (folder / CURRENT).exists():
        os.replace(folder / CURRENT, folder / PREVIOUS)
    os.replace(fresh, folder / CURRENT)
    sync_directory(folder)


def _body(tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> Iterable[Any]:
    """A safetensors file in parts, so that nothing is held twice and other threads run while parts are written."""
    header: dict[str, Any] = {"__metadata__": {"meta": json.dumps(meta)}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    for tensor in tensors.values():
        if tensor.numel():
            yield tensor.reshape(-1).view(torch.uint8).numpy().data


def load_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """The newest state that is whole, or None. A damaged one is passed over for the one before."""
    for name in (CURRENT + ".new", CURRENT, PREVIOUS):
        try:
            raw = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise TrainingError(f"{folder / name}: cannot be read ({error.strerror}); see its permissions") from error
        body = memoryview(raw)[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != raw[:DIGEST_BYTES]:
            continue
        header = json.loads(bytes(body[8 : 8 + int.from_bytes(body[:8], "little")]))
        return load(bytes(body)), json.loads(header["__metadata__"]["meta"])
    return None


class StateWriter:
    """Writes states while training goes on: `save` copies, a thread writes, one at a time.

    On CUDA the copy to the host is queued behind the work that is under way, and only the thread waits for it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._host: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Copy the tensors as they are now and begin to write them; waits for the state before to be written first.
        TrainingError when that one could not be."""
        self.join()
        copied = None
        for name, tensor in tensors.items():
            kept = self._host.get(name)
            if kept is None or kept.shape != tensor.shape:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._host[name] = kept
            kept.copy_(tensor.detach(), non_blocking=True)
            if tensor.is_cuda and copied is None:
                copied = torch.cuda.Event()
        if copied is not None:
            copied.record()
        body = {name: self._host[name] for name in tensors}
        self._thread = threading.Thread(target=self._write, args=(body, json.loads(json.dumps(meta)), copied))
        self._thread.start()

    def _write(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any], copied: Any) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            save_state(self.folder, tensors, meta)
        except BaseException as error:  # raised where the next save or the end waits
            self._error = error

    def join(self) -> None:
        """Wait until the last state is on disk. TrainingError when it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
