"""The cost model: pure functions of counts, against figures worked out by hand and reads as the reader plans them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.experiments.calibrate import (
    CALLS_A_PASS,
    PROBE_CALLS,
    PROBE_CHUNKS,
    PROBE_DEPTHS,
    _few_reads,
    _non_negative,
    _rate,
    measure_flash,
)
from workbench.experiments.cost import (
    ComputeFit,
    Counts,
    FlashCall,
    FlashFit,
    FlashPoint,
    ReadCalls,
    Reuse,
    copied,
    scattered_calls,
    sequential_calls,
    token_cost,
)
from workbench.flash.layout import RecordLayout
from workbench.flash.reader import plan_reads
from workbench.spec import ModelSpec, RunSpec

KIB, MIB = 1 << 10, 1 << 20
FLASH = FlashFit(
    "a drive with 100 us alone; 10 us and 1 GiB/s when its queue is full",
    "threads",
    tuple(
        FlashPoint(depth, size, seconds + size / 2**30)
        for depth, seconds in ((1, 1e-4), (8, 2e-5), (32, 1e-5))
        for size in (4 * KIB, 64 * KIB, MIB)
    ),
)
COMPUTE = ComputeFit(
    threads=2,
    dtype="float32",
    linear_bytes_per_s=10e9,
    sparse_ffn_bytes_per_s=5e9,
    dense_ffn_bytes_per_s=8e9,
    predictor_bytes_per_s=4e9,
    attention_bytes_per_s=2e9,
    copy_bytes_per_s=4e9,
    base_s=1e-3,
    layer_s={"streamed": 4e-4, "dense": 3e-4, "sparse": 2e-4},
    predictor_call_s=1e-5,
    fetch_call_s=2e-5,
    fetch_neuron_s=1e-7,
    slots_call_s=1e-5,
    slots_neuron_s=1e-8,
    slots_change_s=1e-7,
)
SPEC = ModelSpec("opt", 4, 512, 2048, 1000, "relu", 512)
PUBLISHED = Reuse("the paper", 0.10, ((0, 0.10, 0.10), (4, 0.24, 0.024)))


def test_a_read_that_was_measured_takes_what_it_took() -> None:
    for point in FLASH.points:
        assert FLASH.read_seconds(point.chunk_bytes, point.depth) == pytest.approx(point.seconds)


def test_reads_between_and_beyond_what_was_measured() -> None:
    between = FLASH.read_seconds(16 * KIB, 32)
    assert FLASH.read_seconds(4 * KIB, 32) < between < FLASH.read_seconds(64 * KIB, 32)
    assert FLASH.read_seconds(4 * MIB, 32) == pytest.approx(4 * FLASH.read_seconds(MIB, 32))
    assert FLASH.read_seconds(512, 32) == FLASH.read_seconds(4 * KIB, 32)
    assert FLASH.read_seconds(4 * KIB, 8) > FLASH.read_seconds(4 * KIB, 16) > FLASH.read_seconds(4 * KIB, 32)


def test_a_call_takes_the_first_read_and_then_what_each_adds() -> None:
    first, full, at_8 = (FLASH.read_seconds(4 * KIB, depth) for depth in (1, 32, 8))
    assert FLASH.batch_seconds(0, 4 * KIB, 32) == 0
    assert FLASH.batch_seconds(1, 4 * KIB, 32) == pytest.approx(first)
    assert FLASH.batch_seconds(11, 4 * KIB, 32) == pytest.approx(first + 10 * full)
    assert FLASH.batch_seconds(100, 4 * KIB, 8) == pytest.approx(first + 7 * full + 92 * at_8)
    assert FLASH.batch_seconds(0.5, 4 * KIB, 32) == pytest.approx(first / 2)


def test_calls_of_few_reads_take_what_such_calls_took() -> None:
    calls = tuple(FlashCall(n, size, 2e-4 + n * size / 2**31) for n in (1, 4, 16) for size in (4 * KIB, MIB))
    fit = dataclasses.replace(FLASH, calls=calls)
    for call in calls:
        assert fit.batch_seconds(call.reads, call.chunk_bytes, 32) == pytest.approx(call.seconds)
    assert fit.batch_seconds(4, MIB, 32) < fit.batch_seconds(6, MIB, 32) < fit.batch_seconds(16, MIB, 32)
    assert fit.batch_seconds(4, 2 * MIB, 32) == pytest.approx(2 * fit.batch_seconds(4, MIB, 32))
    assert fit.batch_seconds(0.5, MIB, 32) == pytest.approx(fit.batch_seconds(1, MIB, 32) / 2)
    assert fit.batch_seconds(0, MIB, 32) == 0


def test_reads_that_do_not_fit_the_queue_come_at_its_rate() -> None:
    calls = tuple(FlashCall(n, 4 * KIB, 1e-4 * n**0.5) for n in (1, 4, 16))
    fit = dataclasses.replace(FLASH, calls=calls)
    deep, shallow = FLASH.read_seconds(4 * KIB, 32), FLASH.read_seconds(4 * KIB, 4)
    assert fit.batch_seconds(100, 4 * KIB, 32) == pytest.approx(4e-4 + 84 * deep)
    assert fit.batch_seconds(100, 4 * KIB, 4) == pytest.approx(2e-4 + 96 * shallow)
    assert fit.batch_seconds(3, 4 * KIB, 4) == fit.batch_seconds(3, 4 * KIB, 32)


@pytest.mark.parametrize("broken", [FlashCall(0, 4096, 1e-4), FlashCall(1, 0, 1e-4), FlashCall(1, 4096, 0.0)])
def test_calls_that_cannot_be_are_refused(broken: FlashCall) -> None:
    with pytest.raises(ValueError, match="calls"):
        dataclasses.replace(FLASH, calls=(broken,))


def test_fits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="points"):
        FlashFit("", "threads", ())
    with pytest.raises(ValueError, match="points"):
        FlashFit("", "threads", (FlashPoint(1, 4096, 0.0),))
    with pytest.raises(ValueError, match="linear_bytes_per_s"):
        dataclasses.replace(COMPUTE, linear_bytes_per_s=0)
    with pytest.raises(ValueError, match="dense_layer_s"):
        dataclasses.replace(COMPUTE, layer_s={"streamed": 0.0, "dense": -1.0, "sparse": 0.0})
    with pytest.raises(ValueError, match="used"):
        Reuse("", 1.0, ((0, 1.0, 1.0),))
    with pytest.raises(ValueError, match="kept and new"):
        Reuse("", 0.1, ((4, 0.2, 0.3),))


COUNTS = Counts(
    layers=4,
    reads=(ReadCalls(4, 11, 4 * KIB, 11),),
    predicted=800,
    active=400,
    loaded=44,
    in_window=1600,
    changed=88,
    linear_bytes=20e6,
    ffn_bytes=5e6,
    attention_bytes=1e6,
    predictor_bytes=2e6,
    mode="sparse",
)


def test_a_token_is_the_sum_of_its_parts() -> None:
    cost = token_cost(COUNTS, FLASH, COMPUTE, depth=32)
    assert cost.io_ms == pytest.approx(1000 * 4 * (FLASH.batch_seconds(11, 4 * KIB, 32) + 2e-5 + 11e-7))
    assert cost.mem_ms == pytest.approx(1000 * (4 * 1e-5 + 800 * 1e-8 + 88 * 1e-7))
    assert cost.predictor_ms == pytest.approx(1000 * (4 * 1e-5 + 2e6 / 4e9))
    weights = 20e6 / 10e9 + 5e6 / 5e9 + 1e6 / 2e9
    assert cost.compute_ms == pytest.approx(1000 * (1e-3 + 4 * 2e-4 + weights) + cost.predictor_ms)
    assert cost.total_ms == cost.io_ms + cost.mem_ms + cost.compute_ms
    assert COUNTS.flash_bytes == 44 * 4 * KIB
    assert COUNTS.read_count == 44


def test_a_dense_token_has_its_own_rates_and_no_slots() -> None:
    counts = dataclasses.replace(COUNTS, mode="dense", predictor_bytes=0)
    cost = token_cost(counts, FLASH, COMPUTE, depth=32)
    assert (cost.mem_ms, cost.predictor_ms) == (0, 0)
    assert cost.compute_ms == pytest.approx(1000 * (1e-3 + 4 * 3e-4 + 20e6 / 10e9 + 5e6 / 8e9 + 1e6 / 2e9))


def test_what_is_copied_is_paid_for() -> None:
    plain, moved = (
        token_cost(dataclasses.replace(COUNTS, reads=(ReadCalls(1, 8, MIB, 0, nbytes),)), FLASH, COMPUTE, 32)
        for nbytes in (0, 8 * MIB)
    )
    assert moved.io_ms - plain.io_ms == pytest.approx(1000 * 8 * MIB / 4e9)


def test_published_reuse_is_kept_where_it_was_measured() -> None:
    assert PUBLISHED.shares(0.10, 0) == (0.10, 0.10)
    assert PUBLISHED.shares(0.10, 4) == pytest.approx((0.24, 0.024))
    kept, new = zip(*(PUBLISHED.shares(0.10, k) for k in range(9)), strict=True)
    assert list(kept) == sorted(kept)
    assert list(new) == sorted(new, reverse=True)


def test_reuse_of_another_share_stays_a_share() -> None:
    for used in (0.01, 0.3, 0.7, 0.95):
        for k in range(9):
            kept, new = PUBLISHED.shares(used, k)
            assert used - 1e-12 <= kept <= 1
            assert 0 <= new <= used + 1e-12
    assert PUBLISHED.shares(1.0, 4) == (1.0, 0.0)
    more, less = (PUBLISHED.shares(used, 4)[0] for used in (0.2, 0.05))
    assert more > 0.24 > less


def test_reuse_as_independent_draws() -> None:
    """Tokens that each draw a tenth anew: kept is 1 - 0.9^(k+1), and a fifth instead of a tenth 1 - 0.8^(k+1)."""
    drawn = Reuse("drawn", 0.1, tuple((k, 1 - 0.9 ** (k + 1), 0.9**k - 0.9 ** (k + 1)) for k in (0, 2, 4)))
    assert drawn.shares(0.2, 4) == pytest.approx((1 - 0.8**5, 0.8**4 - 0.8**5))


def test_the_longest_window_within_a_capacity() -> None:
    for limit in (0.10, 0.15, 0.2, 0.24, 0.5):
        k = PUBLISHED.window_within(0.10, 8, limit)
        kept, new = PUBLISHED.shares(0.10, k)
        assert kept <= limit
        assert k == 8 or kept == pytest.approx(limit, rel=1e-6)  # the slots are used up
        assert PUBLISHED.shares(0.10, 8)[1] <= new <= 0.10
    assert PUBLISHED.window_within(0.10, 8, 0.05) == -1


@pytest.mark.parametrize("width", [512, 96, 768])
@pytest.mark.parametrize("bundling", [True, False])
@pytest.mark.parametrize("chunk", [64 * KIB, MIB])
def test_sequential_calls_are_the_reads_of_the_reader(width: int, bundling: bool, chunk: int) -> None:
    spec = dataclasses.replace(SPEC, d_model=width)
    layout, ablation = RecordLayout.of(spec, "float32"), Ablation(predictor="off", windowing=False, bundling=bundling)
    calls = sequential_calls(1500, 1000, layout, ablation, chunk)
    assert [(call.calls, call.neurons) for call in calls] == [(1, 1000), (1, 500)]
    stride, nbytes = (layout.bundle_stride, layout.record_bytes) if bundling else (layout.row_stride, layout.row_bytes)
    for call, first in zip(calls, (0, 1000), strict=True):
        ids = np.arange(first, first + int(call.neurons))
        reads = plan_reads(ids * stride, np.full(len(ids), nbytes), 0, chunk)
        parts = 1 if bundling else layout.parts
        assert call.reads == pytest.approx(parts * len(reads), rel=0.05, abs=parts)
        assert call.reads * call.read_bytes == pytest.approx(parts * sum(n for _, n in reads), rel=0.02)


@pytest.mark.parametrize("row", ["+ windowing", "+ bundling (all)"])
@pytest.mark.parametrize("coalesce", [True, False])
def test_scattered_calls_are_what_the_reader_makes_on_average(row: str, coalesce: bool) -> None:
    layout, ablation = RecordLayout.of(SPEC, "float32"), dataclasses.replace(PAPER_ROWS[row], coalesce=coalesce)
    run, rng, loaded = RunSpec(), np.random.default_rng(0), 200
    call = scattered_calls(loaded, SPEC, layout, ablation, run)
    assert call is not None
    stride, nbytes, parts = (
        (layout.bundle_stride, layout.record_bytes, 1)
        if ablation.bundling
        else (layout.row_stride, layout.row_bytes, layout.parts)
    )
    gap = run.coalesce_gap_bytes if coalesce else -1
    made = []
    for _ in range(40):
        ids = np.sort(rng.choice(SPEC.d_ff, loaded, replace=False))
        reads = plan_reads(ids * stride, np.full(loaded, nbytes), gap, run.chunk_bytes)
        made.append((parts * len(reads), parts * sum(n for _, n in reads)))
    reads, nbytes = np.mean(made, axis=0)
    assert call.reads == pytest.approx(reads, rel=0.05)
    assert call.reads * call.read_bytes == pytest.approx(nbytes, rel=0.10)


def test_no_neuron_is_no_call() -> None:
    assert scattered_calls(0, SPEC, RecordLayout.of(SPEC, "float32"), PAPER_ROWS["+ windowing"], RunSpec()) is None


def test_what_is_aligned_is_not_copied() -> None:
    layout = RecordLayout.of(SPEC, "float32")  # rows of 2 KiB, records of 4
    assert not copied(layout, PAPER_ROWS["+ bundling (all)"])
    assert copied(layout, PAPER_ROWS["+ windowing"])


def test_rates_from_two_timings() -> None:
    assert _rate((1e6, 1.1e-4), (4e6, 4.1e-4)) == pytest.approx(1e10)
    assert _rate((1e6, 4.1e-4), (4e6, 4.0e-4)) == pytest.approx(1e10)  # too coarse: the larger one's whole rate


def test_least_squares_of_nothing_negative() -> None:
    columns = np.array([[1.0, n, c] for n in (10, 100) for c in (2, 50)])
    assert _non_negative(columns, columns @ [5e-6, 1e-8, 1e-7]) == pytest.approx((5e-6, 1e-8, 1e-7))
    found = _non_negative(columns, columns @ [5e-6, 0, 1e-7] - columns @ [0, 1e-9, 0])
    assert min(found) >= 0
    assert math.isfinite(sum(found))


def test_flash_is_measured_on_a_store_s_own_file_where_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "ffn.bundled"
    file.write_bytes(bytes(4 * MIB))
    fit = measure_flash(tmp_path / "elsewhere", engine="buffered", seconds=1e-6, file=file)
    assert fit.source == f"measured now, ffn.bundled of {tmp_path}"
    assert {(p.depth, p.chunk_bytes) for p in fit.points} == {(d, c) for d in PROBE_DEPTHS for c in PROBE_CHUNKS}
    assert {(c.reads, c.chunk_bytes) for c in fit.calls} == {(n, c) for n in PROBE_CALLS for c in PROBE_CHUNKS}
    assert list(tmp_path.iterdir()) == [file]


def test_a_pass_has_so_many_calls_of_each_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(MIB))
    found = _few_reads(file, "buffered", 4 * KIB, np.random.default_rng(0))
    assert {reads: len(times) for reads, times in found.items()} == dict.fromkeys(PROBE_CALLS, CALLS_A_PASS)


def test_a_temporary_file_is_gone_afterwards(tmp_path: Path) -> None:
    fit = measure_flash(tmp_path, engine="buffered", seconds=1e-6, nbytes=MIB)
    assert max(p.chunk_bytes for p in fit.points) == 256 * KIB
    assert not list(tmp_path.iterdir())
