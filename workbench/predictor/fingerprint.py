"""Which model predictors belong to: a digest that survives a change of storage dtype.

Rounding a weight to float16 or bfloat16 changes its bits, and rounding twice may differ from rounding once, so no
digest of the values is the same for all stores of a checkpoint. The sign of a weight is never changed by rounding
(one that underflows becomes a zero of the same sign). 64 rows of every layer's up projection give tens of thousands
of signs a layer: another model, or the same model trained further, differs in some of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

ROWS = 64


def sampled_rows(d_ff: int) -> np.ndarray:
    """The neurons whose up rows are looked at: at most 64, evenly spaced over the layer."""
    count = min(ROWS, d_ff)
    return np.arange(count) * d_ff // count


def fingerprint(up_rows: Iterable[Any]) -> str:
    """SHA-256 (hex) over the signs of 64 up rows a layer.

    `up_rows`: for each layer in order the up projection [d_ff, d_model] as a torch tensor or a numpy array of any
    float dtype, or uint16 holding bfloat16 bits (what `Store.up_rows` gives). Memory maps are only read where sampled.
    """
    digest = hashlib.sha256()
    for layer, rows in enumerate(up_rows):
        picked = sampled_rows(rows.shape[0])
        if isinstance(rows, np.ndarray):
            sample = np.asarray(rows[picked])
            signs = sample >> 15 if sample.dtype == np.uint16 else np.signbit(sample)
        else:
            signs = rows[picked].detach().cpu().signbit().numpy()
        digest.update(f"{layer} {rows.shape[0]} {rows.shape[1]}\n".encode())
        digest.update(np.packbits(signs.astype(bool)).tobytes())
    return digest.hexdigest()
