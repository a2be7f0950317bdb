"""Which neurons are active, written to a file while the model reads text, and read back a layer at a time.

A dense pass makes all layers' activations of a stretch of text, the analysis needs all stretches of a layer: the file
turns one into the other in memory of one layer. It holds a header line of JSON and then segments, one a layer and
stretch: SEGMENT (magic, stretch, layer, tokens, ids, CRC-32 of what follows), uint32 counts of each token, and the ids,
uint16 where d_ff allows it, else uint32. A file that was cut off anywhere is continued after its last whole stretch.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from workbench.errors import DataError

SEGMENT = struct.Struct("<4sIIIQI")
MAGIC = b"WBac"
FORMAT = 1


def id_dtype(d_ff: int) -> type[np.unsignedinteger[Any]]:
    """The narrowest type for a neuron's id."""
    return np.uint16 if d_ff <= 1 << 16 else np.uint32


class ActiveSpill:
    """Active ids by layer and token, on disk.

    path: a file that is kept, so that the same `request` goes on after its last whole stretch (anything else in it is
    overwritten); None for a nameless file in the temporary directory, which vanishes with this process however it
    ends. DataError when the disk cannot take it. Use it in `with`.
    """

    def __init__(self, path: Path | None, layers: int, d_ff: int, request: str = "") -> None:
        self.path, self.layers, self.dtype = path, layers, np.dtype(id_dtype(d_ff))
        self.where = str(path) if path else tempfile.gettempdir()
        self._head = json.dumps({"format": FORMAT, "layers": layers, "d_ff": d_ff, "request": request}).encode() + b"\n"
        self._index: list[list[tuple[int, int, int]]] = [[] for _ in range(layers)]  # offset, tokens, ids
        self.stretches = 0
        """Whole stretches: those that every layer has been added of."""
        try:
            if path is None:
                self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by close()
            else:
                path.touch()
                self._file = open(path, "r+b")  # noqa: SIM115
            self._recover()
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> ActiveSpill:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; one with a path stays."""
        self._file.close()

    def add(self, layer: int, counts: np.ndarray, ids: np.ndarray) -> None:
        """A layer's next stretch: active neurons of each token, int [tokens], and their ids, one token after the other.

        Layers come in order, 0 to layers - 1, for each stretch. ValueError otherwise.
        """
        wanted = sum(len(own) for own in self._index) % self.layers
        if layer != wanted:
            raise ValueError(f"layer {layer} of stretch {self.stretches} was added where layer {wanted} is next")
        if int(counts.sum()) != len(ids):
            raise ValueError(f"{len(ids)} ids for tokens with {int(counts.sum())} active neurons")
        body = counts.astype("<u4").tobytes() + ids.astype(self.dtype.newbyteorder("<")).tobytes()
        head = SEGMENT.pack(MAGIC, self.stretches, layer, len(counts), len(ids), zlib.crc32(body))
        try:
            at = self._file.seek(0, os.SEEK_END)
            self._file.write(head + body)
            if layer == self.layers - 1:
                self._file.flush()
        except OSError as error:
            raise self._failed(error) from error
        self._index[layer].append((at + SEGMENT.size, len(counts), len(ids)))
        self.stretches = len(self._index[-1])

    def layer(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, offsets int64 [tokens + 1]) of all whole stretches. DataError when the file is damaged."""
        places = self._index[layer][: self.stretches]
        ids = np.empty(sum(place[2] for place in places), self.dtype)
        counts = np.empty(sum(place[1] for place in places), np.int64)
        token = at = 0
        for offset, tokens, size in places:
            body = self._read(offset, 4 * tokens + size * self.dtype.itemsize)
            counts[token : token + tokens] = np.frombuffer(body, "<u4", tokens)
            ids[at : at + size] = np.frombuffer(body, self.dtype.newbyteorder("<"), size, 4 * tokens)
            token, at = token + tokens, at + size
        return ids, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def _read(self, offset: int, size: int) -> bytes:
        try:
            self._file.seek(offset - SEGMENT.size)
            head, body = self._file.read(SEGMENT.size), self._file.read(size)
        except OSError as error:
            raise self._failed(error) from error
        if len(body) != size or zlib.crc32(body) != SEGMENT.unpack(head)[-1]:
            raise DataError(f"{self.where}: active neurons are damaged at byte {offset}; delete it and run again")
        return body

    def _recover(self) -> None:
        """Take over the whole stretches of a file of the same request, and cut off the rest."""
        self._file.seek(0)
        end = len(self._head)
        if self._file.read(end) == self._head:
            end = self._scan(end)
        else:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(self._head)
        self._file.truncate(end)

    def _scan(self, at: int) -> int:
        """Index segments from byte `at` on; returns where the last whole stretch ends."""
        last, found = at, 0
        while True:
            self._file.seek(at)
            head = self._file.read(SEGMENT.size)
            if len(head) < SEGMENT.size:
                break
            magic, stretch, layer, tokens, ids, crc = SEGMENT.unpack(head)
            size = 4 * tokens + ids * self.dtype.itemsize
            body = self._file.read(size) if magic == MAGIC and size < 1 << 32 else b""
            if (stretch, layer) != divmod(found, self.layers) or len(body) != size or zlib.crc32(body) != crc:
                break
            self._index[layer].append((at + SEGMENT.size, tokens, ids))
            found, at = found + 1, at + SEGMENT.size + size
            if layer == self.layers - 1:
                last = at
        self.stretches = found // self.layers
        self._index = [own[: self.stretches] for own in self._index]
        return last

    def _failed(self, error: OSError) -> DataError:
        return DataError(
            f"{self.where}: active neurons cannot be kept there ({error.strerror or error}); free space, or set TMPDIR "
            "or --json to another disk"
        )
