"""Orders of a layer's neurons on flash that put those side by side which are loaded together (beyond the paper).

Appendix D of the paper bundles each neuron with its closest friend, which loads the busiest neurons over and over. Here
every neuron is stored once and only the order changes: where neighbours are due for the same token, the reader serves
them with one read. What counts is what is *loaded*, the neurons that a token needs and the window lacks: the busiest
neurons stay in the window and are seldom read.

A token's loads are the sorted ids of the neurons read for it. An order is int32 [d_ff]: the neuron at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.reuse import gaps
from workbench.flash.reader import ALIGNMENT, plan_reads

Loads = Sequence[NDArray[np.integer]]
Order = NDArray[np.int32]
BLOCK_TOKENS = 2048
CANDIDATES = 24
"""Partners that are weighed for each end of a chain, in a round of `chains`."""
JOINED_SHARE = 0.15
"""Of the chains' best partners in a round, the share that is joined before all are weighed again."""
LONGEST_REACH = 4


class PackedLoads(Sequence[NDArray[np.integer]]):
    """Loads in one array. A small array for each token, made while the model's large ones come and go, would keep the
    memory of those from being used again: gigabytes for a few megabytes of ids."""

    def __init__(self, parts: Loads = ()) -> None:
        self._sizes = [np.array([len(ids) for ids in parts], np.int64)]
        self._flat = [np.concatenate(parts)] if len(parts) else []
        self._whole: tuple[NDArray[np.integer], NDArray[np.int64]] | None = None

    def extend(self, parts: Loads) -> None:
        """Add tokens; copied."""
        more = PackedLoads(parts)
        self._sizes += more._sizes
        self._flat += more._flat
        self._whole = None

    def __len__(self) -> int:
        return sum(map(len, self._sizes))

    def __getitem__(self, at: Any) -> Any:
        flat, ends = self._packed()
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        return flat[ends[at] : ends[at + 1]]

    def _packed(self) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        if self._whole is None:
            self._flat = [np.concatenate(self._flat)] if self._flat else [np.zeros(0, np.int64)]
            self._sizes = [np.concatenate(self._sizes)]
            self._whole = self._flat[0], np.concatenate([[0], np.cumsum(self._sizes[0])])
        return self._whole


def loads_of(uses: Loads, window: int) -> list[NDArray[np.integer]]:
    """The neurons that each token loads, from those that it uses: none of the `window` tokens before it used them."""
    return [ids[gap > window] for ids, gap in zip(uses, gaps(uses), strict=True)]


def co_loads(loads: Loads, d_ff: int) -> NDArray[np.float32]:
    """How many tokens load both of two neurons, float32 [d_ff, d_ff]; how many load each, on the diagonal.

    Exact up to 2**24 tokens. Memory: the result and a block of tokens.
    """
    counts = np.zeros((d_ff, d_ff), np.float32)
    for first in range(0, len(loads), BLOCK_TOKENS):
        block = loads[first : first + BLOCK_TOKENS]
        mask = np.zeros((len(block), d_ff), np.float32)
        for token, ids in enumerate(block):
            mask[token, ids] = 1.0
        counts += mask.T @ mask
    return counts


def own(counts: NDArray[np.float32]) -> Order:
    """The model's own order."""
    return np.arange(len(counts), dtype=np.int32)


def shuffled(counts: NDArray[np.float32], seed: int = 0) -> Order:
    """A random order: what an order that knows nothing gives."""
    return np.random.default_rng(seed).permutation(len(counts)).astype(np.int32)


def by_frequency(counts: NDArray[np.float32]) -> Order:
    """The most often loaded first."""
    return np.argsort(-np.diag(counts), kind="stable").astype(np.int32)


def spectral(counts: NDArray[np.float32]) -> Order:
    """By the Fiedler vector of the normalised co-load graph. O(d_ff cubed): for some thousand neurons."""
    weights = counts.astype(np.float64)
    np.fill_diagonal(weights, 0.0)
    scale = 1.0 / np.sqrt(weights.sum(1) + 1e-9)
    vectors = np.linalg.eigh(weights * scale[:, None] * scale)[1]
    fiedler = vectors[:, -2] * scale if len(weights) > 1 else vectors[:, -1]
    # the sign of an eigenvector is arbitrary: the same input gives the same order
    return np.argsort(fiedler * (np.sign(fiedler[np.abs(fiedler).argmax()]) or 1.0), kind="stable").astype(np.int32)


