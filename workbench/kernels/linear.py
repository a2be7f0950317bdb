"""A linear layer for a few tokens at a time, at the speed of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench import _native
from workbench.kernels.storage import widen


def linear(
    x: NDArray[np.float32], weight: NDArray[Any], bias: NDArray[np.float32] | None, dtype: str, threads: int = 0
) -> NDArray[np.float32]:
    """float32 [t, out]: x @ weight.T + bias.

    x: float32 [t, in], t small. weight: [out, in] in storage dtype (16-bit as uint16). bias: float32 [out] or None.
    threads: 0 for one a core. ValueError when shapes or dtypes do not fit.
    """
    try:
        return _native.linear(x, weight, bias, dtype, threads)
    except TypeError:
        raise ValueError("linear: needs numpy arrays on the CPU and plain numbers") from None


def linear_reference(
    x: NDArray[np.float32], weight: NDArray[Any], bias: NDArray[np.float32] | None, dtype: str, threads: int = 0
) -> NDArray[np.float32]:
    """As `linear`, in numpy."""
    product = x @ widen(weight, dtype).T
    return product if bias is None else product + bias
