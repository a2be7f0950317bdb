"""The predictor's kernel with int8 factors against float16 ones, at the same rank and at half of it.

Half the rank in float16 is as many bytes as the rank in int8, so a kernel bound by memory takes as long over either; a
ratio above 1 there is what conversion costs. The ceiling is a plain read of the same bytes. Layers take turns, so that
factors come from memory as they do in a model, unless all layers of the geometry fit the last-level cache anyway.

    python benchmarks/predictor_kernel.py [--threads N] [--pairs 9] [--out record.json]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from workbench import _native
from workbench.flash.reader import aligned_buffer
from workbench.kernels.predict import scores

GEOMETRIES = [  # d_model, d_ff, rank, layers
    (4096, 16384, 128, 32),
    (4096, 16384, 1024, 8),
    (576, 1536, 256, 30),
]


class Factors:
    """A layer's random factors in one buffer, as the kernels take them."""

    def __init__(self, d: int, d_ff: int, rank: int, dtype: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        stored = np.int8 if dtype == "int8" else np.uint16
        count = rank * (d + d_ff)
        self.buffer = aligned_buffer(count * np.dtype(stored).itemsize)
        weights = self.buffer.view(stored)
        if dtype == "int8":
            weights[:] = rng.integers(-127, 128, count, np.int8)
        else:
            weights[:] = (rng.standard_normal(count, np.float32) * np.float32(0.02)).astype(np.float16).view(np.uint16)
        self.a, self.b = weights[: rank * d].reshape(rank, d), weights[rank * d :].reshape(d_ff, rank)
        self.bias, self.dtype = np.zeros(d_ff, np.float32), dtype
        unit = np.float32(0.02 / 127)
        self.a_scale, self.b_scale = (np.full(rank, unit), np.full(d_ff, unit)) if dtype == "int8" else (None, None)

    def run(self, x: np.ndarray, threads: int) -> None:
        scores(x, self.a, self.b, self.bias, self.dtype, threads, a_scale=self.a_scale, b_scale=self.b_scale)


def measure(d: int, d_ff: int, rank: int, layers: int, pairs: int, threads: int) -> dict[str, object]:
    """Median seconds a layer of each kind, and the ratios of the int8 kernel's time, each formed before its median."""
    x = np.random.default_rng(0).standard_normal(d, np.float32)
    kinds = {"int8": (rank, "int8"), "float16": (rank, "float16"), "float16_half_rank": (rank // 2, "float16")}
    factors = {name: [Factors(d, d_ff, r, dtype, i) for i in range(layers)] for name, (r, dtype) in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in [*kinds, "read"]}
    for _ in range(pairs):
        for name, models in factors.items():
            start = time.perf_counter()
            for layer in models:
                layer.run(x, threads)
            seconds[name].append((time.perf_counter() - start) / layers)
        start = time.perf_counter()
        for layer in factors["int8"]:
            _native.read_sum(layer.buffer, threads)
        seconds["read"].append((time.perf_counter() - start) / layers)

    def ratio(over: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds["int8"], seconds[over], strict=True)), 3)

    return {
        "d_model": d,
        "d_ff": d_ff,
        "rank": rank,
        "layers": layers,
        "int8_bytes": rank * (d + d_ff),
        "microseconds": {name: round(statistics.median(values) * 1e6, 1) for name, values in seconds.items()},
        "int8_over": {name: ratio(name) for name in ("float16", "float16_half_rank", "read")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record = {
        "benchmark": "predictor_kernel",
        "threads": args.threads,
        "instruction_set": _native.instruction_set(),
        "pairs": args.pairs,
        "rows": [measure(*geometry, args.pairs, args.threads) for geometry in GEOMETRIES],
    }
    text = json.dumps(record)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
