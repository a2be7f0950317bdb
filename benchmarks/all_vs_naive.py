"""'all' against 'naive', and against the floor: what the techniques bring at a real geometry, and what is left to gain.

The ceiling first. A token cannot be faster than the bytes it reads from flash at the speed that fio gets for reads of
that size from the same file (32 deep, direct, the better of psync and io_uring), plus the bytes of DRAM its arithmetic
must read (resident matrices, tied head, predictors, up rows of the predicted neurons, down rows of those that fire) at
the speed of a plain multi-threaded read. That is the sequential floor; `times_fio_floor` is the measured total over it.
On a busy machine fio may get less than the row itself did, and what was beaten is no floor: `times_floor` takes the
faster of the two, so it is never the smaller figure.

Drives drift within a minute, so fio runs before and after every row and the row's floor takes the mean of the two, and
each ratio is formed within a round before the median over rounds is taken. Every row takes the same random tokens after
the same prompt. Random tokens at a synthetic geometry: so the reuse that a row saw (share of the FFN new a token, kept
in the slots, predicted) stands beside its time; without it the time means nothing.

    workbench synth opt-1.3b STORE --dtype float32
    python benchmarks/all_vs_naive.py STORE STORE-predictors [--dram 60%] [--rounds 3] [--out record.json]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from reader_vs_fio import DEPTH, FIO, fio

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.errors import WorkbenchError
from workbench.experiments.ablate import SEQUENTIAL, WARM_UP, ablate
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

ALL, COALESCED = "+ bundling (all)", "all + coalesce"
ROWS: dict[str, Ablation] = {**PAPER_ROWS, COALESCED: replace(PAPER_ROWS[ALL], coalesce=True)}
TARGETS = {"all_against_naive": 10.0, "mem_share": 0.05, "times_floor": 1.5}


def flash_speed(store: Store, ablation: Ablation, seconds: float, seed: int) -> float:
    """Bytes/s of fio on the file that the row reads, at the size of its reads."""
    if ablation.predictor == "off":
        path, block = store.split_path, SEQUENTIAL
    elif ablation.bundling:
        path, block = store.bundled_path, store.layout.bundle_stride
    else:
        path, block = store.split_path, store.layout.row_stride
    block = max(4096, block // 4096 * 4096)
    return max(fio(path, engine, block, seconds, seed) for engine in FIO)


def memory_bytes(store: Store, predictors: Predictors, row: dict[str, Any]) -> float:
    """Bytes of DRAM that a token's arithmetic must read. Of the embeddings only a tied head reads one whole."""
    tensors = {name: slot.nbytes for group in store.groups for name, slot in group.tensors.items()}
    looked_up = {
        name for name in store.group("embed").tensors if "embed_positions" in name or "lm_head.weight" in tensors
    }
    resident = sum(nbytes for name, nbytes in tensors.items() if name not in looked_up)
    factors = predictors.nbytes if row["ablation"]["predictor"] == "low_rank" else 0
    fired = row["active"] * (store.layout.parts - 1)
    return resident + factors + (row["predicted"] + fired) * store.layout.row_bytes


