"""The low-rank predictor of active neurons (paper, section 3.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench import _native
from workbench.kernels.storage import widen


def scores(
    x: NDArray[np.float32],
    a: NDArray[Any],
    b: NDArray[Any],
    bias: NDArray[np.float32],
    dtype: str = "float32",
    threads: int = 0,
    *,
    a_scale: NDArray[np.float32] | None = None,
    b_scale: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """float32 [d_ff]: b @ (a @ x) + bias.

    x: float32 [d]. a: [r, d] and b: [d_ff, r] in storage dtype (16-bit as uint16). bias: float32 [d_ff].
    dtype 'int8': a and b are int8, with float32 a_scale [r] and b_scale [d_ff]: a weight is its element times its row's
    scale. Other dtypes take no scales. threads: 0 for one a core. ValueError when shapes or dtypes do not fit.
    """
    try:
        return _native.scores(x, a, b, bias, dtype, threads, a_scale, b_scale)
    except TypeError:
        raise ValueError("scores: needs numpy arrays on the CPU and plain numbers") from None


def predict(
    x: NDArray[np.float32],
    a: NDArray[Any],
    b: NDArray[Any],
    bias: NDArray[np.float32],
    threshold: float,
    dtype: str = "float32",
    threads: int = 0,
    *,
    a_scale: NDArray[np.float32] | None = None,
    b_scale: NDArray[np.float32] | None = None,
) -> NDArray[np.int32]:
    """int32, sorted: the neurons whose score is above `threshold`, or NaN. Other arguments as for `scores`."""
    try:
        return _native.predict(x, a, b, bias, threshold, dtype, threads, a_scale, b_scale)
    except TypeError:
        raise ValueError("predict: needs numpy arrays on the CPU and plain numbers") from None


def scores_reference(
    x: NDArray[np.float32],
    a: NDArray[Any],
    b: NDArray[Any],
    bias: NDArray[np.float32],
    dtype: str = "float32",
    threads: int = 0,
    *,
    a_scale: NDArray[np.float32] | None = None,
    b_scale: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """As `scores`, in numpy."""
    if dtype == "int8":
        if a_scale is None or b_scale is None:
            raise ValueError("a_scale, b_scale: int8 factors need both")
        hidden = (a.astype(np.float32) @ x) * a_scale
        return ((b.astype(np.float32) @ hidden) * b_scale + bias).astype(np.float32, copy=False)
    return (widen(b, dtype) @ (widen(a, dtype) @ x) + bias).astype(np.float32, copy=False)


def predict_reference(
    x: NDArray[np.float32],
    a: NDArray[Any],
    b: NDArray[Any],
    bias: NDArray[np.float32],
    threshold: float,
    dtype: str = "float32",
    threads: int = 0,
    *,
    a_scale: NDArray[np.float32] | None = None,
    b_scale: NDArray[np.float32] | None = None,
) -> NDArray[np.int32]:
    """As `predict`, in numpy."""
    values = scores_reference(x, a, b, bias, dtype, a_scale=a_scale, b_scale=b_scale)
    return np.flatnonzero(~(values <= threshold)).astype(np.int32)
