"""How sparse each layer is, token by token, and how evenly its neurons are used (paper section 3.1, figure 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

QUANTILES = (5, 25, 50, 75, 95)
"""Percentiles that a spread over tokens keeps."""


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
class Spread:
    """A share over tokens: its mean, and the percentiles of QUANTILES in their order."""

    mean: float
    quantiles: tuple[float, ...]


def spread(shares: np.ndarray) -> Spread:
    """Mean and percentiles of shares [tokens], any shape. ValueError when there are none."""
    if shares.size == 0:
        raise ValueError("no activations: give at least one token")
    return Spread(float(shares.mean()), tuple(float(q) for q in np.percentile(shares, QUANTILES)))


def zeros_spread(counts: np.ndarray, d_ff: int) -> Spread:
    """The share of zeros over tokens, from how many of a layer's d_ff neurons are active at each: int [tokens]."""
    return spread(1.0 - np.asarray(counts, np.float64) / d_ff)


@dataclass(frozen=True)
class PlaceSpread:
    """Share of zeros over the tokens at places first..last of their stretch of text, the whole model's."""

    first: int
    last: int
    zeros: Spread


def zeros_by_place(counts: np.ndarray, d_ff: int) -> list[PlaceSpread]:
    """Share of zeros against how much text is before a token: for places 0, 1, 2..3, 4..7 and so on.

    counts: active neurons, int [layers, stretches, places]. A token's share is the mean over layers.
    """
    if counts.ndim != 3 or counts.size == 0:
        raise ValueError(f"counts of shape {counts.shape} are not [layers, stretches, places] with any in them")
    shares = 1.0 - counts.mean(axis=0) / d_ff
    found, first = [], 0
    while first < counts.shape[2]:
        end = min(counts.shape[2], max(1, 2 * first))
        found.append(PlaceSpread(first, end - 1, spread(shares[:, first:end])))
        first = end
    return found


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
    return usage_of(np.bincount(np.concatenate(uses).astype(np.int64), minlength=d_ff), len(uses))


def usage_of(counts: np.ndarray, tokens: int) -> Usage:
    """As `usage`, from how many of the `tokens` use each neuron: int [d_ff]."""
    if tokens < 1:
        raise ValueError("no activations: give at least one token")
    top = np.sort(counts)[::-1][: max(1, len(counts) // 10)].sum()
    total = counts.sum()
    return Usage(counts / tokens, int((counts == 0).sum()), float(top / total) if total else 0.0)
