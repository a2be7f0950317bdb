"""The progress journal of a conversion, and the writes whose order makes a kill at any point harmless.

`STORE.partial/convert.json` says what is being converted and which parts are whole on flash, each with its digests.
A part is entered only after its bytes were synced; the journal itself is replaced by a rename.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.errors import StoreError
from workbench.flash.manifest import MANIFEST, WEIGHT_FILES
from workbench.spec import format_bytes

JOURNAL = "convert.json"
_OWN = {JOURNAL, JOURNAL + ".new", MANIFEST, MANIFEST + ".new", "tokenizer", *WEIGHT_FILES}


class Journal:
    """What a conversion has finished: `done[part]` holds the part's digests."""

    def __init__(self, partial: Path, request: dict[str, Any]) -> None:
        self._file, self._request = partial / JOURNAL, request
        self.done: dict[str, dict[str, Any]] = {}

    def resume(self) -> None:
        """Read what an interrupted run left, or start a new journal.

        Raises StoreError when the directory holds anything else, or an unfinished conversion of another checkpoint
        or dtype.
        """
        partial = self._file.parent
        remedy = f"delete {partial} to start anew, or choose another name"
        foreign = sorted(entry.name for entry in partial.iterdir() if entry.name not in _OWN)
        if foreign:
            raise StoreError(f"{partial}: holds {foreign[0]}, which is no part of a conversion; choose another name")
        try:
            value = json.loads(self._file.read_bytes())
            request, done = value["request"], value["done"]
        except FileNotFoundError:
            if (partial / WEIGHT_FILES[0]).exists():
                raise StoreError(f"{partial}: {JOURNAL} is missing, so it cannot be resumed; {remedy}") from None
            self._write()
            return
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self._file}: damaged, so the conversion cannot be resumed; {remedy}") from error
        if request != self._request:
            raise StoreError(f"{partial}: unfinished conversion of {_differs(request, self._request)}; {remedy}")
        if not isinstance(done, dict) or not all(isinstance(entry, dict) for entry in done.values()):
            raise StoreError(f"{self._file}: damaged, so the conversion cannot be resumed; {remedy}")
        self.done = done

    def enter(self, part: str, digests: dict[str, Any]) -> None:
        """Record a part whose bytes are synced."""
        self.done[part] = digests
        self._write()

    def forget(self, part: str) -> None:
        """A part turned out damaged: it will be written again."""
        del self.done[part]

    def _write(self) -> None:
        write_synced(self._file, json.dumps({"request": self._request, "done": self.done}).encode())


def _differs(found: Any, wanted: dict[str, Any]) -> str:
    if not isinstance(found, dict) or not isinstance(found.get("source"), dict):
        return "another request"
    one, two = found["source"], wanted["source"]
    if one != two or found.get("modified") != wanted["modified"]:
        changed = "a checkpoint since changed" if one.get("name") == two["name"] else "another checkpoint"
        return f"{changed} ({one.get('name')})"
    if found.get("dtype") != wanted["dtype"]:
        return f"the same checkpoint as {found.get('dtype')}, not {wanted['dtype']}"
    return "the same checkpoint by another workbench or config"


def write_synced(file: Path, content: bytes) -> None:
    """Write a file whole or not at all: to a temporary name, synced, then renamed, the directory synced too."""
    temporary = file.with_name(file.name + ".new")
    with open(temporary, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory last."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold a directory that is written to; where another process holds it, a StoreError says "another `what` here"."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"{folder}: another {what} here; wait for it or stop it") from error
        yield
    finally:
        os.close(fd)


@contextmanager
def naming_write_errors(target: Path) -> Iterator[None]:
    """Turn an OSError of writing into a StoreError that says what is left and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "what was written stays: free space and run the same command again to resume"
            raise StoreError(f"{target}: the file system is full ({_free(target)} free); {remedy}") from error
        where = error.filename or target
        reason = error.strerror or str(error)
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StoreError(f"{where}: cannot be written ({reason}); choose a place that can be written") from error
        raise StoreError(f"{where}: cannot be written ({reason}); the same command resumes") from error


def _free(target: Path) -> str:
    try:
        usage = os.statvfs(target.parent)
    except OSError:
        return "unknown"
    return format_bytes(usage.f_bavail * usage.f_frsize)
