"""Orders of neurons: permutations that find planted clusters, and a cost that is the reader's own plan."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.analysis import placement as orders
from workbench.analysis.placement import Flash
from workbench.flash.reader import plan_reads


def planted(seed: int, groups: int = 24, size: int = 8, tokens: int = 600) -> tuple[list[np.ndarray], np.ndarray]:
    """Loads of neurons that come in groups, shuffled over the ids; the group of each neuron."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(groups), size))
    loads = []
    for _ in range(tokens):
        chosen = np.isin(group, rng.choice(groups, 2, replace=False)) & (rng.random(len(group)) < 0.8)
        loads.append(np.flatnonzero(chosen | (rng.random(len(group)) < 0.01)).astype(np.int32))
    return loads, group


def test_packed_loads_are_the_list_of_loads() -> None:
    loads, group = planted(3, tokens=50)
    packed = orders.PackedLoads(loads[:20])
    packed.extend(loads[20:])
    packed.extend([])
    assert len(packed) == 50
    assert all(np.array_equal(a, b) for a, b in zip(packed, loads, strict=True))
    assert [ids.tolist() for ids in packed[45:]] == [ids.tolist() for ids in loads[45:]]
    assert np.array_equal(packed[-1], loads[-1])
    with pytest.raises(IndexError):
        packed[50]
    counts = orders.co_loads(packed, len(group))
    assert np.array_equal(counts, orders.co_loads(loads, len(group)))
    flash = Flash(4096, 4096, 4096)
    found = (orders.reads(given, orders.own(counts), flash) for given in (packed, loads))
    for ours, theirs in zip(*found, strict=True):
        assert np.array_equal(ours, theirs)
    assert len(orders.PackedLoads()) == 0


@pytest.mark.parametrize("method", orders.METHODS)
def test_every_method_gives_a_permutation_and_the_same_one_again(method: str) -> None:
    loads, group = planted(0)
    counts = orders.co_loads(loads, len(group))
    first, again = (orders.place_layer(method, counts, reach=3, seed=5) for _ in range(2))
    assert first.dtype == np.int32
    assert np.array_equal(np.sort(first), np.arange(len(group)))
    assert np.array_equal(first, again)


@pytest.mark.parametrize("method", orders.METHODS)
@pytest.mark.parametrize("d_ff", [1, 2, 3, 5])
def test_methods_on_few_neurons_and_on_none_that_is_loaded(method: str, d_ff: int) -> None:
    for counts in (np.zeros((d_ff, d_ff), np.float32), np.ones((d_ff, d_ff), np.float32)):
        assert np.array_equal(np.sort(orders.place_layer(method, counts, reach=3)), np.arange(d_ff))


@pytest.mark.parametrize("method", ["chain", "clusters", "bisection"])
def test_planted_clusters_are_found(method: str) -> None:
    loads, group = planted(1)
    test, _ = planted(1, tokens=900)
    counts = orders.co_loads(loads, len(group))
    order = orders.place_layer(method, counts, reach=3)
    if method != "bisection":  # whose halves may part a group
        borders = np.count_nonzero(np.diff(group[order]))
        assert borders == group.max()
    flash = Flash(4096, 4096, 0)
    placed, own = (orders.reads(test[600:], o, flash)[0].mean() for o in (order, orders.own(counts)))
    assert placed < 0.55 * own


def test_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'magic' is not one of own"):
        orders.place_layer("magic", np.zeros((2, 2), np.float32))


def test_progress_ends_at_the_last_joint() -> None:
    loads, group = planted(2)
    seen: list[tuple[int, int]] = []
    orders.chains(orders.co_loads(loads, len(group)), 2, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(group) - 1, len(group) - 1)
    assert seen == sorted(seen)


def test_co_loads_count_tokens() -> None:
    rng = np.random.default_rng(3)
    mask = rng.random((orders.BLOCK_TOKENS + 17, 40)) < 0.2
    loads = [np.flatnonzero(row).astype(np.uint16) for row in mask]
    assert np.array_equal(orders.co_loads(loads, 40), mask.astype(int).T @ mask.astype(int))


def test_loads_are_what_the_window_lacks() -> None:
    uses = [np.array(ids, np.int32) for ids in ([1, 2], [2, 3], [1, 3], [], [2])]
    found = [ids.tolist() for ids in orders.loads_of(uses, 1)]
    assert found == [[1, 2], [3], [1], [], [2]]
    assert [ids.tolist() for ids in orders.loads_of(uses, 3)] == [[1, 2], [3], [], [], []]


@pytest.mark.parametrize(("stride", "length"), [(8192, 6912), (4096, 4096), (2048, 1536), (1024, 1000), (64, 64)])
@pytest.mark.parametrize("gap", [-1, 0, 4096, 16384])
@pytest.mark.parametrize("chunk", [4096, 16384, 1 << 20])
def test_cost_is_the_readers_plan(stride: int, length: int, gap: int, chunk: int) -> None:
    rng = np.random.default_rng(stride + gap + chunk)
    order = rng.permutation(300).astype(np.int32)
    place = orders.positions(order)
    sizes = [0, 1, 300, *rng.integers(1, 120, 12)]
    loads = [np.sort(rng.choice(300, size, replace=False)) for size in sizes]
    reads, nbytes = orders.reads(loads, order, Flash(stride, length, gap, chunk))
    for token, ids in enumerate(loads):
        plan = plan_reads(place[ids] * stride, np.full(len(ids), length), gap, chunk)
        assert (reads[token], nbytes[token]) == (len(plan), sum(size for _, size in plan))


def test_nothing_loaded_costs_nothing() -> None:
    order = np.arange(8, dtype=np.int32)
    for loads in ([], [np.zeros(0, np.int32)] * 3):
        reads, nbytes = orders.reads(loads, order, Flash(4096, 4096, 0))
        assert reads.tolist() == nbytes.tolist() == [0] * len(loads)
        assert orders.run_lengths(loads, order, Flash(4096, 4096, 0)).sum() == 0


def test_run_lengths_count_every_loaded_neuron() -> None:
    order = np.array([3, 0, 1, 2, 4, 5], np.int32)
    loads = [np.array([0, 1, 3]), np.array([2, 5]), np.array([4])]
    assert orders.run_lengths(loads, order, Flash(4096, 4096, 0)).tolist() == [0, 3, 0, 1]
    assert orders.run_lengths(loads, order, Flash(4096, 4096, 4096)).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("stride", "gap", "reach"), [(8192, 16384, 3), (4096, 0, 1), (4096, 1 << 20, 4), (65536, 16384, 1), (4096, -1, 1)]
)
def test_reach_is_what_the_gap_spans(stride: int, gap: int, reach: int) -> None:
    assert Flash(stride, stride, gap).reach == reach
