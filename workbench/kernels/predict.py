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
) -> NDArray[np.float32]:
    """float32 [d_ff]: b @ (a @ x) + bias.

    x: float32 [d]. a: [r, d] and b: [d_ff, r] in storage dtype (16-bit as uint16). bias: float32 [d_ff].
    threads: 0 for one a core. ValueError when shapes or dtypes do not fit.
    """
    try:
        return _native.scores(x, a, b, bias, dtype, threads)
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
) -> NDArray[np.int32]:
    """int32, sorted: the neurons whose score is above `threshold`. Arguments as for `scores`."""
    try:
        return _native.predict(x, a, b, bias, threshold, dtype, threads)
    except TypeError:
        raise ValueError("predict: needs numpy arrays on the CPU and plain numbers") from None


def scores_reference(
    x: NDArray[np.float32],
    a: NDArray[Any],
    b: NDArray[Any],
    bias: NDArray[np.float32],
    dtype: str = "float32",
    threads: int = 0,
) -> NDArray[np.float32]:
    """As `scores`, in numpy."""
    return (widen(b, dtype) @ (widen(a, dtype) @ x) + bias).astype(np.float32, copy=False)


def predict_reference(
    x: NDArray[np.float32],
    a: NDArray[Any],
    b: NDArray[Any],
    bias: NDArray[np.float32],
    threshold: float,
    dtype: str = "float32",
    threads: int = 0,
) -> NDArray[np.int32]:
    """As `predict`, in numpy."""
    return np.flatnonzero(scores_reference(x, a, b, bias, dtype) > threshold).astype(np.int32)
