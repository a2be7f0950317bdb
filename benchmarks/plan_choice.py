"""Is the window that `workbench plan` picks as fast as the best one that a sweep finds?

The plan knows the model's config and the predictors' card, and a reuse record where `--reuse` gives one. It picks the
window and the reads in flight for the budget. The sweep then runs 'all' with each window that was considered and with
the reads in flight that were picked, every one on the same text, in rounds, since the machine drifts: a window's figure
is the median of its rounds. `over_best` is the picked window's time over the best one's; the aim is 1.10.

    python benchmarks/plan_choice.py STORE PREDICTORS [--data data/text] [--reuse R] [--dram 80%] [--rounds 3]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from plan_accuracy import tokens_of

from workbench.errors import WorkbenchError
from workbench.experiments.ablate import WARM_UP, ablate
from workbench.experiments.plan import ALL, ROWS, plan
from workbench.experiments.record import machine, model_name
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

TARGET = 1.10
FIGURES = ("io_ms", "compute_ms", "loaded", "in_window", "window_trims")


def sweep(
    store: Store, predictors: Predictors, text: np.ndarray, windows: list[int], run: RunSpec, args: argparse.Namespace
) -> dict[int, dict[str, Any]]:
    """What 'all' takes with each window: medians over rounds, and what it read and kept in the last."""
    times: dict[int, list[float]] = {window: [] for window in windows}
    rows: dict[int, dict[str, Any]] = {}
    for number in range(args.rounds):
        order = windows if number % 2 == 0 else windows[::-1]
        for window in order:
            record = ablate(store, predictors, text, rows={ALL: ROWS[ALL]}, run=replace(run, window=window),
                            prompt=args.prompt, tokens=args.tokens)  # fmt: skip
            rows[window] = record["rows"][0]
            times[window].append(rows[window]["total_ms"])
            print(f"round {number + 1}, window {window:2d}: {times[window][-1]:8.2f} ms", flush=True)
    return {
        window: {"total_ms": statistics.median(times[window]), "rounds": times[window],
                 **{name: rows[window][name] for name in FIGURES}}
        for window in windows
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("predictors", type=Path)
    parser.add_argument("--data", type=Path, help="text; random tokens where it is not given")
    parser.add_argument("--reuse", type=Path, help="a record of `workbench analyze reuse` or `analyze window`")
    parser.add_argument("--dram", default="80%")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--most", type=int, default=16, help="the longest window that is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        store, predictors = Store.open(args.store), Predictors.load(args.predictors)
        length = args.prompt + WARM_UP + args.tokens
        text = tokens_of(args.data, store, length, args.seed)
        planned = plan(args.store, dram=args.dram, predictors=predictors, reuse=args.reuse, store_dir=args.store,
                       context=length, tokens=args.tokens, seed=args.seed)  # fmt: skip
        expected = {row["window"]: row for row in planned["windows"]}
        windows = sorted({k for k in expected if k <= args.most} | {planned["window"]})
        run = RunSpec(dram=args.dram, context=length, depth=planned["depth"], seed=args.seed)
        found = sweep(store, predictors, text, windows, run, args)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 1
    best = min(windows, key=lambda window: found[window]["total_ms"])
    picked = planned["window"]
    for window in windows:
        row, wanted = found[window], expected[window]
        marks = " picked" * (window == picked) + " best" * (window == best)
        fits = "fits" if wanted["fits"] else "cut short"
        ms = f"planned {wanted['total_ms']:8.2f} ms, measured {row['total_ms']:8.2f}"
        print(f"window {window:2d} ({fits:9}): {ms}{marks}")
    record = {
        "benchmark": "plan_choice", "machine": machine(args.store), "model": model_name(store), "dram": args.dram,
        "target": TARGET, "picked": picked, "best": best, "depth": planned["depth"],
        "over_best": found[picked]["total_ms"] / found[best]["total_ms"],
        "windows": [{**expected[k], "planned_ms": expected[k]["total_ms"], **found[k], "window": k} for k in windows],
    }  # fmt: skip
    line = json.dumps(record)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
