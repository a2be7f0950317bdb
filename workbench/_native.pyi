"""The native module: flash reader, slot updates, CPU kernels. Use the packages that wrap it.

Arrays are C-contiguous numpy arrays of exactly the dtype named; nothing is converted or copied.
The GIL is released in every call that reads, moves or computes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Int8s = NDArray[np.int8]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Weights = NDArray[Any]  # float32, or uint16 (float16 also as itself) for 16-bit storage

class ReadFailure(Exception):
    """args: (kind, path, offset, wanted, got, errno), kind one of open, direct, read, short, io_uring, closed, fork."""

class Reader:
    def __init__(self, engine: str, depth: int, chunk_bytes: int) -> None: ...
    def open(self, path: str, direct: bool) -> int: ...
    def close_file(self, handle: int) -> None: ...
    def close(self) -> None: ...
    def read(
        self, file: int, offsets: Int64s, lengths: Int64s, buffer: Bytes, destinations: Int64s, gap_bytes: int
    ) -> tuple[int, int, float]:
        """(bytes asked of the kernel, reads, seconds)"""

def plan_reads(offsets: Int64s, lengths: Int64s, gap_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]: ...
def aligned_buffer(nbytes: int) -> Bytes: ...

class SlotTable:
    def __init__(
        self,
        d_ff: int,
        capacity: int,
        slot_bytes: int,
        matrix: Bytes,
        pointer: Int32s,
        slot_bias: Floats,
        bias: Floats,
    ) -> None: ...
    def update(self, predicted: Int32s, window: int) -> tuple[Int32s, Int32s, Int32s, int, Int32s, int]:
        """(rows, load_ids, load_slots, evicted, moves [moved, 2], trimmed); window -1: nothing leaves for its age"""

    def missing(self, ids: Int32s, window: int) -> Int32s: ...
    def rewind(self, count: int) -> None: ...
    def clear(self) -> None: ...
    @property
    def num_used(self) -> int: ...

def sparse_ffn(
    x: Floats,
    matrix: Bytes,
    slot_bytes: int,
    rows: Int32s,
    bias: Floats,
    dtype: str,
    out: Floats,
    threads: int,
    gated: bool,
    activation: str,
    threshold: float,
    up_bias: Floats | None,
) -> int: ...
def sparse_ffn_tokens(
    x: Floats,
    matrix: Bytes,
    slot_bytes: int,
    ids: Int32s,
    rows: Int32s,
    starts: Int64s,
    bias: Floats,
    dtype: str,
    out: Floats,
    threads: int,
    gated: bool,
    activation: str,
    threshold: float,
    up_bias: Floats | None,
) -> int: ...
def linear(x: Floats, weight: Weights, bias: Floats | None, dtype: str, threads: int) -> Floats: ...
def scores(
    x: Floats,
    a: Weights | Int8s,
    b: Weights | Int8s,
    bias: Floats,
    dtype: str,
    threads: int,
    a_scale: Floats | None,
    b_scale: Floats | None,
) -> Floats: ...
def predict(
    x: Floats,
    a: Weights | Int8s,
    b: Weights | Int8s,
    bias: Floats,
    threshold: float,
    dtype: str,
    threads: int,
    a_scale: Floats | None,
    b_scale: Floats | None,
) -> Int32s: ...
def read_sum(buffer: Bytes, threads: int) -> int: ...
def instruction_set() -> str:
    """Which build of the kernels this processor runs: avx2 or baseline."""

class Coactivation:
    def __init__(self, ids: np.ndarray, offsets: np.ndarray, d_ff: int) -> None: ...
    def rows(self, begin: int, end: int, threads: int = 0) -> np.ndarray: ...
    def summarise(
        self, begin: int, end: int, friends: int, ranks: np.ndarray, threads: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...
