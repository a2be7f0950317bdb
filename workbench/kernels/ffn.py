"""The feed-forward network over the neurons in the slots (paper, section 3.3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench import _native
from workbench.kernels.storage import widen
from workbench.spec import ITEMSIZE


def sparse_ffn(
    x: NDArray[np.float32],
    matrix: NDArray[np.uint8],
    slot_bytes: int,
    rows: NDArray[np.int32],
    bias: NDArray[np.float32],
    dtype: str,
    out: NDArray[np.float32],
    threads: int = 0,
) -> int:
    """out += sum over `rows` of relu(up . x + bias) * down; returns how many were active.

    x, out: float32 [d]. matrix: uint8 [capacity * slot_bytes], a slot being [up row | down row] of d values of `dtype`
    each. rows: int32 [n], slots to use. bias: float32 [capacity], by slot. threads: 0 for one a core. A down row is
    read only where its neuron is active. The result depends on the arguments alone, `threads` included. ValueError
    when they do not fit each other.
    """
    try:
        return _native.sparse_ffn(x, matrix, slot_bytes, rows, bias, dtype, out, threads)
    except TypeError:
        raise ValueError("sparse_ffn: needs numpy arrays on the CPU, out writable, and plain numbers") from None


def sparse_ffn_reference(
    x: NDArray[np.float32],
    matrix: NDArray[np.uint8],
    slot_bytes: int,
    rows: NDArray[np.int32],
    bias: NDArray[np.float32],
    dtype: str,
    out: NDArray[np.float32],
    threads: int = 0,
) -> int:
    """As `sparse_ffn`, in numpy."""
    d = len(x)
    slots = matrix[: len(bias) * slot_bytes].reshape(len(bias), slot_bytes)[rows]
    row_bytes = d * ITEMSIZE[dtype]
    stored = np.float32 if dtype == "float32" else np.uint16
    up = widen(np.ascontiguousarray(slots[:, :row_bytes]).view(stored), dtype)
    down = widen(np.ascontiguousarray(slots[:, row_bytes : 2 * row_bytes]).view(stored), dtype)
    hidden = np.maximum(up @ x + bias[rows], 0)
    out += hidden @ down
    return int(np.count_nonzero(hidden))
