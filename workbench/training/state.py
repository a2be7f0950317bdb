"""Training state on disk: written whole or not at all, checked when read, the state before it kept."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from workbench.errors import TrainingError

CURRENT, PREVIOUS = "state", "state.previous"
DIGEST_BYTES = 32


def write_atomic(path: Path, data: bytes) -> None:
    """Write to a temporary name, flush to the device, rename. TrainingError when the file system refuses."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
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
    body = save({k: v.contiguous().cpu() for k, v in tensors.items()}, metadata={"meta": json.dumps(meta)})
    fresh = folder / (CURRENT + ".new")
    write_atomic(fresh, hashlib.sha256(body).digest() + body)
    if (folder / CURRENT).exists():
        os.replace(folder / CURRENT, folder / PREVIOUS)
    os.replace(fresh, folder / CURRENT)
    sync_directory(folder)


def load_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """The newest state that is whole, or None. A damaged one is passed over for the one before."""
    for name in (CURRENT + ".new", CURRENT, PREVIOUS):
        try:
            raw = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise TrainingError(f"{folder / name}: cannot be read ({error.strerror}); see its permissions") from error
        body = raw[DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != raw[:DIGEST_BYTES]:
            continue
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        return load(body), json.loads(header["__metadata__"]["meta"])
    return None
