"""Which share of a token's arithmetic the predictors take, at a named geometry, on this CPU.

Timed are the engine's own kernels on random weights: the attention's four matrices, the sparse FFN over the predicted
tenth of the neurons, the output head, and int8 predictors of the given rank, with several layers in turn so that no
weights stay in the processor's caches. Attention over the KV cache and the norms are left out, which makes the share
larger, not smaller.

    python benchmarks/predictor_share.py [--geometry opt-6.7b] [--threads 2] [--last-rank 1024] [--out record.json]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workbench.experiments.record import commit, machine
from workbench.kernels.ffn import sparse_ffn
from workbench.kernels.linear import linear
from workbench.kernels.predict import predict

GEOMETRIES = {"opt-6.7b": (4096, 16384, 32, 50272), "opt-1.3b": (2048, 8192, 24, 50272)}
"""d_model, d_ff, layers, vocabulary."""
COPIES, ROUNDS, PREDICTED, HEAD_PARTS = 3, 9, 0.1, 4


def weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random weights as the kernels take them: 16-bit ones as their bits."""
    if dtype == "float32":
        return rng.standard_normal(shape, dtype=np.float32)
    return rng.integers(0, 15000, shape, dtype=np.uint16)


def median_ms(run: Callable[[int], Any], copies: int) -> float:
    """Of one call, over rounds in which each copy of the weights is used once."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for copy in range(copies):
            run(copy)
        found.append((time.perf_counter() - began) / copies * 1e3)
    return float(np.median(found))


def predictor_ms(rng: np.random.Generator, d_model: int, d_ff: int, rank: int, threads: int) -> float:
    """One layer's int8 predictor, by far most of whose neurons stay below the threshold."""
    x, bias = rng.standard_normal(d_model).astype(np.float32), np.zeros(d_ff, np.float32)
    factors = [
        (
            rng.integers(-127, 127, (rank, d_model), dtype=np.int8),
            rng.integers(-127, 127, (d_ff, rank), dtype=np.int8),
            rng.random(rank, dtype=np.float32),
            rng.random(d_ff, dtype=np.float32),
        )
        for _ in range(COPIES)
    ]

    def run(copy: int) -> None:
        a, b, a_scale, b_scale = factors[copy]
        predict(x, a, b, bias, 1e9, "int8", threads, a_scale=a_scale, b_scale=b_scale)

    return median_ms(run, COPIES)


def rest_ms(
    rng: np.random.Generator, geometry: tuple[int, int, int, int], dtype: str, threads: int
) -> dict[str, float]:
    """Attention's matrices and the sparse FFN of one layer, and the head."""
    d_model, d_ff, _, vocab = geometry
    x = rng.standard_normal(d_model).astype(np.float32)
    attention = [[weights(rng, (d_model, d_model), dtype) for _ in range(4)] for _ in range(COPIES)]
    count = int(PREDICTED * d_ff)
    width = 2 * d_model * (4 if dtype == "float32" else 2)
    slots = [weights(rng, (count * 2 * d_model,), dtype).view(np.uint8) for _ in range(COPIES)]
    rows, bias = np.arange(count, dtype=np.int32), np.where(np.arange(count) % 3, -1e9, 1e9).astype(np.float32)
    head = [weights(rng, (vocab // HEAD_PARTS, d_model), dtype) for _ in range(HEAD_PARTS)]
    return {
        "attention": median_ms(
            lambda copy: [linear(x[None], matrix, None, dtype, threads) for matrix in attention[copy]], COPIES
        ),
        "ffn": median_ms(
            lambda copy: sparse_ffn(x, slots[copy], width, rows, bias, dtype, np.zeros(d_model, np.float32), threads),
            COPIES,
        ),
        "head": HEAD_PARTS * median_ms(lambda copy: linear(x[None], head[copy], None, dtype, threads), HEAD_PARTS),
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="opt-6.7b")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--last-rank", type=int, default=1024)
    parser.add_argument("--last-layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="write the record here as well")
    args = parser.parse_args()
    geometry = GEOMETRIES[args.geometry]
    d_model, d_ff, layers, _ = geometry
    rng = np.random.default_rng(args.seed)
    first, last = (predictor_ms(rng, d_model, d_ff, rank, args.threads) for rank in (args.rank, args.last_rank))
    predictors = (layers - args.last_layers) * first + args.last_layers * last
    rows = []
    for dtype in ("float32", "float16", "bfloat16"):
        rest = rest_ms(rng, geometry, dtype, args.threads)
        total = layers * (rest["attention"] + rest["ffn"]) + rest["head"] + predictors
        rows.append({"dtype": dtype, **{f"{k}_ms": v for k, v in rest.items()}, "share": predictors / total})
    record = {
        "benchmark": "predictor_share", "geometry": args.geometry, "threads": args.threads,
        "ranks": [args.rank, args.last_rank, args.last_layers], "predictor_ms": [first, last],
        "machine": machine(Path(".")), "commit": commit(), "seed": args.seed, "rows": rows,
    }  # fmt: skip
    text = json.dumps(record)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
