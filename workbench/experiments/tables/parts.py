"""The parts that tables are drawn from: each a record of the experiment that measures it."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.ablation import Ablation
from workbench.capture.text import documents
from workbench.engines.budget import plan_dram
from workbench.errors import DataError
from workbench.experiments.ablate import WARM_UP, ablate, beyond_rows, default_rows
from workbench.experiments.coactivation import analyze_coactivation, discard
from workbench.experiments.evaluate import evaluate
from workbench.experiments.flash_bench import bench_flash
from workbench.experiments.long_run import long_run
from workbench.experiments.record import SCHEMA, machine, model_name, run_info
from workbench.experiments.reuse import analyze_reuse
from workbench.experiments.side_by_side import side_by_side
from workbench.experiments.sparsity import analyze_sparsity
from workbench.experiments.tables.subject import Progress, Subject
from workbench.experiments.text import window_and_card
from workbench.experiments.window import window_sweep

ZERO_SHOT = ("arc_easy", "arc_challenge", "hellaswag")
RATES, TASK_RATES = (0.01, 0.02, 0.05, 0.10), (0.05,)
PROMPTS, PROMPT_LETTERS, CONTINUED = 3, 80, 48
CARD = (
    "schema", "model", "model_digest", "store_dtype", "nbytes", "weight_share", "seed", "data", "versions", "commit",
    "date", "synthetic", "sha256",
)  # fmt: skip
_LAYER = (
    "layer", "rank", "false_negative", "false_positive", "predicted", "active", "predicted_over_active",
    "missed_activation", "weight_share", "share_of_weights",
)  # fmt: skip
Measure = Callable[[Subject, Path, Progress | None], dict[str, Any]]
"""(what, a path for what is unfinished, progress) -> the record."""


def _ablation(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    text, card = window_and_card(s.data, s.store, s.prompt + WARM_UP + s.tokens, s.keep)
    return ablate(
        s.store, s.trained, text, rows=table_rows(s), run=s.run, prompt=s.prompt, tokens=s.tokens,
        row_seconds=s.row_seconds, backend=s.backend, predictors_name=s.predictors_name, partial=partial, data=card,
        progress=progress,
    )  # fmt: skip


def table_rows(s: Subject) -> dict[str, Ablation]:
    """The paper's rows, then those beyond it that need no other reader: merged reads, prefetch, and speculative
    decoding where a draft was given."""
    rows = default_rows(s.trained)
    if s.trained is None:
        return rows
    every = beyond_rows(s.run)
    return rows | {name: row for name, row in every.items() if row.predictor == "low_rank" and row.io == "threads"}


def _flash(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    return bench_flash(s.store, seed=s.run.seed, progress=progress)


def _reuse(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    return analyze_reuse(_model(s), s.data, tokens=s.text_tokens, progress=progress)


def _sparsity(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    return analyze_sparsity(_model(s), s.data, tokens=s.text_tokens, progress=progress)


def _coactivation(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    record = analyze_coactivation(
        _model(s), s.data, tokens=s.pair_tokens, window=s.run.window, threads=s.run.compute_threads, partial=partial,
        progress=progress,
    )  # fmt: skip
    discard(partial)
    return record


def _window(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    return window_sweep(
        s.store, _folder(s), s.data, run=s.run, prompt=s.prompt, tokens=s.tokens, row_seconds=s.row_seconds,
        partial=partial, progress=progress,
    )  # fmt: skip


def _long_run(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    prompt, _ = window_and_card(s.data, s.store, s.prompt, s.keep)
    return long_run(
        s.store, s.trained, prompt.tolist(), tokens=s.long_tokens, run=s.run, backend=s.backend,
        predictors_name=s.predictors_name, partial=partial, progress=progress,
    )  # fmt: skip


def _evaluation(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    return evaluate(
        s.store.path, _folder(s), data=s.data, tokens=s.quality_tokens, rates=s.rates(RATES), decode=s.tokens,
        run=_whole(s), partial=partial, progress=progress,
    )  # fmt: skip


def _tasks(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    return _zero_shot(s, ZERO_SHOT, partial, progress)


def _mmlu(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    return _zero_shot(s, ("mmlu",), partial, progress)


def _zero_shot(s: Subject, tasks: tuple[str, ...], partial: Path, progress: Progress | None) -> dict[str, Any]:
    return evaluate(
        s.store.path, _folder(s), tasks=tasks, tasks_dir=s.tasks_dir, limit=s.limit, rates=s.rates(TASK_RATES),
        run=_whole(s), partial=partial, progress=progress,
    )  # fmt: skip


def _texts(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    rate = next(iter(s.rates(TASK_RATES)), None)
    return side_by_side(
        s.store, _folder(s), prompts(s), rate=rate, max_new_tokens=CONTINUED, run=_whole(s),
        progress=progress,
    )  # fmt: skip


def prompts(s: Subject) -> list[str]:
    """The first words of a few documents. DataError where the text has none."""
    found = []
    for document in documents(s.data):
        words = " ".join(document.split())
        if s.keep(document) and len(words) > PROMPT_LETTERS:
            found.append(words[:PROMPT_LETTERS].rpartition(" ")[0] or words[:PROMPT_LETTERS])
        if len(found) == PROMPTS:
            break
    if not found:
        raise DataError(f"{s.data}: no document is longer than {PROMPT_LETTERS} letters; give --data with more text")
    return found


def _card(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    """What the report reads of the predictors' card, without its curves."""
    assert s.trained is not None
    card = s.trained.card
    layers = [{name: entry[name] for name in _LAYER if name in entry} for entry in card["layers"]]
    return {name: card[name] for name in CARD if name in card} | {"layers": layers}


