"""The low-rank predictor on a GPU: only the list of predicted neurons leaves it (paper, section 3.1)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.kernels.metal.gemv import WEIGHTS, gemv, gemv_reference
from workbench.kernels.metal.kernel import ITEM_BYTES, SIMD_LANES, Kernel, Machine, size_of
from workbench.kernels.metal.rows import ALIGNMENT
from workbench.kernels.metal.sparse_ffn import SMALLEST

THREADS = 256
LISTING_THREADS = 512


@functools.cache
def flags_kernel() -> Kernel:
    """A bit for each neuron: set where its score is above the threshold, or NaN."""
    return Kernel.from_file(
        "predict_flags",
        inputs=[("w", "T"), ("hidden", "float32"), ("bias", "float32"), ("scale", "float32"), ("threshold", "float32")],
        outputs=[("flags", "uint8")],
        template=["T", "RANK", "NEURONS", "VEC", "SCALED", "THREADS", "UNROLL"],
    )


@functools.cache
def compact_kernel() -> Kernel:
    """The numbers of the bits that are set, sorted."""
    return Kernel.from_file(
        "compact",
        inputs=[("flags", "uint8")],
        outputs=[("indices", "uint32"), ("count", "uint32")],
        template=["NEURONS", "THREADS"],
    )


def predict(
    machine: Machine,
    x: Any,
    a: Any,
    b: Any,
    bias: Any,
    threshold: Any,
    *,
    dtype: str,
    a_scale: Any = None,
    b_scale: Any = None,
) -> tuple[Any, Any]:
    """(indices uint32 [d_ff], count uint32 [1]): neurons whose score b (a x) + bias is above threshold, or NaN.

    The first count[0] indices are set, in ascending order; the rest is undefined. Arrays are the machine's; those of a,
    b and x start at a multiple of 16. x: float32 [d]. a: [r, d], b: [d_ff, r] of `dtype`; int8 with float32 a_scale [r]
    and b_scale [d_ff]. bias: float32 [d_ff]. threshold: float32 [1]. ValueError when shapes do not fit.
    """
    if dtype not in WEIGHTS:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(WEIGHTS)}")
    neurons, rank = b.shape
    if a.shape[0] != rank or size_of(bias) != neurons or min(size_of(a), size_of(b)) < SMALLEST:
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}, bias ({size_of(bias)},) do not fit each other")
    if (b_scale is None) == (dtype == "int8") or (b_scale is not None and size_of(b_scale) != neurons):
        raise ValueError("b_scale: int8 factors need one a neuron, others none")
    hidden = gemv(machine, a, x, dtype=dtype, scale=a_scale, room=SMALLEST)
    per_load = ALIGNMENT // ITEM_BYTES[dtype]
    vectors = rank % per_load == 0
    chunks = rank // per_load if vectors else rank
    count_bytes = -(-neurons // 8)
    (flags,) = machine.run(
        flags_kernel(),
        [b, hidden, bias, bias if b_scale is None else b_scale, threshold],
        template={
            "T": dtype, "RANK": rank, "NEURONS": neurons, "VEC": vectors, "SCALED": b_scale is not None,
            "THREADS": THREADS, "UNROLL": 2 if chunks > SIMD_LANES else 1,
        },
        grid=-(-count_bytes // (THREADS // SIMD_LANES)) * THREADS,
        threadgroup=THREADS,
        output_shapes=[(count_bytes,)],
    )  # fmt: skip
    threads = min(LISTING_THREADS, -(-count_bytes // (4 * SIMD_LANES)) * SIMD_LANES)
    indices, count = machine.run(
        compact_kernel(),
        [flags],
        template={"NEURONS": neurons, "THREADS": threads},
        grid=threads,
        threadgroup=threads,
        output_shapes=[(neurons,), (1,)],
    )
    return indices, count


def scores_reference(
    x: NDArray[np.float32],
    a: NDArray[Any],
    b: NDArray[Any],
    bias: NDArray[np.float32],
    *,
    dtype: str,
    a_scale: NDArray[np.float32] | None = None,
    b_scale: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """The scores that `predict` compares, in numpy and float64."""
    hidden = gemv_reference(a, x, dtype=dtype, scale=a_scale)
    return gemv_reference(b, hidden, dtype=dtype, scale=b_scale) + bias  # type: ignore[arg-type]
