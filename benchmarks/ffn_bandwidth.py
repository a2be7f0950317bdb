"""The sparse FFN and the other CPU kernels against a plain read of the same bytes.

The ceiling first: a kernel that touches B bytes of weights cannot be faster than threads that only sum these B bytes.
The layer has OPT-1.3B's geometry (2048 wide, 8192 neurons), all of them active, and as many copies of it as take the
working set far beyond the last-level cache; kernel and plain read take turns on the same memory, and a pair's ratio is
formed before the median. `gated` cases take the same memory as two thirds as many neurons of three rows each;
`gated_tenth` with one neuron in ten active, so that of the others the gate row alone counts as read.

    python benchmarks/ffn_bandwidth.py [--threads N] [--layers 6] [--pairs 7] [--out record.json]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from workbench import _native
from workbench.flash.reader import aligned_buffer
from workbench.kernels.ffn import sparse_ffn
from workbench.kernels.linear import linear
from workbench.spec import ITEMSIZE

D_MODEL, D_FF = 2048, 8192
TARGET = 0.8


def layer(dtype: str) -> np.ndarray:
    """uint8 [D_FF * slot_bytes] of small weights, in pages of this process."""
    rng = np.random.default_rng(0)
    slot_bytes = 2 * D_MODEL * ITEMSIZE[dtype]
    slots = aligned_buffer(D_FF * slot_bytes).reshape(D_FF, slot_bytes)
    for i in range(0, D_FF, 1024):
        weights = rng.standard_normal((1024, 2 * D_MODEL), np.float32) * np.float32(0.02)
        if dtype == "float16":
            weights = weights.astype(np.float16)
        elif dtype == "bfloat16":
            weights = (weights.view(np.uint32) >> 16).astype(np.uint16)
        slots[i : i + 1024] = weights.view(np.uint8)
    return slots.reshape(-1)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(dtype: str, layers: int, pairs: int, threads: int) -> dict[str, object]:
    """Median bandwidths and ratios of one storage dtype."""
    matrices = [layer(dtype) for _ in range(layers if dtype == "float32" else 2 * layers)]
    slot_bytes = 2 * D_MODEL * ITEMSIZE[dtype]
    rng = np.random.default_rng(1)
    x = rng.standard_normal(D_MODEL, np.float32)
    out = np.zeros(D_MODEL, np.float32)
    always, never = np.full(D_FF, 1e3, np.float32), np.full(D_FF, -1e3, np.float32)
    in_order = np.arange(D_FF, dtype=np.int32)
    shuffled = rng.permutation(D_FF).astype(np.int32)
    stored = np.float32 if dtype == "float32" else np.uint16
    weights = [m.view(stored).reshape(2 * D_FF, D_MODEL) for m in matrices]

    gated_neurons = 2 * D_FF // 3
    gated_rows = rng.permutation(gated_neurons).astype(np.int32)
    tenth = np.where(np.arange(gated_neurons) % 10 == 0, 1e3, -1e3).astype(np.float32)

    def ffn(rows: np.ndarray, bias: np.ndarray) -> Callable[[], object]:
        return lambda: [sparse_ffn(x, m, slot_bytes, rows, bias, dtype, out, threads) for m in matrices]

    def gated(bias: np.ndarray) -> Callable[[], object]:
        width = slot_bytes // 2 * 3
        return lambda: [sparse_ffn(x, m, width, gated_rows, bias, dtype, out, threads, gated=True) for m in matrices]

    def thin(tokens: int) -> Callable[[], object]:
        xs = np.repeat(x[None], tokens, axis=0)
        return lambda: [linear(xs, w, None, dtype, threads) for w in weights]

    total = sum(m.nbytes for m in matrices)
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "sparse_ffn": (ffn(in_order, always), total),
        "sparse_ffn_shuffled": (ffn(shuffled, always), total),
        "sparse_ffn_inactive": (ffn(shuffled, never), total // 2),
        "gated_shuffled": (gated(always[:gated_neurons]), total),
        "gated_tenth": (gated(tenth), round(total / 3 * 1.2)),
        "linear_1": (thin(1), total),
        "linear_8": (thin(8), total),
    }
    plain: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(pairs):
        for name, (work, nbytes) in cases.items():
            reading = total / timed(lambda: [_native.read_sum(m, threads) for m in matrices])
            plain.append(reading)
            ratios[name].append(nbytes / timed(work) / reading)
    return {
        "dtype": dtype,
        "working_set_bytes": total,
        "read_bytes_per_second": round(statistics.median(plain)),
        "ratio": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(dtype, args.layers, args.pairs, args.threads) for dtype in ITEMSIZE]
    record = {
        "benchmark": "ffn_bandwidth",
        "d_model": D_MODEL,
        "neurons": D_FF,
        "threads": args.threads,
        "instruction_set": _native.instruction_set(),
        "pairs": args.pairs,
        "rows": rows,
        "target": TARGET,
    }
    text = json.dumps(record)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
