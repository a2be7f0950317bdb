"""The feed-forward network over the neurons in the slots, on a GPU (paper, section 3.3 and appendix C)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.kernels.metal.kernel import SIMD_LANES, Kernel, Machine, size_of
from workbench.kernels.metal.rows import ALIGNMENT, row_bytes, unpack_rows
from workbench.spec import ITEMSIZE

LOADS = 8
"""Loads of 16 bytes that a thread has in flight: enough of them hide the memory's latency, more take registers."""
ROWS_AT_ONCE, UNROLL = 2, 2
MANY_ROWS = 8192
MOST_GROUPS = 1024
SUM_THREADS = 512
SMALLEST = 8
"""MLX passes shorter arrays in Metal's constant address space, from which the kernels cannot load vectors."""


@functools.cache
def ffn_kernel() -> Kernel:
    """The FFN of blocks of rows: a partial result and a count for each threadgroup."""
    return Kernel.from_file(
        "sparse_ffn",
        inputs=[
            ("slots", "uint8"), ("rows", "uint32"), ("num_rows", "uint32"), ("x", "float32"), ("bias", "float32"),
            ("up_bias", "float32"), ("threshold", "float32"), ("order", "uint32"),
        ],
        outputs=[("partial", "float32"), ("counts", "uint32")],
        template=[
            "T", "D", "BITS", "STRIDE", "GATED", "SQUARED", "UP_BIAS", "VEC", "THREADS", "ROWS", "P", "UNROLL", "BATCH",
        ],
    )  # fmt: skip


@functools.cache
def sum_kernel() -> Kernel:
    """The sum of the partial results, in an order that depends on the geometry and num_rows alone."""
    return Kernel.from_file(
        "ffn_sum",
        inputs=[("partial", "float32"), ("counts", "uint32"), ("num_rows", "uint32")],
        outputs=[("y", "float32"), ("active", "uint32")],
        template=["D", "GROUPS", "ROWS", "THREADS"],
    )


@dataclass(frozen=True)
class Tiles:
    """How the FFN is cut. threads: of a threadgroup. groups: threadgroups. rows: of a block, at most; best a multiple
    of threads / 32 * rows_at_once. rows_at_once: that a SIMD group multiplies with x together. unroll: chunks of each
    of them in flight. batch: down rows in flight."""

    threads: int = 256
    groups: int = 264
    rows: int = 16
    rows_at_once: int = 2
    unroll: int = 4
    batch: int = 4

    def __post_init__(self) -> None:
        if min(self.threads, self.groups, self.rows, self.rows_at_once, self.unroll, self.batch) < 1:
            raise ValueError(f"{self}: every part is at least 1")
        if self.threads % SIMD_LANES or self.threads > 1024:
            raise ValueError(f"{self}: threads is not a multiple of {SIMD_LANES} up to 1024")


@dataclass(frozen=True)
class Record:
    """A slot's layout: [up row | (gate row) | down row], each `row_bytes` long, at a stride of `slot_bytes`."""

    d: int
    dtype: str
    slot_bytes: int
    gated: bool = False
    bits: int = 0

    def __post_init__(self) -> None:
        if self.d < SMALLEST:
            raise ValueError(f"d={self.d}: the kernels need at least {SMALLEST}")
        if self.slot_bytes < self.parts * self.row_bytes:
            raise ValueError(f"slot_bytes={self.slot_bytes} does not hold {self.parts} rows of {self.row_bytes} bytes")
        if self.slot_bytes % (ALIGNMENT if self.bits else ITEMSIZE[self.dtype]):
            raise ValueError(f"slot_bytes={self.slot_bytes} leaves rows of {self.dtype} unaligned")

    @property
    def parts(self) -> int:
        """Rows of a neuron."""
        return 3 if self.gated else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return row_bytes(self.d, self.dtype, self.bits)

    @property
    def vectors(self) -> bool:
        """Whether every row starts and ends at a multiple of 16 bytes, so that 16 are loaded at once."""
        return self.row_bytes % ALIGNMENT == 0 and self.slot_bytes % ALIGNMENT == 0

    @property
    def chunk(self) -> int:
        """Weights that one load brings."""
        if self.bits:
            return 16
        return ALIGNMENT // ITEMSIZE[self.dtype] if self.vectors else 1


def tiles(machine: Machine, record: Record, most_rows: int) -> Tiles:
    """A cut that suits the machine and that many rows: every thread owns some columns, and has some loads in flight.

    Measured on an H200 at d=4096 (bfloat16): one threadgroup of 512 threads a multiprocessor is fastest for 4,096 rows,
    where each takes one block; with many more rows, two of them hide each other's barriers.
    """
    return _tiles(machine.groups, machine.most_threads, record, most_rows > MANY_ROWS)


