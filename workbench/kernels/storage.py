"""Weights as they are stored, widened for the reference kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.spec import ITEMSIZE


def widen(weights: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Stored weights (float32; 16-bit ones as uint16) as float32, exactly. Shape is kept."""
    if dtype == "float32":
        return np.asarray(weights, np.float32)
    bits = weights.view(np.uint16)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"dtype={dtype!r} is not one of {', '.join(ITEMSIZE)}")
