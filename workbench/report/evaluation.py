"""Records of kind evaluation: accuracy and cost, dense and with predictors. `workbench evaluate --json` writes them."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import RecordError
from workbench.report.paper import reference_path
from workbench.report.reading import _Fields, _head, _parse, _run
from workbench.report.records import PARTS, Run, Timing


@dataclass(frozen=True)
class Metric:
    """A share of one, and its standard error where the harness gives one."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskCard:
    """A task of lm-evaluation-harness as it was run, zero-shot. `source`: the hub's data set or the files."""

    name: str
    source: str
    split: str
    sha256: str
    version: str
    subjects: int
    documents: int
    requests: int


@dataclass(frozen=True)
class TaskResult:
    """One row's result of a task; `truncated` counts requests whose context was cut from the left."""

    documents: int
    truncated: int
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class EvaluationRow:
    """Dense, oracle, or predictors at a false-negative rate.

    rate: the share of active neurons that the thresholds were set to miss, None for dense; false_negative: the share
    that was missed on `quality_tokens` tokens. flash_bytes, reads and neurons: means a token over `decoded` tokens;
    times: ms a token. None where it was not measured.
    """

    name: str
    predictor: str
    rate: float | None
    ablation: Mapping[str, Any]
    perplexity: float | None
    loss: float | None
    false_negative: float | None
    predicted_over_active: float | None
    quality_tokens: int
    flash_bytes: float | None
    reads: float | None
    dram_bytes: int | None
    decoded: int
    window_trims: int
    active: float | None
    predicted: float | None
    loaded: float | None
    in_window: float | None
    times: Mapping[str, Timing]
    tasks: Mapping[str, TaskResult]

    @property
    def total(self) -> float | None:
        """Median total, ms a token."""
        return self.times["total"].median if self.times else None


@dataclass(frozen=True)
class EvaluationRecord:
    """`workbench evaluate --json`. data: the text's card, None without; harness: the version of lm_eval."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    settings: Mapping[str, Any]
    data: Mapping[str, Any] | None
    tasks: tuple[TaskCard, ...]
    harness: str | None
    ffn_neurons: int
    rows: tuple[EvaluationRow, ...]

    @property
    def dense(self) -> EvaluationRow:
        """The row that computes every neuron."""
        return next(row for row in self.rows if row.predictor == "off")

    @property
    def predicted(self) -> tuple[EvaluationRow, ...]:
        """The rows with predictors, by rate."""
        return tuple(sorted((r for r in self.rows if r.predictor == "low_rank"), key=lambda r: r.rate or 0.0))

    def of_dense(self, row: EvaluationRow) -> float | None:
        """A row's bytes loaded a token as a share of the dense row's."""
        base = self.dense.flash_bytes
        return row.flash_bytes / base if base and row.flash_bytes is not None else None

    def near_paper(self) -> EvaluationRow | None:
        """The row whose false-negative rate is nearest to the paper's 5%."""
        return min(self.predicted, key=lambda row: abs((row.rate or 0.0) - 0.05), default=None)


def read_evaluation(record: str | Path | Mapping[str, Any] | EvaluationRecord) -> EvaluationRecord:
    """An evaluation record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, EvaluationRecord) else _parse(record, _evaluation)


def _evaluation(data: Any, source: str) -> EvaluationRecord:
    f = _head(data, source, "evaluation")
    machine, run, settings = f.mapping("machine"), _run(f), f.mapping("settings")
    card = f.take("data")
    if card is not None and not isinstance(card, dict):
        raise f.fail("data", "is neither null nor a JSON object")
    harness = f.take("harness")
    record = EvaluationRecord(
        source, machine, run, settings, card, tuple(map(_card, f.items("tasks", least=0))),
        None if harness is None else str(harness), f.integer("ffn_neurons"), tuple(map(_row, f.items("rows"))),
    )  # fmt: skip
    f.done()
    if not any(row.predictor == "off" for row in record.rows):
        raise f.fail("rows", "have none with predictor 'off', the dense model")
    for row in record.rows:
        if set(row.tasks) != {task.name for task in record.tasks}:
            raise f.fail("rows", f"have other tasks in {row.name!r} than the record's own")
    return record


def _card(f: _Fields) -> TaskCard:
    card = TaskCard(
        f.text("name"), f.text("source"), f.text("split"), f.text("sha256"), f.text("version"),
        f.integer("subjects"), f.integer("documents"), f.integer("requests"),
    )  # fmt: skip
    f.done()
    return card


def _row(f: _Fields) -> EvaluationRow:
    decoded = f.optional("decoded")
    names = [f"{part}_ms{end}" for part in PARTS for end in ("", "_p95")]
    values = {name: f.optional(name) for name in names}
    if decoded and any(value is None for value in values.values()):
        raise f.fail(next(name for name in names if values[name] is None), "is null where tokens were decoded")
    times = {p: Timing(values[f"{p}_ms"] or 0.0, values[f"{p}_ms_p95"] or 0.0) for p in PARTS} if decoded else {}
    dram = f.optional("dram_bytes")
    row = EvaluationRow(
        name=f.text("name"),
        predictor=f.text("predictor"),
        rate=f.optional("rate"),
        ablation=f.mapping("ablation"),
        perplexity=f.optional("perplexity"),
        loss=f.optional("loss"),
        false_negative=f.optional("false_negative"),
        predicted_over_active=f.optional("predicted_over_active"),
        quality_tokens=int(f.optional("quality_tokens") or 0),
        flash_bytes=f.optional("flash_bytes"),
        reads=f.optional("reads"),
        dram_bytes=None if dram is None else int(dram),
        decoded=int(decoded or 0),
        window_trims=int(f.optional("window_trims") or 0),
        active=f.optional("active"),
        predicted=f.optional("predicted"),
        loaded=f.optional("loaded"),
        in_window=f.optional("in_window"),
        times=times,
        tasks={name: _result(value, f, name) for name, value in f.mapping("tasks").items()},
    )
    f.done()
    return row


def _result(data: Any, row: _Fields, name: str) -> TaskResult:
    f = _Fields(data, row.source, f"{row.where}.tasks.{name}")
    metrics = {}
    for metric, value in f.mapping("metrics").items():
        own = _Fields(value, row.source, f"{f.where}.metrics.{metric}")
        metrics[metric] = Metric(own.number("value"), own.optional("stderr"))
        own.done()
    result = TaskResult(f.integer("documents"), f.integer("truncated"), metrics)
    f.done()
    return result


@functools.cache
def paper_accuracy() -> Mapping[str, Mapping[str, float]]:
    """The paper's table 1 by task: accuracy in percent, `dense` and `predicted`."""
    path = reference_path()
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["accuracy"]
        return {row["task"]: {"dense": row["dense"], "predicted": row["predicted"]} for row in rows}
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: not the paper's figures ({error}); install flash-workbench again") from error