def _dram(s: Subject, partial: Path, progress: Progress | None) -> dict[str, Any]:
    """A record of kind dram: the engine's plan of 'all', by use."""
    ablation = list(default_rows(s.trained).values())[-1]
    plan = plan_dram(s.store, ablation, s.trained, s.run)
    groups = {group.name: group.nbytes for group in s.store.groups}
    embeddings = groups["embed"] + groups["head"]
    return {
        "schema": SCHEMA,
        "kind": "dram",
        "machine": machine(s.store.path),
        "run": run_info(
            model_name(s.store), s.store.spec, s.store.dtype, tokens=0, io=ablation.io, window=s.run.window,
            dram=s.run.dram, seed=s.run.seed, predictors=s.predictors_name,
        ),
        "model_bytes": s.store.model_bytes,
        "budget_bytes": plan.budget_bytes,
        "parts": {
            "predictor_bytes": plan.predictor_bytes,
            "embedding_bytes": embeddings,
            "attention_bytes": plan.resident_bytes - embeddings,
            "slots_bytes": sum(plan.slots) * plan.slot_bytes,
            "kv_bytes": plan.kv_bytes,
            "scratch_bytes": plan.scratch_bytes,
        },
    }  # fmt: skip


def _model(s: Subject) -> str | Path:
    assert s.model is not None  # `lacks` said so before
    return s.model


def _folder(s: Subject) -> Path:
    assert s.predictors is not None
    return s.predictors


def _whole(s: Subject) -> Any:
    """The run with DRAM for the whole model: quality is not to be bounded by memory."""
    return dataclasses.replace(s.run, dram="100%" if s.run.dram.endswith("%") else s.run.dram, context=0)


PARTS: dict[str, Measure] = {
    "dram": _dram,
    "predictors": _card,
    "flash": _flash,
    "ablation": _ablation,
    "sparsity": _sparsity,
    "reuse": _reuse,
    "coactivation": _coactivation,
    "window": _window,
    "long_run": _long_run,
    "side_by_side": _texts,
    "evaluation": _evaluation,
    "tasks": _tasks,
    "mmlu": _mmlu,
}
"""How each part is measured."""

_OF_MODEL = ("sparsity", "reuse", "coactivation")
_OF_PREDICTORS = ("predictors", "window", "side_by_side", "evaluation", "tasks", "mmlu")


def lacks(part: str, subject: Subject, *, asked: bool) -> str:
    """What is missing to measure a part, and how to give it; '' where nothing is. `asked`: the user named a table that
    needs it, so that its data may be fetched from the hub."""
    if part in _OF_MODEL and subject.model is None:
        return "needs the dense checkpoint of the store; pass --model MODEL"
    if part in _OF_PREDICTORS and subject.predictors is None:
        return "needs trained predictors; pass --predictors DIR"
    if part in ("tasks", "mmlu"):
        if importlib.util.find_spec("lm_eval") is None:
            return "needs lm-evaluation-harness; pip install 'flash-workbench[eval]'"
        if subject.tasks_dir is None and not asked:
            return "needs the data of zero-shot tasks; pass --tasks-dir DIR, or name the table to fetch it from the hub"
    return ""