def bisection(counts: NDArray[np.float32], seed: int = 0, least: int = 4) -> Order:
    """Halved again and again by a few steps of power iteration on each half's co-load graph; parts of `least` stay."""
    generator = np.random.default_rng(seed)

    def halve(ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        if len(ids) <= least:
            return [ids]
        weights = counts[np.ix_(ids, ids)]
        np.fill_diagonal(weights, 0.0)
        scale = 1.0 / np.sqrt(weights.sum(1) + 1e-6)
        weights *= scale[:, None] * scale
        first = 1.0 / scale / np.linalg.norm(1.0 / scale)  # the known first eigenvector, taken out at every step
        vector = generator.standard_normal(len(ids)).astype(np.float32)
        for _ in range(30):
            vector = weights @ vector + vector
            vector -= first * (first @ vector)
            vector /= np.linalg.norm(vector) + 1e-12
        ids = ids[np.argsort(vector * scale, kind="stable")]
        return halve(ids[: len(ids) // 2]) + halve(ids[len(ids) // 2 :])

    return np.concatenate(halve(np.arange(len(counts)))).astype(np.int32)


def chains(counts: NDArray[np.float32], reach: int = 1, progress: Callable[[int, int], None] | None = None) -> Order:
    """Chains of neurons that grow by joining the two ends that are loaded together most, until one is left.

    `reach`: two neurons count as neighbours up to so many places apart, which suits a reader that also merges across
    a gap of `reach - 1` records; an end is then weighed by its last `reach` neurons. 1 is the greedy chain: the
    neighbours' co-loads alone. Deterministic. progress(joined, to be joined).
    """
    d_ff = len(counts)
    pieces = [[i] for i in range(d_ff)]
    while len(pieces) > 1:
        pairs, score = _partners(counts, _ends(pieces, reach), len(pieces))
        rank = np.argsort(-score, kind="stable")
        pieces = _join(pieces, pairs[rank], max(1, int(JOINED_SHARE * len(pieces))))
        if progress:
            progress(d_ff - len(pieces), d_ff - 1)
    return np.array(pieces[0], np.int32)


def _ends(pieces: list[list[int]], reach: int) -> NDArray[np.int64]:
    """Neurons from each end inwards, int64 [2 * pieces, reach], -1 beyond the chain: 2i its tail, 2i+1 its head."""
    ends = np.full((2 * len(pieces), reach), -1, np.int64)
    for i, piece in enumerate(pieces):
        tail = piece[: -reach - 1 : -1]
        ends[2 * i, : len(tail)] = tail
        ends[2 * i + 1, : len(tail)] = piece[:reach]
    return ends


def _partners(
    counts: NDArray[np.float32], ends: NDArray[np.int64], pieces: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The best other end for each end: pairs of ends [2 * pieces, 2], and the mean co-load across the joint."""
    outer, count = ends[:, 0], len(ends)
    width = min(CANDIDATES, count - 2)
    best, score = np.empty(count, np.int64), np.empty(count)
    rows = max(1, (64 << 20) // (4 * count))
    for first in range(0, count, rows):
        own_ends = np.arange(first, min(first + rows, count))
        near = counts[np.ix_(outer[own_ends], outer)]
        for side in (0, 1):  # an end never joins its own chain
            near[np.arange(len(own_ends)), own_ends // 2 * 2 + side] = -1.0
        found = np.argpartition(-near, width - 1, axis=1)[:, :width]
        total, pairs = np.zeros(found.shape), np.zeros(found.shape)
        for a in range(ends.shape[1]):
            for b in range(ends.shape[1] - a):
                here, there = ends[own_ends, a][:, None], ends[found, b]
                both = (here >= 0) & (there >= 0)
                total += np.where(both, counts[here, there], 0.0)
                pairs += both
        total /= pairs
        pick = total.argmax(1)
        best[own_ends], score[own_ends] = found[np.arange(len(own_ends)), pick], total.max(1)
    return np.stack([np.arange(count), best], axis=1), score


def _join(pieces: list[list[int]], pairs: NDArray[np.int64], most: int) -> list[list[int]]:
    """Join pairs of ends, the first given first, each chain at most once and `most` pairs in all."""
    left: list[list[int] | None] = list(pieces)
    touched: set[int] = set()
    joined: list[list[int]] = []
    for one, other in pairs.tolist():
        i, j = one // 2, other // 2
        if i in touched or j in touched:
            continue
        touched |= {i, j}
        head = pieces[i] if one % 2 == 0 else pieces[i][::-1]
        tail = pieces[j] if other % 2 == 1 else pieces[j][::-1]
        joined.append(head + tail)
        left[i] = left[j] = None
        if len(joined) == most:
            break
    return joined + [piece for piece in left if piece is not None]


METHODS: dict[str, Callable[..., Order]] = {
    "own": own,
    "shuffled": shuffled,
    "frequency": by_frequency,
    "spectral": spectral,
    "bisection": bisection,
    "chain": chains,
    "clusters": chains,
}
"""By name. `chain` is `chains` with reach 1, `clusters` with the reach of the reader's gap."""


def place_layer(
    method: str, counts: NDArray[np.float32], *, reach: int = 1, seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Order:  # fmt: skip
    """The order that a method of METHODS gives to one layer's co-loads. ValueError for another name."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(METHODS)}")
    if method in ("chain", "clusters"):
        return chains(counts, 1 if method == "chain" else reach, progress)
    return METHODS[method](counts, seed) if method in ("shuffled", "bisection") else METHODS[method](counts)


@dataclass(frozen=True)
class Flash:
    """How records lie and how they are read, in bytes: `stride` from a record to the next in a region that starts
    aligned, `length` asked of each, `gap` between requests that are still merged (-1: none are), `chunk` of the longest
    read, `align`, the unit of direct reads."""

    stride: int
    length: int
    gap: int
    chunk: int = 1 << 20
    align: int = ALIGNMENT

    @property
    def reach(self) -> int:
        """Places apart that two records may be and still be merged, at least 1 and at most LONGEST_REACH."""
        return int(np.clip(1 + self.gap // self.stride, 1, LONGEST_REACH))


def reads(loads: Loads, order: Order, flash: Flash) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What the reader does for each token when the neurons lie in `order`: (reads, bytes), int64 [tokens] each.

    Equal to `plan_reads` for each token.
    """
    token, where, begins, spans = _runs(loads, order, flash)
    owner = token[begins]
    count = np.bincount(owner, minlength=len(loads))
    nbytes = np.bincount(owner, weights=spans, minlength=len(loads)).astype(np.int64)
    # A run longer than a read may be is cut where the reader cuts it: rare, so the reader's own plan decides.
    for at in np.unique(owner[spans > flash.chunk]):
        own_places = where[token == at]
        plan = plan_reads(
            own_places * flash.stride, np.full(len(own_places), flash.length), flash.gap, flash.chunk, flash.align
        )
        count[at], nbytes[at] = len(plan), sum(size for _, size in plan)
    return count.astype(np.int64), nbytes


def run_lengths(loads: Loads, order: Order, flash: Flash) -> NDArray[np.int64]:
    """How many neurons come together: int64 [longest + 1], over all tokens, the runs by their number of neurons.

    A run is what one read brings, however long.
    """
    token, _, begins, _ = _runs(loads, order, flash)
    return np.bincount(np.diff(np.append(begins, len(token))), minlength=1)


def _runs(loads: Loads, order: Order, flash: Flash) -> tuple[NDArray[np.int64], ...]:
    """(token, position) of each load, as the reader takes them, and the first load and the bytes of each run."""
    sizes = np.array([len(ids) for ids in loads], np.int64)
    token = np.repeat(np.arange(len(loads)), sizes)
    where = positions(order)[np.concatenate([np.zeros(0, np.int64), *loads]).astype(np.int64)]
    rank = np.lexsort((where, token))
    token, where = token[rank], where[rank]
    start = where * flash.stride // flash.align * flash.align
    end = -(-(where * flash.stride + flash.length) // flash.align) * flash.align
    first = np.ones(len(where), bool)
    if flash.gap >= 0:
        first[1:] = (token[1:] != token[:-1]) | (start[1:] - end[:-1] > flash.gap)
    begins = np.flatnonzero(first)
    spans = end[np.append(begins[1:], len(where)) - 1] - start[begins] if len(begins) else np.zeros(0, np.int64)
    return token, where, begins, spans


def positions(order: Order) -> NDArray[np.int64]:
    """Where each neuron lies: the inverse of an order, int64 [d_ff]."""
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.arange(len(order))
    return inverse
