"""Quality of predictions: false negatives, false positives, predicted/active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Counts:
    """Sums over tokens of one layer. `missed`: active but not predicted. Counts add up with +."""

    tokens: int = 0
    neurons: int = 0
    active: int = 0
    predicted: int = 0
    missed: int = 0
    activation: float = 0.0
    missed_activation: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))

    @property
    def false_negative(self) -> float:
        """Share of active neurons that were not predicted."""
        return self.missed / self.active if self.active else 0.0

    @property
    def false_positive(self) -> float:
        """Share of inactive neurons that were predicted."""
        inactive = self.neurons - self.active
        return (self.predicted - (self.active - self.missed)) / inactive if inactive else 0.0

    @property
    def predicted_over_active(self) -> float:
        """Neurons predicted for each one active; what the reads grow by."""
        return self.predicted / self.active if self.active else float(self.predicted > 0)

    @property
    def missed_share(self) -> float:
        """Share of the summed activation that was missed: the small ones are missed first."""
        return self.missed_activation / self.activation if self.activation else 0.0

    def as_dict(self) -> dict[str, float]:
        """The card's fields: shares, and mean neurons a token."""
        tokens = max(1, self.tokens)
        return {
            "false_negative": self.false_negative,
            "false_positive": self.false_positive,
            "active": self.active / tokens,
            "predicted": self.predicted / tokens,
            "predicted_over_active": self.predicted_over_active,
            "missed_activation": self.missed_share,
        }


def count(
    logits: torch.Tensor, thresholds: Sequence[float], pre: torch.Tensor, value: torch.Tensor | None = None
) -> list[Counts]:
    """Counts of one layer over tokens, for each threshold: predicted where logits [tokens, d_ff] are above it.

    `pre` [tokens, d_ff]: the dense model's pre-activations, active above 0. `value`: the activations, where they differ
    from the pre-activations above 0.
    """
    active = pre > 0
    active_logits, values = logits[active], (pre if value is None else value)[active].double()
    found = []
    for threshold in thresholds:
        missed = active_logits <= threshold
        found.append(
            Counts(
                tokens=pre.shape[0],
                neurons=pre.numel(),
                active=values.numel(),
                predicted=int((logits > threshold).sum()),
                missed=int(missed.sum()),
                activation=float(values.sum()),
                missed_activation=float(values[missed].sum()),
            )
        )
    return found


class ActiveLogits:
    """The logits of active neurons of one layer, for quantiles: exact up to `limit` values, then a histogram.

    The histogram has a bin for each value of a float32's upper 20 bits (relative width 2^-11), and answers with the
    lower edge of a bin, so that never more than the asked share lies at or below the threshold.
    """

    def __init__(self, limit: int = 1 << 24) -> None:
        self.limit, self.size = limit, 0
        self._parts: list[np.ndarray] = []
        self._histogram: np.ndarray | None = None

    def add(self, logits: np.ndarray) -> None:
        """float32 [n]."""
        self.size += logits.size
        if self._histogram is not None:
            self._histogram += np.bincount(_ordered(logits) >> 12, minlength=1 << 20)
            return
        self._parts.append(logits.astype(np.float32, copy=True))
        if self.size > self.limit:
            self._fold()

    def merge(self, other: ActiveLogits) -> None:
        """Take in the values of another of the same limit."""
        for part in other._parts:
            self.add(part)
        if other._histogram is None:
            return
        if self._histogram is None:
            self._fold()
        self._histogram += other._histogram
        self.size += other.size

    def _fold(self) -> None:
        """From values to the histogram."""
        parts, self._parts = self._parts, []
        self._histogram = np.zeros(1 << 20, dtype=np.int64)
        for part in parts:
            self._histogram += np.bincount(_ordered(part) >> 12, minlength=1 << 20)

    def threshold(self, share: float) -> float:
        """The highest threshold such that at most `share` of the values are not above it; 0.0 without values."""
        return self.thresholds([share])[0]

    def thresholds(self, shares: Sequence[float]) -> list[float]:
        """That of each share."""
        if not self.size:
            return [0.0] * len(shares)
        below = [int(share * self.size) for share in shares]
        if self._histogram is None:
            values = np.partition(np.concatenate(self._parts), sorted(set(below)))
            edges = [values[at] for at in below]
        else:
            places = np.searchsorted(np.cumsum(self._histogram), below, side="right")
            edges = [_unordered(np.uint32(int(at) << 12)) for at in places]
        return [float(np.nextafter(np.float32(edge), np.float32(-np.inf))) for edge in edges]


def _ordered(values: np.ndarray) -> np.ndarray:
    """float32 as uint32 in the same order."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _unordered(bits: np.uint32) -> float:
    value = np.uint32(bits)
    raw = value & np.uint32(0x7FFFFFFF) if value >> 31 else ~value
    return float(np.asarray(raw, dtype=np.uint32).view(np.float32))
