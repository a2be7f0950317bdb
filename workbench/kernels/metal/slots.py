"""Records into and between slots on a GPU, in place.

Both kernels change `slots` although arrays are constant to MLX: keep the only reference to that memory, pass what they
return as `order` or `after` to whatever reads the slots next, and pass an output of whatever read them last as `after`.
Per-slot values such as biases are slots too: of 4 bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.kernels.metal.kernel import SIMD_LANES, Kernel, Machine, size_of
from workbench.kernels.metal.sparse_ffn import SMALLEST


@functools.cache
def insert_kernel() -> Kernel:
    """Records from a staging buffer to slots."""
    return Kernel.from_file(
        "slot_insert",
        inputs=[
            ("staging", "uint8"), ("ids", "uint32"), ("count", "uint32"), ("slots", "uint8"), ("after", "uint32"),
        ],
        outputs=[("done", "uint32")],
        template=["STRIDE", "UNIT", "THREADS"],
        in_place=["slots"],
    )  # fmt: skip


@functools.cache
def move_kernel() -> Kernel:
    """Records from slots to slots."""
    return Kernel.from_file(
        "slot_move",
        inputs=[
            ("source", "uint32"), ("target", "uint32"), ("count", "uint32"), ("slots", "uint8"), ("after", "uint32"),
        ],
        outputs=[("done", "uint32")],
        template=["STRIDE", "UNIT", "THREADS"],
        in_place=["slots"],
    )  # fmt: skip


def insert(machine: Machine, slots: Any, slot_bytes: int, staging: Any, ids: Any, count: Any, after: Any = None) -> Any:
    """Copy record i of `staging` to slot ids[i], for i < count[0]. Returns uint32 [1], set when it is done.

    slots: uint8 [at least capacity * slot_bytes]. staging: uint8 [max_records * slot_bytes]. ids: uint32 [max_records],
    all different. count: uint32 [1]. after: uint32, what must be done before. All but slots and staging's size is data.
    slots and staging start at a multiple of 16. ValueError when sizes do not fit.
    """
    if size_of(staging) < size_of(ids) * slot_bytes:
        raise ValueError(f"staging: {size_of(staging)} bytes do not hold {size_of(ids)} records of {slot_bytes}")
    if min(size_of(staging), size_of(slots)) < SMALLEST:
        raise ValueError(f"slots, staging: the kernels need at least {SMALLEST} bytes of each")
    return _copy(machine, insert_kernel(), [staging, ids, count, slots], slot_bytes, after)


def move(machine: Machine, slots: Any, slot_bytes: int, source: Any, target: Any, count: Any, after: Any = None) -> Any:
    """Copy slot source[i] to slot target[i], for i < count[0]: how the last records fill holes. No target is a source.

    source, target: uint32 [max_moves]. Otherwise as `insert`.
    """
    if size_of(source) != size_of(target):
        raise ValueError(f"source, target: {size_of(source)} and {size_of(target)} slots")
    if size_of(slots) < SMALLEST:
        raise ValueError(f"slots: the kernels need at least {SMALLEST} bytes")
    return _copy(machine, move_kernel(), [source, target, count, slots], slot_bytes, after)


def _copy(machine: Machine, kernel: Kernel, inputs: list[Any], slot_bytes: int, after: Any) -> Any:
    if slot_bytes < 1:
        raise ValueError(f"slot_bytes={slot_bytes} is not positive")
    unit = next(unit for unit in (16, 4, 1) if slot_bytes % unit == 0)
    threads = min(256, -(-slot_bytes // (unit * SIMD_LANES)) * SIMD_LANES)
    most = size_of(inputs[1])
    (done,) = machine.run(
        kernel,
        [*inputs, inputs[2] if after is None else after],
        template={"STRIDE": slot_bytes, "UNIT": unit, "THREADS": threads},
        grid=min(most, 4 * machine.groups) * threads,
        threadgroup=threads,
        output_shapes=[(1,)],
    )
    return done


def insert_reference(
    slots: NDArray[np.uint8], slot_bytes: int, staging: NDArray[np.uint8], ids: NDArray[np.uint32], count: int
) -> None:
    """As `insert`, in numpy."""
    held = slots[: slots.size // slot_bytes * slot_bytes].reshape(-1, slot_bytes)
    held[ids[:count]] = staging[: ids.size * slot_bytes].reshape(-1, slot_bytes)[:count]


def move_reference(
    slots: NDArray[np.uint8], slot_bytes: int, source: NDArray[np.uint32], target: NDArray[np.uint32], count: int
) -> None:
    """As `move`, in numpy."""
    held = slots[: slots.size // slot_bytes * slot_bytes].reshape(-1, slot_bytes)
    held[target[:count]] = held[source[:count]]
