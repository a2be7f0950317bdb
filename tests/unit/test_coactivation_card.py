"""Pair counts by matrix products: on torch's CPU device everywhere, on a card where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_coactivation import SHAPES, layer

from workbench.analysis.coactivation import ReferencePairs, summarise
from workbench.analysis.coactivation_cuda import CHUNK, CudaPairs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.device)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("friends", [1, 8, 40])
def test_summary_equals_the_twin(device: str, shape: tuple[int, int, int, float], friends: int) -> None:
    _, ids, offsets = layer(*shape)
    d_ff = shape[2]
    friends = min(friends, d_ff)
    counter, twin = CudaPairs(ids, offsets, d_ff, device), ReferencePairs(ids, offsets, d_ff)
    assert np.array_equal(counter.rows(0, d_ff), twin.counts)
    found, expected = summarise(counter, d_ff, friends, block=50), summarise(twin, d_ff, friends, block=7)
    for name in ("friends", "friend_counts", "rank_counts", "totals", "pairs"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_chunks_count_exactly(device: str) -> None:
    """Pairs that fire together in every token of several chunks, ending inside one."""
    tokens = 2 * CHUNK + 7
    ids = np.tile(np.array([1, 4], np.uint16), tokens)
    found = CudaPairs(ids, np.arange(0, 2 * tokens + 1, 2, dtype=np.int64), 6, device).rows(0, 6)
    assert found[1, 4] == found[4, 1] == found[1, 1] == tokens
    assert found.sum() == 4 * tokens
