"""Appendix G: the same prompts continued greedily, dense and with predictors, and where the texts part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.ablation import Ablation
from workbench.engines import open_engine
from workbench.engines.pipeline import FlashEngine
from workbench.errors import DataError
from workbench.experiments.accuracy import lean
from workbench.experiments.record import SCHEMA, machine, model_name, run_info
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

DENSE = Ablation(predictor="off", windowing=False)
Progress = Callable[[str, int, int], None]


def side_by_side(
    store: Store | str | Path,
    predictors: Predictors | str | Path,
    prompts: Sequence[str],
    *,
    rate: float | None = None,
    ablation: Ablation | None = None,
    max_new_tokens: int = 64,
    run: RunSpec | None = None,
    predictors_name: str = "",
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Continue each of `prompts` by `max_new_tokens`, dense and with predictors; a record of kind side_by_side.

    rate: the false-negative rate whose thresholds are used (default: the predictors' own). ablation: the techniques
    of the second column (default: the paper's 'all'). Each pair has both texts token by token, and `diverges_at`, the
    index of the first token that differs, None where none does. Raises DataError (no prompt), PredictorError,
    BudgetError.
    """
    if not prompts:
        raise DataError("side by side: no prompt; give at least one")
    opened = store if isinstance(store, Store) else Store.open(store)
    if isinstance(predictors, str | Path):
        predictors_name = predictors_name or Path(predictors).name
        predictors = Predictors.load(predictors)
    chosen = predictors if rate is None else predictors.at(rate)
    run, techniques = run or RunSpec(), ablation or Ablation()
    dense_run = lean(opened, DENSE, run)
    total = 2 * len(prompts) * max_new_tokens
    columns = []
    for index, (name, settings) in enumerate((("dense", DENSE), ("predicted", techniques))):
        with open_engine(opened, settings, chosen if index else None, run if index else dense_run) as engine:
            texts = []
            for number, prompt in enumerate(prompts):
                begun = (index * len(prompts) + number) * max_new_tokens
                texts.append(_continue(engine, prompt, max_new_tokens, name, begun, total, progress))
        columns.append(texts)
    pairs = [
        {
            "prompt": prompt,
            "dense": dense,
            "predicted": other,
            "diverges_at": diverges(dense["tokens"], other["tokens"]),
        }
        for prompt, dense, other in zip(prompts, *columns, strict=True)
    ]
    if progress:
        progress("done", total, total)
    return {
        "schema": SCHEMA,
        "kind": "side_by_side",
        "machine": machine(opened.path),
        "run": run_info(
            model_name(opened), opened.spec, opened.dtype, tokens=max_new_tokens, io=techniques.io, window=run.window,
            dram=run.dram, seed=run.seed, predictors=predictors_name, command=command,
        ),
        "rate": rate,
        "pairs": pairs,
    }  # fmt: skip


def diverges(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token that differs, or that only one text has; None where both are the same."""
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return at
    return None if len(first) == len(second) else min(len(first), len(second))


def _continue(
    engine: FlashEngine, prompt: str, count: int, name: str, begun: int, total: int, progress: Progress | None
) -> dict[str, Any]:
    steps = []
    for step in engine.generate(prompt, count):
        steps.append(step)
        if progress:
            progress(name, begun + len(steps), total)
    rest = [dataclasses.asdict(step.stats) for step in steps[1:]]  # the first token is the prompt's
    spent = sum(stats["total_ms"] for stats in rest)
    return {
        "tokens": [step.token for step in steps],
        "pieces": [step.text for step in steps],
        "flash_bytes": float(np.mean([stats["read_bytes"] for stats in rest])) if rest else None,
        "tokens_per_s": 1000 * len(rest) / spent if spent else None,
    }
