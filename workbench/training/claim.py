"""A folder for the state of one training run: one request, one process at a time."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.errors import TrainingError
from workbench.training.state import CURRENT, PREVIOUS, write_atomic

LOCK, REQUEST = "lock", "request.json"


@contextmanager
def claimed(partial: Path, request: dict[str, Any], resume: bool) -> Iterator[None]:
    """`partial`, made if it is not there, for this request and this process alone while the context lasts.

    What lies there is deleted with `resume` false, or when it holds no state; so is the folder, when the context ends
    without one. TrainingError when the folder cannot be
    written, another process trains there, or its state belongs to another request.
    """
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = open(partial / LOCK, "w")  # noqa: SIM115 (held until the run ends)
    except OSError as error:
        raise TrainingError(f"{partial}: cannot be written ({error.strerror}); choose another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(f"{partial}: another process is training there; choose another --out") from error
        _match(partial, request, resume)
        try:
            yield
        finally:
            if not _has_state(partial):
                shutil.rmtree(partial, ignore_errors=True)


def _has_state(partial: Path) -> bool:
    return any((partial / name).exists() for name in (CURRENT, PREVIOUS))


def _match(partial: Path, request: dict[str, Any], resume: bool) -> None:
    path = partial / REQUEST
    if not resume or not _has_state(partial):  # nothing is lost
        for entry in partial.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != LOCK:
                entry.unlink()
    if path.exists():
        try:
            before = json.loads(path.read_text())
        except ValueError:
            before = None  # damaged: nothing can be said to belong to it
        if before != request:
            raise TrainingError(
                f"{partial}: was started with another request; "
                "choose another --out, or --fresh (resume=False) to discard it"
            )
        return
    write_atomic(path, (json.dumps(request, indent=1) + "\n").encode())