def measure(
    name: str, store: Store, predictors: Predictors, text: np.ndarray, run: RunSpec, args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """One row, between two runs of fio."""
    ablation = ROWS[name]
    few = ablation.predictor == "off"
    before = flash_speed(store, ablation, args.fio_seconds, seed)
    record = ablate(
        store, predictors, text, rows={name: ablation}, run=run, prompt=args.prompt,
        tokens=args.dense_tokens if few else args.tokens, predictors_name=args.predictors.name,
    )  # fmt: skip
    after = flash_speed(store, ablation, args.fio_seconds, seed + 1)
    row, ffn = record["rows"][0], store.spec.ffn_neurons
    flash, memory = (before + after) / 2, record["machine"]["memory_bytes_per_s"]
    row["fio_bytes_per_s"], row["memory_bytes_per_s"] = flash, memory
    row["flash_floor_ms"] = 1000 * row["flash_bytes"] / flash
    row["memory_floor_ms"] = 1000 * memory_bytes(store, predictors, row) / memory
    row["floor_ms"] = row["flash_floor_ms"] + row["memory_floor_ms"]
    row["overlapped_floor_ms"] = max(row["flash_floor_ms"], row["memory_floor_ms"])
    row["times_fio_floor"] = row["total_ms"] / row["floor_ms"]
    beaten = 1000 * row["flash_bytes"] / max(flash, row["throughput"] or 0.0)
    row["times_floor"] = row["total_ms"] / (beaten + row["memory_floor_ms"])
    row["mem_share"] = row["mem_ms"] / row["total_ms"]
    row["predictor_share"] = row["predictor_ms"] / row["compute_ms"]
    row["new_share"], row["kept_share"] = row["loaded"] / ffn, row["in_window"] / ffn
    row["predicted_share"], row["active_share"] = row["predicted"] / ffn, row["active"] / ffn
    row["machine"], row["run"] = record["machine"], record["run"]
    return row


HEAD = (
    f"{'row':18} {'new':>6} {'kept':>6} {'pred.':>6} {'trims':>5} | {'io':>7} {'mem':>6} {'comp.':>7} {'pred.':>6} "
    f"{'total ms':>8} | {'flash MB':>8} {'GB/s':>5} {'fio':>5} | {'floor: io':>9} {'mem':>6} {'times':>5} {'(fio)':>6}"
)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['name']:18} {row['new_share']:6.1%} {row['kept_share']:6.1%} {row['predicted_share']:6.1%} "
        f"{row['window_trims']:5d} | {row['io_ms']:7.1f} {row['mem_ms']:6.2f} {row['compute_ms']:7.1f} "
        f"{row['predictor_ms']:6.2f} {row['total_ms']:8.1f} | {row['flash_bytes'] / 1e6:8.1f} "
        f"{(row['throughput'] or 0) / 1e9:5.2f} {row['fio_bytes_per_s'] / 1e9:5.2f} | {row['flash_floor_ms']:9.1f} "
        f"{row['memory_floor_ms']:6.1f} {row['times_floor']:5.2f} {row['times_fio_floor']:6.2f}"
    )


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds of what each round gives."""

    def median(of: Any) -> float | None:
        values = [of(rows) for rows in rounds]
        return statistics.median(values) if values and None not in values else None

    def ratio(rows: dict[str, dict[str, Any]], name: str) -> float | None:
        return rows["naive"]["total_ms"] / rows[name]["total_ms"] if "naive" in rows else None

    return {
        name: {
            "against_naive": median(lambda rows, n=name: ratio(rows, n)),
            **{
                key: median(lambda rows, n=name, k=key: rows[n][k])
                for key in (
                    "total_ms", "io_ms", "mem_ms", "compute_ms", "predictor_ms", "floor_ms", "times_floor",
                    "times_fio_floor",
                    "mem_share",
                    "predictor_share", "new_share", "kept_share", "predicted_share", "active_share",
                )
            },
        }
        for name in rounds[0]
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("predictors", type=Path)
    parser.add_argument("--dram", default="60%", help="budget; half of the model does not hold this window at OPT-1.3B")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=48, help="counted a row")
    parser.add_argument("--dense-tokens", type=int, default=4, help="counted in rows without a predictor")
    parser.add_argument("--fio-seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not shutil.which("fio"):
        print("fio is not installed; install it with the system's package manager", file=sys.stderr)
        return 1
    try:
        store, predictors = Store.open(args.store), Predictors.load(args.predictors)
        length = args.prompt + WARM_UP + max(args.tokens, args.dense_tokens)
        text = np.random.default_rng(args.seed).integers(3, store.spec.vocab_size, length)
        run = RunSpec(window=args.window, dram=args.dram, context=length, depth=DEPTH, seed=args.seed)
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}\n{HEAD}", flush=True)
            rounds.append({})
            for name in args.rows:
                rounds[-1][name] = measure(name, store, predictors, text, run, args, seed=10 * number + 1)
                print(line(rounds[-1][name]), flush=True)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 1
    medians = summary(rounds)
    for name in (ALL, COALESCED):
        if name in medians:
            m = medians[name]
            against = f"{m['against_naive']:.1f}x naive, " if m["against_naive"] else ""
            floor = f"{m['times_floor']:.2f} times the floor ({m['times_fio_floor']:.2f} by fio)"
            print(f"{name}: {against}{floor}, mem {m['mem_share']:.1%} of the token")
    first = next(iter(rounds[0].values()))
    machine, about = first["machine"], first["run"]
    for row in (row for rows in rounds for row in rows.values()):
        del row["machine"], row["run"]
    record = {
        "benchmark": "all_vs_naive", "machine": machine, "run": {**about, "tokens": args.tokens}, "depth": DEPTH,
        "dram_bytes": first["dram_bytes"], "targets": TARGETS, "medians": medians,
        "rounds": [list(rows.values()) for rows in rounds],
    }  # fmt: skip
    text_out = json.dumps(record)
    if args.out:
        args.out.write_text(text_out + "\n")
    print(text_out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
