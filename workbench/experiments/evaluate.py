"""Accuracy from the pipeline that really runs: perplexity and zero-shot tasks, dense and with predictors.

Tables 1 and 4 of the paper and more: rows are the dense model, the oracle's true neurons, and the predictors at
several false-negative rates. Nothing is masked in a dense model: each figure comes from the engine, where each token,
a prompt's too, is computed with its own neurons only. Bytes and times are those of a real decode on the same text.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.ablation import Ablation, IoEngine
from workbench.capture.text import documents as read_documents
from workbench.engines import open_engine
from workbench.engines.budget import context_tokens, plan_dram
from workbench.engines.pipeline import FlashEngine
from workbench.engines.tokenizer import store_tokenizer
from workbench.errors import DataError
from workbench.experiments.accuracy import (
    NEURONS,
    PROMPT,
    TIMES,
    WARM_UP,
    Row,
    Text,
    Tick,
    decode_cost,
    lean,
    missed,
    perplexity,
    read_text,
    run_task,
)
from workbench.experiments.convert import convert
from workbench.experiments.harness_tasks import LoadedTask, load_tasks, require_harness
from workbench.experiments.record import SCHEMA, commit, machine, model_name, run_info
from workbench.experiments.unfinished import Measured
from workbench.flash.store import Store
from workbench.models.hub import locate
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import Predictors
from workbench.spec import DType, RunSpec

RATES = (0.01, 0.02, 0.05, 0.10)
STORES = Path("runs/stores")
RUN = RunSpec(dram="100%", context=2048)
"""The whole model's bytes, so that accuracy is not bounded by memory."""
TOKENS = 16384
SEQUENCE = 512
DECODE, LEAST = 64, 4
AUDIT = 512
OF_TEXT = (
    "perplexity", "loss", "false_negative", "predicted_over_active", "quality_tokens", "flash_bytes", "reads",
    "dram_bytes", "decoded", "window_trims", *NEURONS, *(f"{part}_ms{end}" for part in TIMES for end in ("", "_p95")),
)  # fmt: skip
"""Fields of a row that come from text; null where none was given."""
Progress = Callable[[str, int, int], None]


