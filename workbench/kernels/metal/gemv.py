"""A matrix times one token, or a few, on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.kernels.metal.kernel import ITEM_BYTES, SIMD_LANES, Kernel, Machine, size_of
from workbench.kernels.metal.rows import ALIGNMENT
from workbench.kernels.metal.sparse_ffn import LOADS, SMALLEST
from workbench.kernels.storage import widen
from workbench.spec import ITEMSIZE

MOST_TOKENS = 8
WEIGHTS = ("float32", "float16", "bfloat16", "int8")


@functools.cache
def gemv_kernel() -> Kernel:
    """Rows of a matrix times a few vectors."""
    return Kernel.from_file(
        "gemv",
        inputs=[("w", "T"), ("x", "float32"), ("bias", "B"), ("scale", "float32")],
        outputs=[("y", "float32")],
        template=["T", "B", "IN", "OUT", "TOKENS", "VEC", "BIAS", "SCALED", "THREADS", "SPLIT", "P", "UNROLL"],
    )


def gemv(
    machine: Machine,
    w: Any,
    x: Any,
    *,
    dtype: str,
    bias: Any = None,
    bias_dtype: str = "float32",
    scale: Any = None,
    room: int = 0,
) -> Any:
    """float32 [out], or [t, out] for x [t, in]: (w x) * scale + bias, in float32 arithmetic.

    Arrays are the machine's; those of w and x start at a multiple of 16. w: [out, in] of `dtype` (float32, float16,
    bfloat16, int8). x: float32 [in] or [t, in], t up to 8, in at least 8. bias: [out] of `bias_dtype`, or None. scale:
    float32 [out], by row; int8 has one, others none. room: make the result for one token at least so long; what is
    beyond `out` is undefined. ValueError when shapes do not fit.
    """
    if dtype not in WEIGHTS:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(WEIGHTS)}")
    if (scale is None) == (dtype == "int8"):
        raise ValueError(f"scale: {dtype} weights {'need one' if dtype == 'int8' else 'have none'}")
    if bias_dtype not in ITEMSIZE:
        raise ValueError(f"bias_dtype={bias_dtype!r} is not one of {', '.join(ITEMSIZE)}")
    rows, columns = w.shape
    if not rows:
        raise ValueError("w: it has no rows")
    tokens = 1 if len(x.shape) == 1 else x.shape[0]
    if x.shape[-1] != columns or len(x.shape) > 2 or not 1 <= tokens <= MOST_TOKENS or columns < SMALLEST:
        raise ValueError(
            f"x: shape {tuple(x.shape)} is not (n,) or (1 to {MOST_TOKENS}, n) with n = {columns}, at least {SMALLEST}"
        )
    for name, array in (("bias", bias), ("scale", scale)):
        if array is not None and size_of(array) != rows:
            raise ValueError(f"{name}: {size_of(array)} values, w has {rows} rows")
    per_load = ALIGNMENT // ITEM_BYTES[dtype]
    vectors = columns % per_load == 0
    chunks = columns // per_load if vectors else columns
    threads = 256
    simds = threads // SIMD_LANES
    # Few rows: several SIMD groups share one, so that all of the machine is at work.
    split = 1
    while split < simds and rows * split < machine.groups * simds and chunks > split * SIMD_LANES:
        split *= 2
    at_once = 1 if split > 1 else 2
    unroll = max(1, min(LOADS // at_once, -(-chunks // (SIMD_LANES * split))))
    (y,) = machine.run(
        gemv_kernel(),
        [w, x, x if bias is None else bias, x if scale is None else scale],  # x stands where there is none
        template={
            "T": dtype, "B": "float32" if bias is None else bias_dtype, "IN": columns, "OUT": rows, "TOKENS": tokens,
            "VEC": vectors, "BIAS": bias is not None, "SCALED": scale is not None, "THREADS": threads, "SPLIT": split,
            "P": at_once, "UNROLL": unroll,
        },
        grid=-(-rows // (simds // split * at_once)) * threads,
        threadgroup=threads,
        output_shapes=[(max(rows, room),) if len(x.shape) == 1 else (tokens, rows)],
    )  # fmt: skip
    return y


def gemv_reference(
    w: NDArray[Any],
    x: NDArray[np.float32],
    *,
    dtype: str,
    bias: NDArray[Any] | None = None,
    bias_dtype: str = "float32",
    scale: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """As `gemv`, in numpy and float64."""
    wide = (w if dtype == "int8" else widen(w, dtype)).astype(np.float64)
    y = x.astype(np.float64) @ wide.T
    if scale is not None:
        y = y * scale
    return y if bias is None else y + widen(bias, bias_dtype)
