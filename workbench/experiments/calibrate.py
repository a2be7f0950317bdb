"""Measures this machine for the cost model: flash with a temporary file, the kernels at a model's own sizes, and what a
layer costs beside its bytes, with a small model of the same family. Takes seconds, and no model."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from workbench import _native
from workbench.ablation import IoEngine
from workbench.dram.slots import Slots
from workbench.engines.budget import compute_threads
from workbench.errors import StoreError
from workbench.experiments.cost import ComputeFit, FlashCall, FlashFit, FlashPoint
from workbench.experiments.flash_bench import random_throughput
from workbench.experiments.small_model import framework, random_predictor
from workbench.experiments.workload import MOST_WORK, Arena, Workload, typical
from workbench.flash.layout import ALIGNMENT
from workbench.flash.reader import FlashReader, aligned_buffer
from workbench.flash.store import NUMPY_DTYPES
from workbench.kernels.ffn import sparse_ffn
from workbench.kernels.linear import linear
from workbench.kernels.predict import predict
from workbench.models import family
from workbench.spec import ITEMSIZE, RunSpec

PROBE_BYTES = 256 << 20
PROBE_CHUNKS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
PROBE_DEPTHS = (1, 8, 32)
PROBE_CALLS = (1, 2, 4, 8, 16, 32)
PROBE_PASSES = 3
"""Every point is measured so often, with the others in between, since a drive's speed drifts."""
CALLS_A_PASS, BETWEEN_CALLS = 8, 16 << 20
"""A call of few reads comes after arithmetic, which is stood for by a read of so many bytes of DRAM."""
Progress = Callable[[str, int, int], None]


def measure_flash(
    folder: Path,
    *,
    engine: IoEngine = "threads",
    seconds: float = 0.15,
    nbytes: int = PROBE_BYTES,
    seed: int = 0,
    progress: Progress | None = None,
    file: Path | None = None,
) -> FlashFit:
    """Flash under `folder`, by random reads of a temporary file of `nbytes`, which is gone afterwards, or of `file`.

    A store's own file is the better measure: a drive, or what stands before it, can be faster with a small new file
    than with a large old one. StoreError when the temporary file cannot be written, ReaderError when flash cannot be
    read as asked.
    """
    rng = np.random.default_rng(seed)
    taken: dict[tuple[int, int], list[float]] = {}
    called: dict[tuple[int, int], list[float]] = {}
    with contextlib.nullcontext(file) if file else _probe_file(folder, nbytes, rng) as path:
        size = path.stat().st_size
        chunks = [chunk for chunk in PROBE_CHUNKS if 4 * chunk <= size]
        wanted = [(depth, chunk) for depth in PROBE_DEPTHS for chunk in chunks] * PROBE_PASSES
        for done, (depth, chunk) in enumerate(wanted):
            if progress:
                progress(f"flash, {chunk >> 10} KiB, {depth} in flight", done, len(wanted))
            rate = random_throughput(path, engine, chunk, depth, seconds / PROBE_PASSES, rng)[1]
            taken.setdefault((depth, chunk), []).append(1 / rate)
            if depth == PROBE_DEPTHS[-1]:
                for reads, each in _few_reads(path, engine, chunk, rng).items():
                    called.setdefault((reads, chunk), []).extend(each)
    points = tuple(FlashPoint(depth, chunk, statistics.median(each)) for (depth, chunk), each in taken.items())
    calls = tuple(FlashCall(reads, chunk, typical(each)) for (reads, chunk), each in called.items())
    what = f"{file.name} of {file.parent}" if file else f"a temporary file of {nbytes >> 20} MiB in {folder}"
    return FlashFit(f"measured now, {what}", engine, points, calls)


def _few_reads(path: Path, engine: IoEngine, chunk: int, rng: np.random.Generator) -> dict[int, list[float]]:
    """Seconds of calls by their number of reads. Before each memory is read as a layer's arithmetic would, so that the
    drive has nothing to do, the reader's threads sleep and the caches hold something else."""
    most, found = PROBE_CALLS[-1], {reads: [] for reads in PROBE_CALLS}
    size, threads = path.stat().st_size // chunk, compute_threads(RunSpec())
    buffer, memory = aligned_buffer(most * chunk), aligned_buffer(BETWEEN_CALLS)
    buffer[:] = memory[:] = 1  # resident, as it will be
    places, lengths = np.arange(most, dtype=np.int64) * chunk, np.full(most, chunk, np.int64)
    with FlashReader(engine, most, max(chunk, ALIGNMENT)) as reader:
        handle = reader.open(path)
        reader.read(handle, np.zeros(most, np.int64), lengths, buffer, places)  # starts the threads
        for _ in range(CALLS_A_PASS):
            for reads, times in found.items():
                offsets = rng.integers(0, size, reads) * chunk
                _native.read_sum(memory, threads)
                began = time.perf_counter()
                reader.read(handle, offsets, lengths[:reads], buffer, places[:reads])
                times.append(time.perf_counter() - began)
    return found


