"""Batches of byte ranges of a file, read straight from flash into a caller's buffer.

`FlashReader` keeps `depth` reads in flight (the paper reads with 32 threads, section 4); `ReferenceReader`
does the same one read at a time in plain Python. Both make the same reads, so their counts are equal.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench import _native
from workbench.ablation import IoEngine
from workbench.errors import ReaderError

ALIGNMENT = 4096
"""Offset, length and address of a direct read are multiples of this."""


@dataclass(frozen=True)
class ReadStats:
    """What a batch cost: bytes and reads asked of the kernel (alignment and gaps included), and seconds."""

    read_bytes: int = 0
    reads: int = 0
    seconds: float = 0.0

    def __add__(self, other: ReadStats) -> ReadStats:
        return ReadStats(self.read_bytes + other.read_bytes, self.reads + other.reads, self.seconds + other.seconds)


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """uint8 [nbytes] of zeros that begins on a page, resident only where it has been touched."""
    return _native.aligned_buffer(nbytes)


class _Piece(NamedTuple):
    offset: int
    length: int
    destination: int


class _Read(NamedTuple):
    offset: int
    length: int
    pieces: list[_Piece]


def plan_reads(
    offsets: ArrayLike, lengths: ArrayLike, gap_bytes: int, chunk_bytes: int, align: int = ALIGNMENT
) -> list[tuple[int, int]]:
    """The (offset, length) of each read that serves these requests, in the order they are made.

    A read covers whole units of `align` bytes and at most `chunk_bytes`. With gap_bytes = -1 each request
    is read by itself, in the order given; otherwise requests are sorted and merged while at most gap_bytes lie
    between them.
    """
    starts, sizes = _int64s("offsets", offsets), _int64s("lengths", lengths)
    plan = _plan(starts.tolist(), sizes.tolist(), [0] * len(starts), gap_bytes, chunk_bytes, align)
    return [(read.offset, read.length) for read in plan]


def _plan(
    offsets: Sequence[int],
    lengths: Sequence[int],
    destinations: Sequence[int],
    gap_bytes: int,
    chunk_bytes: int,
    align: int = ALIGNMENT,
) -> list[_Read]:
    pieces: list[_Piece] = []
    for offset, length, destination in zip(offsets, lengths, destinations, strict=True):
        at, limit = offset, offset // align * align + chunk_bytes
        while at < offset + length:
            stop = min(offset + length, limit)
            pieces.append(_Piece(at, stop - at, destination + at - offset))
            at, limit = stop, limit + chunk_bytes
    if gap_bytes >= 0:
        pieces.sort()
    reads: list[_Read] = []
    for piece in pieces:
        start = piece.offset // align * align
        end = -(-(piece.offset + piece.length) // align) * align
        if gap_bytes >= 0 and reads:
            last = reads[-1]
            merged_end = max(last.offset + last.length, end)
            near = start - (last.offset + last.length) <= gap_bytes
            if near and merged_end - last.offset <= chunk_bytes:
                reads[-1] = _Read(last.offset, merged_end - last.offset, [*last.pieces, piece])
                continue
        reads.append(_Read(start, end - start, [piece]))
    return reads


def _int64s(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: needs a 1-D integer array, got {array.dtype} {list(array.shape)}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _error(failure: _native.ReadFailure) -> ReaderError:
    kind, path, offset, wanted, got, errno = failure.args
    reason = os.strerror(errno)
    messages = {
        "open": f"{path}: cannot be opened: {reason}; check the path and its permissions",
        "direct": f"{path}: the file system refuses direct I/O ({reason}); pass --io buffered",
        "read": f"{path}: read of {wanted} bytes at offset {offset} failed: {reason}; check the drive",
        "short": (
            f"{path}: short read at offset {offset}, wanted {wanted} bytes, got {got}; "
            "the file is truncated, run `workbench verify` on its store"
        ),
        "io_uring": f"io_uring is not available here: {reason}; pass --io threads",
        "closed": "the reader or this file handle is closed; open the file again",
        "fork": "the reader belongs to the parent process; open one in this process",
    }
    return ReaderError(messages[kind])


class FlashReader:
    """Reads with many requests in flight, outside the GIL.

    engine: 'threads' (a pool of `depth` preads) or 'io_uring' (`depth` entries from the calling thread), both with
    direct I/O, or 'buffered' (threads through the page cache). chunk_bytes: the longest single read; longer requests
    are cut. Calls from several threads take turns. ReaderError when the machine cannot honour the choice.
    """

    def __init__(self, engine: IoEngine, depth: int = 32, chunk_bytes: int = 1 << 20) -> None:
        if engine not in ("threads", "io_uring", "buffered"):
            raise ValueError(f"engine={engine!r} is not one of threads, io_uring, buffered")
        self.engine = engine
        try:
            self._native = _native.Reader("threads" if engine == "buffered" else engine, depth, chunk_bytes)
        except _native.ReadFailure as failure:
            raise _error(failure) from None

    def open(self, path: str | os.PathLike[str]) -> int:
        """A handle for `read`. ReaderError when the file cannot be opened, or refuses direct I/O."""
        try:
            return self._native.open(os.fspath(path), self.engine != "buffered")
        except _native.ReadFailure as failure:
            raise _error(failure) from None

    def read(
        self,
        handle: int,
        offsets: ArrayLike,
        lengths: ArrayLike,
        buffer: NDArray[np.uint8],
        destinations: ArrayLike,
        gap_bytes: int = -1,
    ) -> ReadStats:
        """Bring bytes [offsets[i], offsets[i] + lengths[i]) to buffer[destinations[i]:].

        offsets, lengths, destinations: integers [n]; buffer: uint8 [size] from `aligned_buffer`. Requests whose
        offset, length and destination are multiples of 4096 land in place, others are copied once. gap_bytes: see
        `plan_reads`. ReaderError on a short or failed read, ValueError on a request that does not fit the buffer.
        """
        try:
            return ReadStats(
                *self._native.read(
                    handle,
                    _int64s("offsets", offsets),
                    _int64s("lengths", lengths),
                    buffer,
                    _int64s("destinations", destinations),
                    gap_bytes,
                )
            )
        except _native.ReadFailure as failure:
            raise _error(failure) from None
        except TypeError:
            raise ValueError("buffer: needs a writable, contiguous uint8 array of one dimension") from None

    def close_file(self, handle: int) -> None:
        """Close one file. ValueError when the handle is not open."""
        self._native.close_file(handle)

    def close(self) -> None:
        """Close all files and end the threads."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReferenceReader:
    """`FlashReader` in plain Python, one read after the other, for tests: same bytes, same counts, same errors."""

    def __init__(self, engine: IoEngine, depth: int = 32, chunk_bytes: int = 1 << 20) -> None:
        self.engine = engine
        self.chunk_bytes = chunk_bytes
        self._files: dict[int, Path] = {}
        self._pages = mmap.mmap(-1, chunk_bytes)
        self._scratch = np.frombuffer(self._pages, np.uint8)

    def open(self, path: str | os.PathLike[str]) -> int:
        """A handle for `read`."""
        direct = os.O_DIRECT if self.engine != "buffered" and hasattr(os, "O_DIRECT") else 0
        try:
            fd = os.open(path, os.O_RDONLY | direct)
        except OSError as error:
            kind = "direct" if direct and error.errno == 22 else "open"
            raise _error(_native.ReadFailure(kind, str(path), 0, 0, 0, error.errno)) from None
        self._files[fd] = Path(path)
        return fd

    def read(
        self,
        handle: int,
        offsets: ArrayLike,
        lengths: ArrayLike,
        buffer: NDArray[np.uint8],
        destinations: ArrayLike,
        gap_bytes: int = -1,
    ) -> ReadStats:
        """As `FlashReader.read`."""
        start = time.perf_counter()
        if handle not in self._files:
            raise _error(_native.ReadFailure("closed", "", 0, 0, 0, 0))
        starts, sizes, places = (
            _int64s(name, values).tolist()
            for name, values in (("offsets", offsets), ("lengths", lengths), ("destinations", destinations))
        )
        if any(o < 0 or n < 0 or d < 0 or d + n > len(buffer) for o, n, d in zip(starts, sizes, places, strict=True)):
            raise ValueError("a request is negative or lies outside the buffer")
        plan = _plan(starts, sizes, places, gap_bytes, self.chunk_bytes)
        for read in plan:
            self._serve(handle, read, buffer)
        return ReadStats(sum(read.length for read in plan), len(plan), time.perf_counter() - start)

    def _serve(self, handle: int, read: _Read, buffer: NDArray[np.uint8]) -> None:
        path = str(self._files[handle])
        needed = max(piece.offset + piece.length for piece in read.pieces) - read.offset
        try:
            got = os.preadv(handle, [memoryview(self._pages)[: read.length]], read.offset)
        except OSError as error:
            kind = "direct" if self.engine != "buffered" and error.errno == 22 else "read"
            raise _error(_native.ReadFailure(kind, path, read.offset, read.length, 0, error.errno)) from None
        if got < needed:
            raise _error(_native.ReadFailure("short", path, read.offset, needed, got, 0))
        for offset, length, destination in read.pieces:
            at = offset - read.offset
            buffer[destination : destination + length] = self._scratch[at : at + length]

    def close_file(self, handle: int) -> None:
        """Close one file."""
        if handle not in self._files:
            raise ValueError("no open file has this handle")
        del self._files[handle]
        os.close(handle)

    def close(self) -> None:
        """Close all files."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