def evaluate(
    model: str | Path,
    predictors: Predictors | str | Path | None = None,
    *,
    store: str | Path | None = None,
    data: str | Path | None = None,
    tasks: Sequence[str] = (),
    tasks_dir: str | Path | None = None,
    rates: Sequence[float] = RATES,
    tokens: int = TOKENS,
    documents: tuple[int, int | None] = (0, 200),
    decode: int = DECODE,
    limit: int | None = None,
    run: RunSpec = RUN,
    io: IoEngine = "threads",
    dtype: DType | None = None,
    predictors_name: str = "",
    tell: Callable[[str], object] | None = None,
    progress: Progress | None = None,
    partial: Path | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Measure `model` dense, with the oracle and with predictors at each of `rates`; a record of kind evaluation.

    model: a flash store, or a checkpoint or hub id, which is converted to `store` (default runs/stores/NAME; `tell`
    gets a line that says so). data: text for perplexity and for the decode that bytes and times come from: at most
    `tokens` tokens of the documents `documents[0]` up to `documents[1]`. tasks: names of lm-evaluation-harness,
    zero-shot; tasks_dir: a directory with their data, else the hub. limit: documents of each task, of each subject
    in a group. decode: tokens timed; io: how flash is read
    meanwhile. partial: a file that keeps what is finished; the same request goes on there.

    Raises DataError (no text and no task, data or lm_eval missing), CheckpointError, StoreError, PredictorError for
    a rate that the predictors have no thresholds for, BudgetError.
    """
    if data is None and not tasks:
        raise DataError("evaluate: nothing to measure; give --data with text for perplexity, or --tasks")
    if isinstance(predictors, str | Path):
        predictors_name = predictors_name or Path(predictors).name
        predictors = Predictors.load(predictors)
    if documents[1] is not None and documents[1] <= documents[0]:
        raise DataError(f"evaluate: documents {documents[0]} to {documents[1]} are none; give --documents FROM TO")
    rows = [
        dataclasses.replace(r, ablation=dataclasses.replace(r.ablation, io=io)) for r in table_rows(predictors, rates)
    ]
    # What can fail at once does so before a conversion of hours.
    loaded = load_tasks(list(dict.fromkeys(tasks)), tasks_dir, limit) if tasks else []
    if data is not None and next(iter(read_documents(data, *documents)), None) is None:
        raise DataError(f"{data}: no document from number {documents[0]} on; give --documents FROM TO within it")
    opened = open_store(model, store, dtype=dtype, tell=tell, progress=progress)
    text = None
    if data is not None:
        text = read_text(data, store_tokenizer(opened), documents, tokens, min(SEQUENCE, context_tokens(opened, run)))
        _check_decode(text, data)
    _check_rows(opened, rows, run)
    settings = {
        "rates": list(rates), "tokens": tokens, "documents": list(documents), "decode": decode, "limit": limit,
        "io": io, "sequence": min(SEQUENCE, context_tokens(opened, run)), "prompt": PROMPT, "warm_up": WARM_UP,
        "context": context_tokens(opened, run),
    }  # fmt: skip
    measured = Measured(partial, _request(opened, predictors, text, loaded, run, settings))
    work = _Work(opened, run, text, loaded, decode, limit, measured, progress, len(rows))
    found = [work.row(row) for row in rows]
    if progress:
        progress("done", work.total, work.total)
    return {
        "schema": SCHEMA,
        "kind": "evaluation",
        "machine": machine(opened.path),
        "run": run_info(
            model_name(opened), opened.spec, opened.dtype, tokens=text.tokens if text else 0, io=rows[0].ablation.io,
            window=run.window, dram=run.dram, seed=run.seed, predictors=predictors_name, command=command,
        ),
        "settings": settings,
        "data": None if text is None else {**text.card.as_dict(), "windows": len(text.windows), "start": documents[0]},
        "tasks": [task.card() for task in loaded],
        "harness": require_harness() if loaded else None,
        "ffn_neurons": opened.spec.ffn_neurons,
        "rows": found,
    }  # fmt: skip


def table_rows(predictors: Predictors | None, rates: Sequence[float]) -> list[Row]:
    """Dense, oracle, then the predictors at each rate. PredictorError for a rate without thresholds."""
    rows = [
        Row("dense", Ablation(predictor="off", windowing=False)),
        Row("oracle", Ablation(predictor="oracle"), rate=0.0),
    ]
    if predictors is None:
        return rows
    return rows + [
        Row(f"predicted, {100 * rate:g}% missed", Ablation(), predictors.at(rate), rate) for rate in sorted(rates)
    ]


def open_store(
    model: str | Path,
    store: str | Path | None = None,
    *,
    dtype: DType | None = None,
    tell: Callable[[str], object] | None = None,
    progress: Progress | None = None,
) -> Store:
    """`model` itself where it is a flash store, else the store that it is converted to, made or completed first."""
    if (Path(model) / "store.json").is_file():
        return Store.open(model)
    target = Path(store) if store is not None else STORES / Path(locate(model)[1]).name
    if tell:
        known = (target / "store.json").is_file()
        tell(f"{model}: a checkpoint; {'using its' if known else 'converting it to a'} flash store {target}")
    return convert(model, target, dtype=dtype, progress=progress)


def _check_rows(store: Store, rows: Sequence[Row], run: RunSpec) -> None:
    """What would fail in a later row, fails before the first one."""
    for row in rows:
        if row.predictors is not None:
            rows_of = (store.activated_rows(layer) for layer in range(store.spec.num_layers))
            row.predictors.check(store.spec, fingerprint(rows_of))
        plan_dram(store, row.ablation, row.predictors, run)


def _check_decode(text: Text, data: str | Path) -> None:
    have, need = len(text.windows[0]) if text.windows else 0, PROMPT + WARM_UP + LEAST
    if have < need:
        raise DataError(
            f"{data}: {have} tokens in the context, and a decode after a prompt takes at least {need}; "
            "give --data with more text or a larger --context"
        )


# one row


class _Work:
    """Measures rows, one engine open at a time. What `measured` has already is not done again."""

    def __init__(
        self,
        store: Store,
        run: RunSpec,
        text: Text | None,
        tasks: list[LoadedTask],
        decode: int,
        limit: int | None,
        measured: Measured,
        progress: Progress | None,
        rows: int,
    ):
        self.store, self.run, self.text, self.tasks = store, run, text, tasks
        self.decode, self.limit, self.measured, self.progress = decode, limit, measured, progress
        self.decoded = min(len(text.windows[0]), PROMPT + WARM_UP + decode) - PROMPT if text else 0
        self.audited = min(len(text.windows[0]), AUDIT) if text else 0
        each = (text.tokens + self.decoded + self.audited if text else 0) + sum(task.requests for task in tasks)
        self.done, self.total = 0, rows * each

    def row(self, row: Row) -> dict[str, Any]:
        """One row of the record."""
        found: dict[str, Any] = {
            "name": row.name,
            "predictor": row.ablation.predictor,
            "rate": row.rate,
            "ablation": dataclasses.asdict(row.ablation),
            **dict.fromkeys(OF_TEXT),
        }
        # What comes out does not depend on how flash is read, and a prompt's neurons are read again for each prompt.
        cached = dataclasses.replace(row, ablation=dataclasses.replace(row.ablation, io="buffered"))
        with _Lazy(self.store, cached, self.run) as engine:
            if self.text is not None:
                text = self.text
                found |= self._part(row, "perplexity", text.tokens, lambda tick: self._perplexity(engine, row, tick))
                found |= self._part(row, "quality", self.audited, lambda tick: self._quality(engine, row, tick))
            found["tasks"] = {
                task.name: self._part(
                    row, f"task {task.name}", task.requests, functools.partial(self._task, engine, row, task)
                )
                for task in self.tasks
            }
            if self.text is not None and row.ablation.predictor != "off":
                found |= self._part(row, "decode", self.decoded, lambda tick: self._decode(engine(), row, tick))
        if self.text is not None and row.ablation.predictor == "off":
            # All of its neurons come from flash for each token, as many as that are: none stays resident.
            with _Lazy(self.store, row, lean(self.store, row.ablation, self.run)) as engine:
                found |= self._part(row, "decode", self.decoded, lambda tick: self._decode(engine(), row, tick))
        return found

    def _part(self, row: Row, part: str, units: int, measure: Callable[[Tick], dict[str, Any]]) -> dict[str, Any]:
        """A part of a row, taken over or measured now; `units` of progress."""
        begun, known = self.done, self.measured.get(row.name, part)
        if known is None:
            known = measure(functools.partial(self._advance, f"{row.name}: {part}", begun, begun + units))
            self.measured.put(row.name, part, known)
        self._advance(f"{row.name}: {part}", begun, begun + units, units)
        return known

    def _advance(self, what: str, begun: int, end: int, count: int) -> None:
        self.done = min(end, max(begun, self.done) + count)
        if self.progress:
            self.progress(what, self.done, self.total)

    def _perplexity(self, engine: Callable[[], FlashEngine], row: Row, tick: Tick) -> dict[str, Any]:
        assert self.text is not None
        with self.measured.answers(row.name, "perplexity") as known:
            return perplexity(engine, self.text, tick, known, self.measured.write)

    def _quality(self, engine: Callable[[], FlashEngine], row: Row, tick: Tick) -> dict[str, Any]:
        assert self.text is not None
        return missed(engine(), row, self.text.windows[0][: self.audited])

    def _decode(self, engine: FlashEngine, row: Row, tick: Tick) -> dict[str, Any]:
        assert self.text is not None
        engine.ablation = row.ablation
        return decode_cost(engine, self.text.windows[0][: PROMPT + self.decoded], tick)

    def _task(self, engine: Callable[[], FlashEngine], row: Row, task: LoadedTask, tick: Tick) -> dict[str, Any]:
        from workbench.experiments.harness import EngineLM

        with self.measured.answers(row.name, task.name) as known:
            model = EngineLM(engine(), known=known, save=self.measured.write, tick=tick)
            return run_task(model, task, self.limit)


class _Lazy:
    """An engine that is loaded when it is first called for, so that a finished row costs nothing."""

    def __init__(self, store: Store, row: Row, run: RunSpec) -> None:
        self.store, self.row, self.run = store, row, run
        self.engine: FlashEngine | None = None

    def __call__(self) -> FlashEngine:
        if self.engine is None:
            self.engine = open_engine(self.store, self.row.ablation, self.row.predictors, self.run)
        return self.engine

    def __enter__(self) -> _Lazy:
        return self

    def __exit__(self, *_: object) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def _request(
    store: Store,
    predictors: Predictors | None,
    text: Text | None,
    tasks: list[LoadedTask],
    run: RunSpec,
    settings: dict[str, Any],
) -> str:
    """A digest of everything that decides a result, so that only parts of the same request are taken over."""
    parts = {
        "store": store.digest,
        "predictors": predictors and [predictors.model_digest, predictors.card["sha256"]],
        "text": text and [text.card.as_dict(), hashlib.sha256(json.dumps(text.windows).encode()).hexdigest()],
        "tasks": [task.card() for task in tasks],
        "run": dataclasses.asdict(run),
        "settings": settings,
        "commit": commit(),
        "harness": require_harness() if tasks else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
