"""What a prompt of 128 tokens costs: the union of its tokens' neurons, all neurons in one stream, or in pieces.

    python benchmarks/prompt_processing.py STORE --data TEXT [--predictors DIR] [--tokens 128] [--pieces 32,64]

The last line is one JSON object. Each way: the median of a few runs in ms (total, io, compute), bytes and reads from
flash, neurons loaded. The ceiling is what plain reads reach: `floor_ms`, the way's bytes at the speed of long reads.
Pieces cannot read less than the whole (the unions of the pieces hold all that the union of the whole does); they are
measured to show what they cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np

from workbench.ablation import Ablation
from workbench.engines import open_engine
from workbench.engines.pipeline import FlashEngine
from workbench.engines.stats import TokenStats
from workbench.experiments.flash_bench import random_throughput
from workbench.experiments.record import machine, model_name
from workbench.experiments.text import window_and_card
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

SUMS = ("total_ms", "io_ms", "mem_ms", "compute_ms", "predictor_ms", "read_bytes", "reads", "loaded", "predicted")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--predictors", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pieces", default="32,64")
    parser.add_argument("--dram", default="50%")
    parser.add_argument("--io", default="threads")
    parser.add_argument("--no-coalesce", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    store = Store.open(asked.store)
    predictors = Predictors.load(asked.predictors) if asked.predictors else None
    ablation = Ablation(
        predictor="low_rank" if predictors else "oracle", io=asked.io, coalesce=not asked.no_coalesce
    )  # fmt: skip
    ids = window_and_card(asked.data, store, asked.tokens)[0].tolist()
    run = RunSpec(dram=asked.dram, context=asked.tokens + 16)
    long_reads, _ = random_throughput(
        store.bundled_path, ablation.io, run.chunk_bytes, run.depth, 0.5, np.random.default_rng(0)
    )
    ways = []
    with open_engine(store, ablation, predictors, run) as engine:
        for way in ("union", "dense", "auto"):
            engine.run = dataclasses.replace(run, prompt_neurons=way)
            ways.append({"way": way, "piece": len(ids), **_measure(engine, ids, len(ids), asked.repeats, long_reads)})
        engine.run = run
        for piece in map(int, asked.pieces.split(",")):
            ways.append({"way": "union", "piece": piece, **_measure(engine, ids, piece, asked.repeats, long_reads)})
    for way in ways:
        print(f"{way['way']:>6} in pieces of {way['piece']:>4}: {way['total_ms']:8.1f} ms, io {way['io_ms']:7.1f} ms, "
              f"{way['read_bytes'] / 1e6:7.2f} MB, floor {way['floor_ms']:6.1f} ms")  # fmt: skip
    print(
        json.dumps(
            {
                "model": model_name(store),
                "machine": machine(store.path),
                "tokens": len(ids),
                "ablation": dataclasses.asdict(ablation),
                "run": dataclasses.asdict(run),
                "long_read_bytes_per_s": long_reads,
                "ways": ways,
            }
        )
    )


def _measure(engine: FlashEngine, ids: list[int], piece: int, repeats: int, long_reads: float) -> dict[str, float]:
    runs = []
    for _ in range(repeats):
        engine.reset()
        parts: list[TokenStats] = [engine.prefill(ids[at : at + piece])[1] for at in range(0, len(ids), piece)]
        runs.append({name: sum(getattr(part, name) for part in parts) for name in SUMS})
    found = {name: statistics.median(run[name] for run in runs) for name in SUMS}
    return {**found, "floor_ms": 1000 * found["read_bytes"] / long_reads}


if __name__ == "__main__":
    main()
