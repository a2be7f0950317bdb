"""Which neurons fire together: exact pair counts, closest friends, and what bundling friends would cost (appendix D).

C[i, j] is how many tokens neurons i and j of a layer are both active in. At 16,384 neurons the matrix is 1 GiB a layer,
so it is never held: rows are made a block at a time and only what `Summary` names is kept of each. A layer's tokens
come as their active ids one after the other (uint16 where d_ff allows it, else uint32, sorted in each token) with
int64 offsets [tokens + 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from workbench import _native

FRIENDS = 8
BLOCK = 1024
"""Rows between two calls of `progress`; also as many as Ctrl-C has to wait for."""
BINS = 33
"""Pairs are counted by how often they fire together: never, 1, 2..3, 4..7 and so on."""


@dataclass(frozen=True)
class Summary:
    """What is kept of rows of the pair counts; each row without the neuron itself.

    friends: int32 [rows, k], the neurons that fire with it most, by count and then by id, -1 where none ever does.
    friend_counts: uint32 [rows, k]. rank_counts: uint32 [rows, ranks], the count of the friend of each rank asked for.
    totals: uint64 [rows], sum of the row. pairs: uint64 [33], pairs by count, each pair seen from both its neurons.
    """

    friends: np.ndarray
    friend_counts: np.ndarray
    rank_counts: np.ndarray
    totals: np.ndarray
    pairs: np.ndarray


class PairCounter(Protocol):
    """Pair counts of one layer, by rows."""

    def rows(self, begin: int, end: int, threads: int = 0) -> np.ndarray:
        """uint32 [end - begin, d_ff]; C[i, i] is the neuron's own count."""
        ...

    def summarise(self, begin: int, end: int, friends: int, ranks: np.ndarray, threads: int = 0) -> Summary:
        """The rows' summary. ranks: int64, rising, each 1 to d_ff - 1."""
        ...


class NativePairs:
    """Pair counts on the CPU, exact, made row by row in memory of a few rows a thread.

    ValueError when ids and offsets do not fit each other.
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, d_ff: int) -> None:
        try:
            self._native = _native.Coactivation(ids, offsets, d_ff)
        except TypeError:
            raise ValueError("coactivation: needs ids as uint16 or uint32 and offsets as int64, contiguous") from None

    def rows(self, begin: int, end: int, threads: int = 0) -> np.ndarray:
        """As PairCounter; the whole block is held."""
        return self._native.rows(begin, end, threads)

    def summarise(self, begin: int, end: int, friends: int, ranks: np.ndarray, threads: int = 0) -> Summary:
        """As PairCounter; releases the GIL."""
        return Summary(*self._native.summarise(begin, end, friends, ranks, threads))


class ReferencePairs:
    """As `NativePairs`, in numpy: a product of the whole layer's 0/1 matrix, float64, so exact."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, d_ff: int) -> None:
        active = np.zeros((len(offsets) - 1, d_ff))
        active[np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), ids.astype(np.int64)] = 1
        self.counts = (active.T @ active).astype(np.uint32)

    def rows(self, begin: int, end: int, threads: int = 0) -> np.ndarray:
        """As PairCounter."""
        return self.counts[begin:end].copy()

    def summarise(self, begin: int, end: int, friends: int, ranks: np.ndarray, threads: int = 0) -> Summary:
        """As PairCounter."""
        rows, d_ff = self.counts[begin:end].astype(np.int64), self.counts.shape[0]
        own = np.arange(begin, end)
        rows[np.arange(end - begin), own] = -1
        order = np.argsort(-rows, axis=1, kind="stable")[:, : d_ff - 1]
        ordered = np.take_along_axis(rows, order, axis=1)
        ids = np.full((end - begin, friends), -1, np.int32)
        counts = np.zeros((end - begin, friends), np.uint32)
        width = min(friends, d_ff - 1)
        counts[:, :width] = ordered[:, :width]
        ids[:, :width] = np.where(counts[:, :width] > 0, order[:, :width], -1)
        bins = np.array([int(c).bit_length() for c in ordered.reshape(-1)], np.int64)
        return Summary(
            ids,
            counts,
            ordered[:, ranks - 1].astype(np.uint32),
            ordered.sum(axis=1).astype(np.uint64),
            np.bincount(bins, minlength=BINS).astype(np.uint64),
        )


