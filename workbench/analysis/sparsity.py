"""How sparse each layer is, and how evenly its neurons are used (paper section 3.1, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def zeros(activations: np.ndarray) -> float:
    """Share of a layer's FFN activations [tokens, d_ff] that are zero; also for a bool array of which are active."""
    if activations.size == 0:
        raise ValueError("no activations: give at least one token")
    return 1.0 - np.count_nonzero(activations > 0) / activations.size


def zeros_by_layer(uses: Sequence[Sequence[np.ndarray]], d_ff: int) -> np.ndarray:
    """Share of zeros of each layer, float64 [layers], from the active neurons' ids by layer and token."""
    if not uses or not all(len(layer) for layer in uses):
        raise ValueError("no activations: give at least one layer and one token")
    return np.array([1.0 - sum(len(ids) for ids in layer) / (len(layer) * d_ff) for layer in uses])


@dataclass(frozen=True)
class Usage:
    """A layer's neurons: share of tokens that use each [d_ff], neurons never used, and the share of all uses that the
    most used tenth of the neurons has (0.1 when all are used alike)."""

    frequency: np.ndarray
    never: int
    top_tenth: float


def usage(uses: Sequence[np.ndarray], d_ff: int) -> Usage:
    """How often each neuron of a layer is active, from the ids of each token."""
    if not uses:
        raise ValueError("no activations: give at least one token")
    counts = np.bincount(np.concatenate(uses).astype(np.int64), minlength=d_ff)
    top = np.sort(counts)[::-1][: max(1, d_ff // 10)].sum()
    total = counts.sum()
    return Usage(counts / len(uses), int((counts == 0).sum()), float(top / total) if total else 0.0)
