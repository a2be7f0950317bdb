"""Figure 7: what each neuron window needs of DRAM, whether it fits a budget, and the latency that it gives."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.engines.budget import DramPlan, plan_dram
from workbench.errors import AblationError
from workbench.experiments.ablate import WARM_UP, Progress, ablate
from workbench.experiments.record import SCHEMA, commit, machine, model_name, run_info
from workbench.experiments.text import window_and_card
from workbench.experiments.unfinished import Measured
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec, parse_dram

WINDOWS = (0, 1, 2, 4, 8, 16, 32)


def window_sweep(
    store: Store | str | Path,
    predictors: Predictors | str | Path,
    data: str | Path,
    *,
    windows: Sequence[int] = WINDOWS,
    run: RunSpec | None = None,
    ablation: Ablation | None = None,
    prompt: int = 64,
    tokens: int = 64,
    row_seconds: float = 120.0,
    partial: Path | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A record of kind window, one row for each neuron window of `windows`; the rest of `run` is the same for all.

    A row says what the window needs if nothing is cut short (`slot_bytes` for the neurons that it holds by calibration
    and `need_bytes` with all else that stays in DRAM), whether that `fits` the budget run.dram, and what an engine
    within the budget then measured on the text (`measured`, a row as `ablate` has it). Where a window does not fit, the
    engine cuts it short, and `measured.window_trims` counts how often. `largest_fitting` is the longest window that
    fits, null if none does. `ablation` is the paper's 'all' unless given; it needs a low-rank predictor and windowing.

    Finished rows are kept in the file `partial`: the same request made again goes on after them.
    """
    opened = store if isinstance(store, Store) else Store.open(store)
    trained = predictors if isinstance(predictors, Predictors) else Predictors.load(predictors)
    run, ablation = run or RunSpec(), ablation or PAPER_ROWS["+ bundling (all)"]
    if not ablation.windowing or ablation.predictor != "low_rank":
        raise AblationError("ablation: a window sweep needs windowing=True and predictor='low_rank'; leave both on")
    if not windows or len(set(windows)) != len(windows):
        raise AblationError(f"windows: {list(windows)} is not a list of different numbers of tokens; give some")
    text, card = window_and_card(data, opened, prompt + WARM_UP + tokens)
    runs = [dataclasses.replace(run, window=window) for window in sorted(windows)]
    plans = [plan_whole(opened, ablation, trained, each) for each in runs]
    for each in runs:
        plan_dram(opened, ablation, trained, each)  # refused now, not after the first rows
    budget = parse_dram(run.dram, opened.model_bytes)
    done = Measured(partial, _request(opened, trained, text, runs, ablation, prompt, row_seconds))
    rows = []
    for index, (each, plan) in enumerate(zip(runs, plans, strict=True)):
        name = f"k = {each.window}"
        measured = done.get(name, "measured")
        if measured is None:
            measured = _measure(name, opened, trained, text, each, ablation, prompt, tokens, row_seconds,
                                _share(progress, index, len(runs)))  # fmt: skip
            done.put(name, "measured", measured)
        rows.append(_row(each, plan, budget, measured))
    if progress:
        progress("done", len(runs), len(runs))
    fitting = [row["window"] for row in rows if row["fits"]]
    return {
        "schema": SCHEMA,
        "kind": "window",
        "machine": machine(opened.path),
        "run": run_info(
            model_name(opened), opened.spec, opened.dtype, tokens=len(text) - prompt - WARM_UP, io=ablation.io,
            dram=run.dram, seed=run.seed, predictors=_name(predictors), command=command, data=card,
        ),
        "budget_bytes": budget,
        "model_bytes": opened.model_bytes,
        "largest_fitting": max(fitting, default=None),
        "rows": rows,
    }  # fmt: skip


def plan_whole(store: Store, ablation: Ablation, predictors: Predictors, run: RunSpec) -> DramPlan:
    """What a window needs when DRAM is no bound: each layer's slots by the calibration of its predictor."""
    boundless = 4 * store.model_bytes + (1 << 40)
    return plan_dram(store, ablation, predictors, dataclasses.replace(run, dram=f"{boundless}B"))


def _row(run: RunSpec, plan: DramPlan, budget: int, measured: dict[str, Any]) -> dict[str, Any]:
    slots = sum(plan.slots)
    return {
        "window": run.window,
        "slots": slots,
        "slot_bytes": slots * plan.slot_bytes,
        "fixed_bytes": plan.fixed,
        "need_bytes": plan.total,
        "fits": plan.total <= budget,
        "measured": measured,
    }


def _measure(
    name: str,
    store: Store,
    predictors: Predictors,
    text: np.ndarray,
    run: RunSpec,
    ablation: Ablation,
    prompt: int,
    tokens: int,
    row_seconds: float,
    progress: Progress | None,
) -> dict[str, Any]:
    record = ablate(
        store, predictors, text, rows={name: ablation}, run=run, prompt=prompt, tokens=tokens, row_seconds=row_seconds,
        progress=progress,
    )  # fmt: skip
    return record["rows"][0]


def _share(progress: Progress | None, index: int, rows: int) -> Progress | None:
    """Progress of one row as progress of all."""
    if progress is None:
        return None

    def tick(what: str, done: int, total: int) -> None:
        if what != "done":
            progress(what, index * total + done, rows * total)

    return tick


def _name(predictors: Predictors | str | Path) -> str:
    return "" if isinstance(predictors, Predictors) else Path(predictors).name


def _request(
    store: Store,
    predictors: Predictors,
    text: np.ndarray,
    runs: Sequence[RunSpec],
    ablation: Ablation,
    prompt: int,
    row_seconds: float,
) -> str:
    parts = {
        "store": store.digest,
        "predictors": [[layer.threshold for layer in predictors.layers], predictors.model_digest],
        "text": hashlib.sha256(np.ascontiguousarray(text).tobytes()).hexdigest(),
        "runs": [dataclasses.asdict(each) for each in runs],
        "ablation": dataclasses.asdict(ablation),
        "asked": [prompt, row_seconds],
        "commit": commit(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
