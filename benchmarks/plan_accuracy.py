"""How far `workbench plan` is from what a run then takes: each row of the ablation, predicted and measured.

Two predictions stand beside each measured row. 'plan' knows the model's config and the predictors' card alone, and what
`workbench plan` assumes or was given of reuse. 'counts' is priced with the neurons and reads that the row really made:
what is left there is the cost model's own error. The aim is 15%. Flash and the machine are measured before and after
the rows of a round, and what is predicted is the mean of the two: where they differ (`drift`), no prediction can hold.

    workbench convert data/demo-model STORE --dtype float32
    python benchmarks/plan_accuracy.py STORE predictors/demo-model --data data/text [--reuse R] [--rounds 3]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from workbench.ablation import Ablation
from workbench.engines.budget import compute_threads, plan_dram
from workbench.errors import WorkbenchError
from workbench.experiments.ablate import WARM_UP, ablate
from workbench.experiments.calibrate import calibrate, measure_flash
from workbench.experiments.cost import ComputeFit, Counts, FlashFit, ReadCalls, copied
from workbench.experiments.plan import ROWS, count_token, row_figures, row_of, workload
from workbench.experiments.plan_inputs import Outline, Use, outline, use_of
from workbench.experiments.text import window_of
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

PARTS = ("io_ms", "mem_ms", "compute_ms", "predictor_ms", "total_ms")


def counts_of(model: Outline, row: Mapping[str, Any], run: RunSpec, use: Use, position: int) -> Counts:
    """`count_token`, with the neurons and the reads that a measured row really made."""
    ablation = Ablation(**row["ablation"])
    counts = count_token(model, ablation, run, plan_dram(model, ablation, use, run), use, position)
    width = model.layout.row_bytes
    ffn = width * (row["predicted"] + row["active"] * (model.layout.parts - 1))
    if ablation.predictor == "off":
        return dataclasses.replace(counts, active=row["active"], ffn_bytes=ffn)
    layers = model.spec.num_layers
    loaded = row["loaded"] / layers
    moved = loaded * model.layout.record_bytes if copied(model.layout, ablation) else 0.0
    reads = ReadCalls(layers, row["reads"] / layers, row["flash_bytes"] / row["reads"], loaded, moved)
    return dataclasses.replace(
        counts, reads=(reads,), predicted=row["predicted"], active=row["active"], loaded=row["loaded"],
        in_window=row["in_window"], changed=row["loaded"] * (2 if ablation.windowing else 1), ffn_bytes=ffn,
    )  # fmt: skip


def tokens_of(data: Path | None, store: Store, length: int, seed: int) -> np.ndarray:
    """int64 [length]: tokens of a text, or random ones where none is given."""
    if data:
        return window_of(data, store, length)
    return np.random.default_rng(seed).integers(3, store.spec.vocab_size, length)


def measure(args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """One round: this machine's figures, then every row measured and predicted."""
    store, predictors = Store.open(args.store), Predictors.load(args.predictors)
    model = outline(args.store)
    use = use_of(model, predictors, args.reuse)
    length = args.prompt + WARM_UP + args.tokens
    text = tokens_of(args.data, store, length, seed)
    run = RunSpec(window=args.window, dram=args.dram, context=length, seed=seed)
    position = args.prompt + WARM_UP + args.tokens // 2

    def prices() -> tuple[FlashFit, ComputeFit]:
        work = workload(model, use, position)
        flash = measure_flash(args.store, seed=seed, file=store.bundled_path)
        return flash, calibrate(work, args.store, threads=compute_threads(run), seed=seed)

    fits = [prices()]
    rows = {name: ROWS[name] for name in args.rows}
    record = ablate(store, predictors, text, rows=rows, run=run, prompt=args.prompt, tokens=args.tokens)
    fits.append(prices())
    found = []
    for row in record["rows"]:
        name = row["name"]
        planned = [row_of(name, ROWS[name], model, use, run, *fit, position) for fit in fits]
        priced = [row_figures(counts_of(model, row, run, use, position), *fit, run.depth) for fit in fits]
        found.append({"name": name, "measured": row, "plan": mean(planned), "counts": mean(priced)})
        found[-1]["drift"] = planned[1]["total_ms"] / planned[0]["total_ms"]
    return found


def mean(pair: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of two rows' figures."""
    return {key: (pair[0][key] + pair[1][key]) / 2 for key in pair[0] if isinstance(pair[0][key], int | float)}


def line(entry: dict[str, Any]) -> str:
    row, planned, priced = entry["measured"], entry["plan"], entry["counts"]
    parts = " ".join(f"{planned[p]:8.2f}/{priced[p]:8.2f}/{row[p]:8.2f}" for p in PARTS)
    neurons = f"{planned['loaded']:6.0f}/{row['loaded']:6.0f}"
    return (
        f"{entry['name']:18} {parts} | {neurons} | {planned['total_ms'] / row['total_ms']:5.2f} "
        f"{priced['total_ms'] / row['total_ms']:5.2f} drift {entry['drift']:.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("predictors", type=Path)
    parser.add_argument("--data", type=Path, help="text; random tokens where it is not given")
    parser.add_argument("--reuse", type=Path, help="a record of `workbench analyze reuse` or `analyze window`")
    parser.add_argument("--dram", default="80%")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    head = " ".join(f"{p.removesuffix('_ms'):>26}" for p in PARTS)
    rounds = []
    try:
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}: ms by plan / by counts / measured; then over measured\n{head}")
            rounds.append(measure(args, args.seed + number))
            for entry in rounds[-1]:
                print(line(entry), flush=True)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 1
    medians = {
        name: {
            kind: statistics.median(
                entry[kind]["total_ms"] / entry["measured"]["total_ms"]
                for entries in rounds for entry in entries if entry["name"] == name
            )
            for kind in ("plan", "counts")
        }
        for name in args.rows
    }  # fmt: skip
    record = {"benchmark": "plan_accuracy", "target": 0.15, "medians": medians, "rounds": rounds}
    text = json.dumps(record)
    if args.out:
        args.out.write_text(text + "\n")
    print(json.dumps({**record, "rounds": len(rounds)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
