"""Pair counts against brute force, the native counter and its numpy twin; closest friends; bundles of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from workbench.analysis.bundles import FriendBundles, bundle_cost
from workbench.analysis.coactivation import (
    NativePairs,
    PairCounter,
    ReferencePairs,
    popularity,
    power_law,
    rank_curve,
    rank_places,
    summarise,
)

KINDS: dict[str, Callable[[np.ndarray, np.ndarray, int], PairCounter]] = {
    "native": NativePairs,
    "reference": ReferencePairs,
}


def layer(
    seed: int, tokens: int, d_ff: int, share: float, dtype: type = np.uint16
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mask, ids, offsets): hot and cold neurons, one that always fires, one that never does, tokens without any."""
    rng = np.random.default_rng(seed)
    mask = rng.random((tokens, d_ff)) < rng.beta(0.6, 0.6 / share, d_ff)
    mask[:, rng.integers(d_ff)] = True
    mask[:, rng.integers(d_ff)] = False
    mask[:: max(2, tokens // 3)] = False
    token, ids = np.nonzero(mask)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(token, minlength=tokens))]).astype(np.int64)
    return mask, ids.astype(dtype), offsets


SHAPES = [(0, 1, 5, 0.3), (1, 40, 33, 0.1), (2, 63, 64, 0.5), (3, 300, 130, 0.05), (4, 2100, 70, 0.4), (5, 257, 1, 0.5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_counts_equal_brute_force(kind: str, shape: tuple[int, int, int, float], dtype: type) -> None:
    mask, ids, offsets = layer(*shape, dtype)
    expected = mask.T.astype(np.int64) @ mask.astype(np.int64)
    d_ff = shape[2]
    counter = KINDS[kind](ids, offsets, d_ff)
    assert np.array_equal(counter.rows(0, d_ff), expected)
    middle = counter.rows(d_ff // 3, d_ff // 2, threads=2)
    assert middle.shape == (d_ff // 2 - d_ff // 3, d_ff)
    assert np.array_equal(middle, expected[d_ff // 3 : d_ff // 2])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("friends", [1, 8, 40])
def test_summary_equals_the_twin(shape: tuple[int, int, int, float], friends: int) -> None:
    _, ids, offsets = layer(*shape)
    d_ff = shape[2]
    friends = min(friends, d_ff)
    found = summarise(NativePairs(ids, offsets, d_ff), d_ff, friends, block=50, threads=3)
    expected = summarise(ReferencePairs(ids, offsets, d_ff), d_ff, friends, block=7)
    for name in ("friends", "friend_counts", "rank_counts", "totals", "pairs"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.pairs.sum() == d_ff * (d_ff - 1)


def test_more_tokens_than_sixteen_bits_count() -> None:
    tokens = (1 << 16) + 5
    ids = np.tile(np.array([0, 2], np.uint16), tokens)
    counter = NativePairs(ids, np.arange(0, 2 * tokens + 1, 2, dtype=np.int64), 3)
    assert counter.rows(0, 3).tolist() == [[tokens, 0, tokens], [0, 0, 0], [tokens, 0, tokens]]


@pytest.mark.parametrize(
    ("ids", "offsets", "d_ff"),
    [
        ([3], [0, 1], 3),
        ([1, 1], [0, 2], 3),
        ([2, 1], [0, 2], 3),
        ([0], [0, 2], 3),
        ([0, 1], [0, 2, 1], 3),
        ([0, 1], [1, 2], 3),
        ([], [], 3),
        ([], [0], 0),
    ],
)
def test_what_does_not_fit_is_refused(ids: list[int], offsets: list[int], d_ff: int) -> None:
    with pytest.raises(ValueError, match="coactivation"):
        NativePairs(np.array(ids, np.uint16), np.array(offsets, np.int64), d_ff)


def test_wrong_types_and_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="uint16"):
        NativePairs(np.zeros(1, np.float32), np.array([0, 1], np.int64), 4)
    counter = NativePairs(np.zeros(1, np.uint16), np.array([0, 1], np.int64), 4)
    for begin, end in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="rows"):
            counter.rows(begin, end)
    with pytest.raises(ValueError, match="ranks"):
        counter.summarise(0, 4, 1, np.array([1, 4]))
    with pytest.raises(ValueError, match="friends"):
        counter.summarise(0, 4, 0, np.array([1]))


def test_counts_do_not_rest_on_the_callers_arrays() -> None:
    ids, offsets = np.array([0, 1, 1], np.uint16), np.array([0, 2, 3], np.int64)
    counter = NativePairs(ids, offsets, 2)
    ids[:], offsets[:] = 60_000, 1 << 40
    assert counter.rows(0, 2).tolist() == [[1, 1], [1, 2]]


def test_progress_comes_between_blocks() -> None:
    _, ids, offsets = layer(0, 20, 100, 0.2)
    seen: list[tuple[int, int]] = []
    summarise(NativePairs(ids, offsets, 100), 100, block=40, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(40, 100), (80, 100), (100, 100)]


def test_rank_curve_and_its_power_law() -> None:
    mask, ids, offsets = layer(7, 200, 60, 0.2)
    counts = mask.T.astype(int) @ mask.astype(int)
    frequency = mask.sum(axis=0)
    ranks = rank_places(60)
    assert ranks[0] == 1
    assert ranks[-1] == 59
    curve = rank_curve(summarise(NativePairs(ids, offsets, 60), 60, ranks=ranks), frequency)
    rows = [sorted(np.delete(counts[i], i))[::-1] / frequency[i] for i in range(60) if frequency[i]]
    assert curve == pytest.approx(np.mean(rows, axis=0)[ranks - 1])
    places = rank_places(4096)
    law = power_law(places, 0.3 * places.astype(float) ** -0.7)
    assert law is not None
    assert (law.exponent, law.scale, law.r2) == pytest.approx((0.7, 0.3, 1.0))
    assert power_law(np.array([1, 2]), np.array([0.1, 0.2])) is None


def test_popularity_of_closest_friends() -> None:
    frequency = np.array([9, 1, 1, 8, 0, 2])
    found = popularity(np.array([3, 0, 0, 0, -1, 3]), frequency, hottest=1 / 6)
    assert found.by_place.tolist() == [3, 2]
    assert (found.with_friend, found.hot) == (5, 3)


@pytest.mark.parametrize("seed", range(30))
def test_the_fewest_bundles_are_the_fewest(seed: int) -> None:
    """Against every set of bundles, those of unwanted neurons too."""
    rng = np.random.default_rng(seed)
    d_ff = 9
    friend = np.array([rng.choice([-1, *(j for j in range(d_ff) if j != i)]) for i in range(d_ff)])
    bundles = FriendBundles(friend)
    for _ in range(4):
        wanted = np.flatnonzero(rng.random(d_ff) < 0.6)
        chosen = bundles.fewest(wanted)
        assert set(wanted) <= set(bundles.delivered(chosen).tolist())
        covers = [{i, int(friend[i])} for i in range(d_ff)]
        least = next(
            size
            for size in range(d_ff + 1)
            if any(
                set(wanted.tolist()) <= set().union(*(covers[i] for i in own))
                for own in itertools.combinations(range(d_ff), size)
            )
        )
        assert len(chosen) == least


def test_cost_of_bundles() -> None:
    friend = np.array([1, 0, 0, 0])
    # 2 and 3 bring 0 along; the hot neuron is delivered twice, and single records would have read 3
    cost = bundle_cost([np.array([0, 2, 3])], friend, 0)
    assert (cost.bytes_ratio, cost.duplicates, cost.all_duplicates) == pytest.approx((4 / 3, 1 / 4, 2 / 6))
    # pairs that always fire together: half of the reads, the same bytes, nothing twice
    cost = bundle_cost([np.array([0, 1])], friend, 0)
    assert (cost.bytes_ratio, cost.duplicates) == (1.0, 0.0)
    # within a window, 0 is there already when 2 and then 3 come
    uses = [np.array([0, 1]), np.array([2]), np.array([3])]
    cost = bundle_cost(uses, friend, 4)
    assert cost.bytes_ratio == pytest.approx((2 + 2 + 2) / 4)
    assert cost.duplicates == pytest.approx(2 / 6)
    assert bundle_cost(uses, friend, 4, sequence=1).duplicates == 0.0
    with pytest.raises(ValueError, match="no token"):
        bundle_cost([np.empty(0, np.int64)], friend, 0)