@functools.cache
def _tiles(machine_groups: int, most_threads: int, record: Record, many: bool) -> Tiles:
    chunks = record.d // record.chunk
    threads = min(most_threads, -(-chunks // SIMD_LANES) * SIMD_LANES)
    owned = -(-chunks // threads)
    block = max(16, threads // SIMD_LANES * ROWS_AT_ONCE)
    groups = machine_groups * 256 // threads
    return Tiles(
        threads=threads,
        groups=min(MOST_GROUPS, groups * 2 if many else groups),
        rows=block * 2 if many else block,
        rows_at_once=ROWS_AT_ONCE,
        unroll=max(1, min(UNROLL, -(-chunks // SIMD_LANES))),
        batch=max(1, LOADS // owned),
    )


@functools.cache
def _template(record: Record, squared: bool, up_bias: bool, cut: Tiles) -> dict[str, str | int | bool]:
    return {
        "T": record.dtype, "D": record.d, "BITS": record.bits, "STRIDE": record.slot_bytes, "GATED": record.gated,
        "SQUARED": squared, "UP_BIAS": up_bias, "VEC": record.vectors, "THREADS": cut.threads, "ROWS": cut.rows,
        "P": cut.rows_at_once, "UNROLL": cut.unroll, "BATCH": cut.batch,
    }  # fmt: skip


def sparse_ffn(
    machine: Machine,
    record: Record,
    slots: Any,
    rows: Any,
    num_rows: Any,
    x: Any,
    bias: Any,
    threshold: Any,
    *,
    activation: str = "relu",
    up_bias: Any = None,
    order: Any = None,
    cut: Tiles | None = None,
) -> tuple[Any, Any]:
    """(y float32 [d], active uint32 [1]): the FFN of the neurons in the first num_rows[0] slots of `rows`.

    With z = up . x + bias, or gate . x + bias when gated, a neuron is active where z > threshold or z is NaN. Its value
    h is z ('relu') or z * z ('relu2'). An active neuron adds h * down, or h * (up . x + up_bias) * down when gated; one
    whose h is 0 adds nothing, whatever its down row holds. The threshold is finite. Arithmetic is float32. y depends
    on the arguments and the cut alone.

    Arrays are the machine's. slots: uint8 [at least capacity * slot_bytes], in memory that starts at a multiple of 16.
    rows: uint32 [max_rows]. num_rows: uint32 [1], at most max_rows. x: float32 [d], in memory that starts at a multiple
    of 16. bias, up_bias: float32 [capacity], by slot; up_bias None for zeros, gated only. threshold: float32 [1].
    order: what must be done before slots are read, an output of `slots.insert` or `slots.move`. num_rows and the
    contents of arrays are data: a change of them compiles and allocates nothing. ValueError when shapes do not fit.
    """
    if activation not in ("relu", "relu2"):
        raise ValueError(f"activation={activation!r} is not relu or relu2")
    if up_bias is not None and not record.gated:
        raise ValueError("up_bias: records without a gate have none")
    if tuple(x.shape) != (record.d,):
        raise ValueError(f"x: shape {tuple(x.shape)} is not ({record.d},)")
    if size_of(slots) < size_of(bias) * record.slot_bytes:
        raise ValueError(f"slots: {size_of(slots)} bytes do not hold the {size_of(bias)} slots that bias has")
    if up_bias is not None and size_of(up_bias) != size_of(bias):
        raise ValueError(f"up_bias: {size_of(up_bias)} slots, bias has {size_of(bias)}")
    cut = cut or tiles(machine, record, size_of(rows))
    partial, counts = machine.run(
        ffn_kernel(),
        [slots, rows, num_rows, x, bias, bias if up_bias is None else up_bias, threshold,
         num_rows if order is None else order],
        template=_template(record, activation == "relu2", up_bias is not None, cut),
        grid=cut.groups * cut.threads,
        threadgroup=cut.threads,
        output_shapes=[(cut.groups, record.d), (cut.groups,)],
    )  # fmt: skip
    y, active = machine.run(
        sum_kernel(),
        [partial, counts, num_rows],
        template={"D": record.d, "GROUPS": cut.groups, "ROWS": cut.rows, "THREADS": SUM_THREADS},
        grid=-(-record.d // SIMD_LANES) * SUM_THREADS,
        threadgroup=SUM_THREADS,
        output_shapes=[(record.d,), (1,)],
    )
    return y, active


def sparse_ffn_reference(
    record: Record,
    slots: NDArray[np.uint8],
    rows: NDArray[np.uint32],
    num_rows: int,
    x: NDArray[np.float32],
    bias: NDArray[np.float32],
    threshold: float,
    *,
    activation: str = "relu",
    up_bias: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float64], int]:
    """As `sparse_ffn`, in numpy and float64."""
    used = rows[:num_rows].astype(np.int64)
    held = slots[: len(bias) * record.slot_bytes].reshape(len(bias), record.slot_bytes)[used]
    size = record.row_bytes
    weights = [unpack_rows(held[:, p * size : (p + 1) * size], record.d, record.dtype, record.bits)
               for p in range(record.parts)]  # fmt: skip
    wide = x.astype(np.float64)
    z = weights[1 if record.gated else 0] @ wide + bias[used]
    active = (z > threshold) | np.isnan(z)
    h = np.where(active, z * z if activation == "relu2" else z, 0.0)
    if record.gated:
        h = h * (weights[0] @ wide + (0 if up_bias is None else up_bias[used]))
    used_rows = active & (h != 0)
    return h[used_rows] @ weights[-1][used_rows], int(active.sum())