@contextmanager
def _probe_file(folder: Path, nbytes: int, rng: np.random.Generator) -> Iterator[Path]:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".workbench-flash-") as file:
            block = rng.bytes(8 << 20)
            for start in range(0, nbytes, len(block)):
                file.write(block[: nbytes - start])
            file.flush()
            os.fsync(file.fileno())
            yield Path(file.name)
    except OSError as error:
        raise StoreError(
            f"{folder}: flash cannot be measured there, {nbytes >> 20} MiB could not be written ({error.strerror}); "
            f"give another --store-dir, or a record of `workbench bench flash` with --flash"
        ) from error


def calibrate(
    work: Workload,
    folder: Path,
    *,
    threads: int,
    engine: IoEngine = "threads",
    seed: int = 0,
    progress: Progress | None = None,
) -> ComputeFit:
    """Time this machine's kernels, slots and framework for a model. Under `folder`, on flash, a small store lies for
    that time. StoreError when there is no room for it, ReaderError when flash cannot be read as asked."""
    rng = np.random.default_rng(seed)
    arena = Arena(work, rng)
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], Any]] = {
        "linear layers": lambda: _linear_rate(work, arena, threads, rng),
        "sparse FFN": lambda: _ffn_rate(work, arena, threads, rng, sparse=True),
        "dense FFN": lambda: _ffn_rate(work, arena, threads, rng, sparse=False),
        "predictor": lambda: _predictor_rate(work, threads, rng),
        "attention": lambda: _attention_rate(work),
        "slots": lambda: _slots(work, arena, threads, rng),
        "a small model": lambda: framework(work, arena, folder, engine, threads, found, rng),
    }
    for done, (name, measure) in enumerate(steps.items()):
        if progress:
            progress(name, done, len(steps))
        found[name] = measure()
    call, neuron, change = found["slots"]
    return ComputeFit(
        threads=threads,
        dtype=work.dtype,
        linear_bytes_per_s=found["linear layers"],
        sparse_ffn_bytes_per_s=found["sparse FFN"],
        dense_ffn_bytes_per_s=found["dense FFN"],
        predictor_bytes_per_s=found["predictor"],
        attention_bytes_per_s=found["attention"],
        slots_call_s=call,
        slots_neuron_s=neuron,
        slots_change_s=change,
        **found["a small model"],
    )


def _timed(call: Callable[[], Any], least: int = 20, seconds: float = 0.15) -> float:
    """Seconds of a call, of at least `least` calls and for at least so long; the first two do not count."""
    for _ in range(2):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return typical(times)


def _rate(small: tuple[float, float], large: tuple[float, float]) -> float:
    """Bytes/s beyond a call's own cost, of two (bytes, seconds); the larger one's whole rate where timing is too
    coarse to tell them apart."""
    nbytes, seconds = large[0] - small[0], large[1] - small[1]
    whole = large[0] / large[1]
    rate = nbytes / seconds if seconds > 0 else whole
    return rate if whole <= rate <= 4 * whole else whole


