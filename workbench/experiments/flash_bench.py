"""Figure 2b: read throughput by chunk size and reads in flight, and the cost model that fits it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.ablation import IoEngine
from workbench.experiments.record import SCHEMA, machine, model_name, run_info
from workbench.flash.reader import ALIGNMENT, FlashReader, aligned_buffer
from workbench.flash.store import Store

CHUNKS = tuple(4096 << shift for shift in range(9))
THREADS = (1, 8, 32)
Progress = Callable[[str, int, int], None]


def random_throughput(
    path: Path, engine: IoEngine, chunk_bytes: int, depth: int, seconds: float, rng: np.random.Generator
) -> tuple[float, float]:
    """(bytes/s, reads/s) of reads of `chunk_bytes` at random aligned places of a file, `depth` in flight."""
    size = path.stat().st_size // chunk_bytes
    batch = max(depth, min(32 * depth, (16 << 20) // chunk_bytes))
    buffer = aligned_buffer(batch * chunk_bytes)
    places = np.arange(batch, dtype=np.int64) * chunk_bytes
    lengths = np.full(batch, chunk_bytes, np.int64)
    done = reads = 0
    spent = 0.0
    with FlashReader(engine, depth, max(chunk_bytes, ALIGNMENT)) as reader:
        handle = reader.open(path)
        reader.read(handle, np.zeros(depth, np.int64), lengths[:depth], buffer, places[:depth])  # starts the threads
        while spent < seconds:
            offsets = rng.integers(0, size, batch) * chunk_bytes
            began = time.perf_counter()
            stats = reader.read(handle, offsets, lengths, buffer, places)
            spent += time.perf_counter() - began
            done, reads = done + stats.read_bytes, reads + stats.reads
    return done / spent, reads / spent


def fit_cost(chunks: list[int], bytes_per_s: list[float]) -> dict[str, float]:
    """Time of a read = latency + size / bandwidth, by least squares of the relative error.

    latency_us is what a read adds with the queue full, not the latency of a single one; gap_bytes is the gap that is
    as cheap to read as to skip.
    """
    size = np.asarray(chunks, np.float64)
    seconds = size / np.asarray(bytes_per_s)
    columns = np.stack([np.ones_like(size), size], 1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(size), rcond=None)
    latency, per_byte = max(float(latency), 0.0), max(float(per_byte), 1e-15)
    return {"latency_us": 1e6 * latency, "bytes_per_s": 1 / per_byte, "gap_bytes": latency / per_byte}


def bench_flash(
    store: Store,
    *,
    engines: tuple[IoEngine, ...] = ("threads",),
    seconds: float = 0.25,
    seed: int = 0,
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure a store's own bundled file; returns a record of kind bench_flash.

    Chunks larger than the file allows are left out. The fit is of the first engine at the most reads in flight.
    """
    path, rng = store.bundled_path, np.random.default_rng(seed)
    chunks = [c for c in CHUNKS if c * 4 <= path.stat().st_size]
    plan: list[tuple[IoEngine, int, int]] = [(e, t, c) for e in engines for t in THREADS for c in chunks]
    rows: list[dict[str, Any]] = []
    for done, (engine, threads, chunk) in enumerate(plan):
        if progress:
            progress(f"{chunk >> 10} KiB, {threads} in flight", done, len(plan))
        rate, reads = random_throughput(path, engine, chunk, threads, seconds, rng)
        rows.append(
            {
                "chunk_bytes": chunk, "threads": threads, "engine": engine, "direct": engine != "buffered",
                "bytes_per_s": rate, "reads_per_s": reads,
            }
        )  # fmt: skip
    if progress:
        progress("done", len(plan), len(plan))
    deep = [r for r in rows if r["engine"] == engines[0] and r["threads"] == THREADS[-1]]
    return {
        "schema": SCHEMA,
        "kind": "bench_flash",
        "machine": machine(path),
        "run": run_info(
            model_name(store), store.spec, store.dtype, tokens=0, io=", ".join(engines), seed=seed, command=command
        ),
        "rows": rows,
        "fit": fit_cost([r["chunk_bytes"] for r in deep], [r["bytes_per_s"] for r in deep]),
    }