def summarise(
    counter: PairCounter,
    d_ff: int,
    friends: int = FRIENDS,
    ranks: np.ndarray | None = None,
    *,
    block: int = BLOCK,
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """All rows of a layer, `block` at a time; `progress(rows done, d_ff)` is called between them."""
    chosen = rank_places(d_ff) if ranks is None else ranks
    parts: list[Summary] = []
    for begin in range(0, d_ff, block):
        end = min(begin + block, d_ff)
        parts.append(counter.summarise(begin, end, friends, chosen, threads))
        if progress:
            progress(end, d_ff)
    return Summary(
        friends=np.concatenate([part.friends for part in parts]),
        friend_counts=np.concatenate([part.friend_counts for part in parts]),
        rank_counts=np.concatenate([part.rank_counts for part in parts]),
        totals=np.concatenate([part.totals for part in parts]),
        pairs=np.stack([part.pairs for part in parts]).sum(axis=0, dtype=np.uint64),
    )


def rank_places(d_ff: int) -> np.ndarray:
    """Ranks that are kept, evenly apart on a logarithmic axis: 1 to d_ff - 1, about six to each doubling. int64."""
    last = d_ff - 1
    if last < 1:
        return np.empty(0, np.int64)
    return np.unique(np.round(np.geomspace(1, last, max(2, round(6 * np.log2(last)) + 1))).astype(np.int64))


def rank_curve(summary: Summary, frequency: np.ndarray) -> np.ndarray:
    """How often a neuron's friend of each rank fires when it does: mean over the neurons that fire, float64 [ranks].

    frequency: int [d_ff], tokens in which each neuron is active.
    """
    used = frequency > 0
    if not used.any():
        return np.zeros(summary.rank_counts.shape[1])
    return (summary.rank_counts[used] / frequency[used, None]).mean(axis=0)


@dataclass(frozen=True)
class PowerLaw:
    """share = scale * rank ** -exponent, fitted on logarithmic axes; r2 says how much of the curve it explains."""

    exponent: float
    scale: float
    r2: float


def power_law(ranks: np.ndarray, shares: np.ndarray, last: int | None = None) -> PowerLaw | None:
    """Least squares over ranks up to `last` (a tenth of the highest) with a share above 0; None for fewer than 3."""
    within = (ranks <= (max(3, int(ranks.max()) // 10) if last is None else last)) & (shares > 0) if len(ranks) else []
    if np.count_nonzero(within) < 3:
        return None
    x, y = np.log(ranks[within]), np.log(shares[within])
    slope, level = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    left = float(((y - (slope * x + level)) ** 2).sum())
    return PowerLaw(float(-slope), float(np.exp(level)), 1 - left / spread if spread else 1.0)


@dataclass(frozen=True)
class Popularity:
    """Who the closest friends are.

    by_place: int64, of how many neurons each neuron is the closest friend, most popular first, zeros left out.
    with_friend: neurons that have one. hot: those whose closest friend is among the hottest neurons of the layer.
    """

    by_place: np.ndarray
    with_friend: int
    hot: int


def popularity(closest: np.ndarray, frequency: np.ndarray, hottest: float = 0.01) -> Popularity:
    """closest: int [d_ff], -1 for none. hottest: the share of neurons, by frequency, that is hot; at least one is."""
    d_ff = len(frequency)
    having = closest[closest >= 0]
    counts = np.bincount(having, minlength=d_ff)
    hot = np.zeros(d_ff, bool)
    hot[np.argsort(-frequency, kind="stable")[: max(1, round(hottest * d_ff))]] = True
    return Popularity(np.sort(counts[counts > 0])[::-1].astype(np.int64), len(having), int(hot[having].sum()))
