"""Rows of weights as records hold them: plain, or quantized to 8 or 4 bits in groups of 64.

A quantized row of d weights (d a multiple of 64) is, in this order: d unsigned values of 8 or 4 bits, the first in the
lowest bits of the first byte; d/64 scales; d/64 biases, both in the record's dtype; zeros up to a multiple of 16 bytes.
A weight is scale * value + bias of its group.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.kernels.storage import widen
from workbench.spec import ITEMSIZE

GROUP = 64
ALIGNMENT = 16
LEAST_STEP = {"float32": 1e-30, "float16": 2.0**-24, "bfloat16": 1e-30}
"""The least scale of a group: above 0 in its dtype."""
BITS = (0, 4, 8)
"""0: not quantized."""


def row_bytes(d: int, dtype: str, bits: int = 0) -> int:
    """Bytes of a row of d weights. ValueError for d, dtype or bits that rows cannot have."""
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(ITEMSIZE)}")
    if bits not in BITS:
        raise ValueError(f"bits={bits} is not 8, 4, or 0 for rows that are not quantized")
    if not bits:
        return d * ITEMSIZE[dtype]
    if d % GROUP:
        raise ValueError(f"d={d}: quantized rows need a multiple of {GROUP}")
    used = d * bits // 8 + 2 * (d // GROUP) * ITEMSIZE[dtype]
    return -(-used // ALIGNMENT) * ALIGNMENT


def narrow(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values rounded to `dtype` as it is stored: 16-bit floats as uint16."""
    single = np.ascontiguousarray(values, np.float32)
    if dtype == "float32":
        return single
    if dtype == "float16":
        return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


def pack_rows(weights: NDArray[Any], dtype: str, bits: int = 0) -> NDArray[np.uint8]:
    """Rows float [n, d] as uint8 [n, row_bytes]."""
    n, d = weights.shape
    if not bits:
        return narrow(weights, dtype).reshape(n, d).view(np.uint8)
    packed = np.zeros((n, row_bytes(d, dtype, bits)), np.uint8)
    groups = np.asarray(weights, np.float64).reshape(n, d // GROUP, GROUP)
    low = groups.min(-1)
    # A step that rounds to 0 would lose the whole range of its group.
    step = np.maximum((groups.max(-1) - low) / (2**bits - 1), LEAST_STEP[dtype])
    scales, biases = narrow(step, dtype), narrow(low, dtype)
    scale, bias = (widen(part, dtype).astype(np.float64)[..., None] for part in (scales, biases))
    values = np.clip(np.rint((groups - bias) / scale), 0, 2**bits - 1).astype(np.uint8).reshape(n, d)
    stored = values if bits == 8 else values[:, ::2] | values[:, 1::2] << 4
    packed[:, : stored.shape[1]] = stored
    at = stored.shape[1]
    for part in (scales, biases):
        raw = np.ascontiguousarray(part).view(np.uint8).reshape(n, -1)
        packed[:, at : at + raw.shape[1]] = raw
        at += raw.shape[1]
    return packed


def unpack_rows(packed: NDArray[np.uint8], d: int, dtype: str, bits: int = 0) -> NDArray[np.float64]:
    """uint8 [n, at least row_bytes] as the weights that they stand for, float64 [n, d]."""
    n, size, item = len(packed), row_bytes(d, dtype, bits), ITEMSIZE[dtype]
    held = np.ascontiguousarray(packed[:, :size])
    stored = np.float32 if dtype == "float32" else np.uint16
    if not bits:
        return widen(held.view(stored), dtype).astype(np.float64).reshape(n, d)
    value_bytes = d * bits // 8
    raw = held[:, :value_bytes]
    values = raw if bits == 8 else np.stack([raw & 15, raw >> 4], -1).reshape(n, d)
    ends = value_bytes + (d // GROUP) * item * np.arange(3)
    scale, bias = (
        widen(np.ascontiguousarray(held[:, a:b]).view(stored), dtype).astype(np.float64)[..., None]
        for a, b in itertools.pairwise(ends)
    )
    return (scale * values.reshape(n, d // GROUP, GROUP) + bias).reshape(n, d)
