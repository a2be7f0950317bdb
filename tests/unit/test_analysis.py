"""Reuse and sparsity against brute force over sets."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.analysis.reuse import aggregated_use, gaps, ids_of, kept, new_per_token, reuse
from workbench.analysis.sparsity import usage, usage_of, zeros, zeros_by_layer, zeros_by_place, zeros_spread

D_FF = 40


def activity(seed: int, tokens: int = 30, share: float = 0.15) -> np.ndarray:
    """Correlated from token to token, with a token without any active neuron."""
    rng = np.random.default_rng(seed)
    rows = rng.random((tokens, D_FF)) < share
    rows[1:] |= rows[:-1] & (rng.random((tokens - 1, D_FF)) < 0.5)
    rows[tokens // 2] = False
    return rows


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [0, 1, 3, 8, 50])
def test_new_and_kept_equal_sets(seed: int, window: int) -> None:
    uses = ids_of(activity(seed))
    sets = [set(ids.tolist()) for ids in uses]
    new, held = new_per_token(uses, window), kept(uses, window)
    for t, now in enumerate(sets):
        before = set().union(*sets[max(0, t - window) : t])
        assert new[t] == len(now - before)
        assert held[t] == len(now | before)


@pytest.mark.parametrize("seed", range(3))
def test_aggregated_use_equals_sets(seed: int) -> None:
    uses = ids_of(activity(seed))
    sets = [set(ids.tolist()) for ids in uses]
    curve = aggregated_use(uses, len(uses))
    assert curve[0] == 0
    for k in range(1, len(uses) + 1):
        places = [len(set().union(*sets[t : t + k])) for t in range(len(uses) - k + 1)]
        assert curve[k] == pytest.approx(np.mean(places), abs=1e-12)


def test_gaps_say_how_long_ago() -> None:
    uses = [np.array([0, 2]), np.array([2]), np.array([0, 1])]
    never = np.iinfo(np.int64).max
    assert [g.tolist() for g in gaps(uses)] == [[never, never], [1], [2, never]]


def test_reuse_of_a_layer_and_its_limits() -> None:
    uses = ids_of(activity(1))
    (only,) = reuse(uses, D_FF, [4])
    assert only.new == pytest.approx(new_per_token(uses, 4)[4:].mean())
    assert only.kept_share == pytest.approx(kept(uses, 4)[4:].mean() / D_FF)
    with pytest.raises(ValueError, match="too few"):
        reuse(uses, D_FF, [30])
    with pytest.raises(ValueError, match="negative"):
        kept(uses, -1)
    with pytest.raises(ValueError, match="longest"):
        aggregated_use(uses, 31)


def test_ids_round_trip() -> None:
    mask = activity(2)
    back = np.zeros_like(mask)
    for t, ids in enumerate(ids_of(mask)):
        assert ids.dtype == np.int32
        back[t, ids] = True
    assert np.array_equal(back, mask)
    assert ids_of(np.zeros((0, D_FF), dtype=bool)) == []


def test_zeros() -> None:
    mask = activity(3)
    assert zeros(mask) == pytest.approx(1 - mask.mean())
    assert zeros(np.where(mask, 0.5, 0.0)) == zeros(mask)
    layers = [ids_of(mask), ids_of(~mask)]
    assert zeros_by_layer(layers, D_FF) == pytest.approx([1 - mask.mean(), mask.mean()])
    with pytest.raises(ValueError, match="no activations"):
        zeros(np.zeros((0, D_FF)))
    with pytest.raises(ValueError, match="no activations"):
        zeros_by_layer([[]], D_FF)


def test_usage_of_neurons() -> None:
    mask = np.zeros((10, 20), dtype=bool)
    mask[:, 3] = True
    mask[:5, 4] = True
    mask[0, 5] = True
    found = usage(ids_of(mask), 20)
    assert found.frequency[[3, 4, 5, 6]] == pytest.approx([1.0, 0.5, 0.1, 0.0])
    assert found.never == 17
    assert found.top_tenth == pytest.approx(15 / 16)
    assert usage(ids_of(np.ones((4, 20), dtype=bool)), 20).top_tenth == pytest.approx(0.1)


def test_spread_of_zeros_over_tokens() -> None:
    counts = np.array([0, 10, 20, 30, 40])
    found = zeros_spread(counts, 40)
    assert found.mean == pytest.approx(0.5)
    assert found.quantiles == pytest.approx(np.percentile(1 - counts / 40, [5, 25, 50, 75, 95]))
    with pytest.raises(ValueError, match="no activations"):
        zeros_spread(np.empty(0), 40)


@pytest.mark.parametrize("places", [1, 2, 7, 8])
def test_zeros_by_place_take_each_place_once(places: int) -> None:
    counts = np.random.default_rng(places).integers(0, 40, (3, 5, places))
    found = zeros_by_place(counts, 40)
    assert [p for part in found for p in range(part.first, part.last + 1)] == list(range(places))
    assert [part.first for part in found] == [0, 1, 2, 4][: len(found)]
    for part in found:
        own = 1 - counts[:, :, part.first : part.last + 1] / 40
        assert part.zeros.mean == pytest.approx(own.mean())
    with pytest.raises(ValueError, match="stretches"):
        zeros_by_place(counts[0], 40)


def test_usage_from_counts_alone() -> None:
    mask = activity(4)
    own, counted = usage(ids_of(mask), D_FF), usage_of(mask.sum(axis=0), len(mask))
    assert np.array_equal(own.frequency, counted.frequency)
    assert (own.never, own.top_tenth) == (counted.never, counted.top_tenth)