def _linear_rate(work: Workload, arena: Arena, threads: int, rng: np.random.Generator) -> float:
    width, item = work.spec.d_model, ITEMSIZE[work.dtype]
    x = rng.standard_normal((1, width), np.float32)
    most = arena.nbytes // (width * item)

    def timed(rows: int) -> tuple[float, float]:
        rows = max(1, min(rows, most // 2))

        def call() -> None:
            weight = arena.take(rows * width * item).view(NUMPY_DTYPES[work.dtype]).reshape(rows, width)
            linear(x, weight, None, work.dtype, threads)

        return rows * width * item, _timed(call)

    return _rate(timed(width // 4), timed(max(width, (4 << 20) // (width * item))))


def _ffn_rate(work: Workload, arena: Arena, threads: int, rng: np.random.Generator, *, sparse: bool) -> float:
    """Bytes/s of the rows that the kernel has to read: the deciding one of each neuron, all of those that fire."""
    spec, row = work.spec, work.spec.d_model * ITEMSIZE[work.dtype]
    width, share = spec.parts * row, work.sparse_active if sparse else work.dense_active
    capacity = max(2, min(arena.nbytes // width, 2 * spec.d_ff))
    x = rng.standard_normal(spec.d_model, np.float32)
    deviation = 0.02 * float(np.linalg.norm(x))
    bias = np.full(capacity, deviation * statistics.NormalDist().inv_cdf(min(max(share, 1e-4), 1 - 1e-4)), np.float32)
    out = np.zeros(spec.d_model, np.float32)

    def timed(neurons: int) -> tuple[float, float]:
        neurons = max(1, min(neurons, capacity // 2))
        if sparse:
            choices = [np.sort(rng.choice(capacity, neurons, replace=False)).astype(np.int32) for _ in range(16)]
            choices = [rng.permutation(ids).astype(np.int32) for ids in choices]
        else:
            choices = [np.arange(at, at + neurons, dtype=np.int32) for at in (0, capacity - neurons)]
        turn, fired = 0, 0

        def call() -> None:
            nonlocal turn, fired
            matrix = arena.take(capacity * width)
            turn += 1
            fired = sparse_ffn(
                x, matrix, width, choices[turn % len(choices)], bias, work.dtype, out, threads,
                gated=spec.gated, activation="relu2" if spec.activation == "relu2" else "relu",
            )  # fmt: skip

        seconds = _timed(call)
        return row * (neurons + fired * (spec.parts - 1)), seconds

    large = work.predicted if sparse else spec.d_ff
    return _rate(timed(large // 4), timed(large))


def _predictor_rate(work: Workload, threads: int, rng: np.random.Generator) -> float:
    spec, stored = work.spec, work.predictor_dtype
    copies = max(2, min(work.spec.num_layers, (32 << 20) // max(1, work.rank * (spec.d_model + spec.d_ff))))
    layers = [random_predictor(work.rank, spec.d_model, spec.d_ff, stored, rng) for _ in range(copies)]
    packed = [(*layer.packed(), layer) for layer in layers]
    x = rng.standard_normal(spec.d_model, np.float32)
    turn = 0

    def call() -> None:
        nonlocal turn
        a, b, layer = packed[turn % len(packed)]
        turn += 1
        predict(
            x, a, b, layer.bias, layer.threshold, stored, threads, a_scale=layer.a_scale, b_scale=layer.b_scale
        )  # fmt: skip

    return layers[0].nbytes / _timed(call)


def _attention_rate(work: Workload) -> float:
    """Bytes/s of keys and values that torch's attention of one token reads."""
    heads, width = family(work.spec.model_type).kv_shape(work.spec)
    tokens = max(8, work.context)
    each = 2 * 4 * tokens * heads * width
    caches = [
        tuple(torch.randn(1, heads, tokens, width) for _ in range(2)) for _ in range(max(2, min(8, MOST_WORK // each)))
    ]
    query, turn = torch.randn(1, heads, 1, width), 0

    def timed(length: int) -> tuple[float, float]:
        def call() -> None:
            nonlocal turn
            keys, values = (each[:, :, :length] for each in caches[turn % len(caches)])
            turn += 1
            F.scaled_dot_product_attention(query, keys, values)

        return 2 * 4 * length * heads * width, _timed(call, seconds=0.05)

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the engine does for one token
    try:
        return _rate(timed(tokens // 4), timed(tokens))
    finally:
        torch.set_num_threads(before)


def _slots(work: Workload, arena: Arena, threads: int, rng: np.random.Generator) -> tuple[float, float, float]:
    """Seconds of an update: of its own, for each predicted neuron, and for each that comes or goes."""
    spec = work.spec
    d_ff, slot = spec.d_ff, spec.parts * spec.d_model * ITEMSIZE[work.dtype]
    bias = np.zeros(d_ff, np.float32)
    rows, seconds = [], []
    for predicted in sorted({max(2, work.predicted // 4), max(4, work.predicted)}):
        capacity = min(d_ff, 6 * predicted)
        if capacity * slot > MOST_WORK:
            capacity = max(predicted, MOST_WORK // slot)
        for share in (0.1, 0.5):
            slots = Slots(d_ff, capacity, slot, bias)
            slots.matrix.fill(1)  # resident, as it will be
            ids = np.sort(rng.choice(d_ff, predicted, replace=False)).astype(np.int32)
            own = []
            for count in range(30):
                drawn = rng.choice(d_ff, predicted, replace=False).astype(np.int32)
                kept = rng.random(predicted) >= share
                ids = np.unique(np.concatenate([ids[kept[: len(ids)]], drawn])[:predicted]).astype(np.int32)
                arena.disturb(threads)
                began = time.perf_counter()
                change = slots.update(ids, 4)
                spent = time.perf_counter() - began
                if count >= 10:
                    own.append((len(ids), len(change.load_ids) + change.evicted, spent))
            rows.append([1.0, *np.mean([entry[:2] for entry in own], axis=0)])
            seconds.append(typical([entry[2] for entry in own]))
    return _non_negative(np.array(rows), np.array(seconds))


def _non_negative(columns: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Least squares of the relative error with three coefficients of at least 0: the best of all subsets."""
    best, found = np.inf, np.zeros(3)
    scaled = columns / wanted[:, None]
    for chosen in ([0, 1, 2], [0, 2], [0, 1], [1, 2], [0], [1], [2]):
        part, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(wanted)), rcond=None)
        error = float(np.square(scaled[:, chosen] @ part - 1).sum())
        if (part >= 0).all() and error < best:
            best, found = error, np.zeros(3)
            found[chosen] = part
    return float(found[0]), float(found[1]), float(found[2])
