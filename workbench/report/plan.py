"""A plan: what goes where in DRAM, and what each row of the ablation is predicted to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.report.numbers import NONE, count, ms, percent, ratio, size, times
from workbench.report.reading import _Fields, _head, _parse, _run
from workbench.report.records import Run
from workbench.report.table import Column, Line, Table

_COLUMNS = (
    Column("total", "total", "ms"),
    Column("speed", "tokens", "/s"),
    Column("faster", "total", "vs naive"),
    Column("io", "io", "ms", rank=1),
    Column("mem", "mem", "ms", rank=4),
    Column("compute", "compute", "ms", rank=2),
    Column("predictor", "predictor", "ms", rank=5),
    Column("flash", "flash", "a token", rank=3),
    Column("reads", "reads", "a token", rank=6),
    Column("dram", "DRAM", "planned", rank=7),
)
_FIGURES = ("flash_bytes", "reads", "predicted", "active", "loaded", "in_window", "io_ms", "mem_ms", "compute_ms",
            "predictor_ms", "total_ms", "tokens_per_s")  # fmt: skip
_BYTES = ("resident_bytes", "predictor_bytes", "kv_bytes", "scratch_bytes", "slot_bytes", "budget_bytes", "total_bytes")


PAPER_WINDOW = 4


@dataclass(frozen=True)
class PlanRow:
    """A row of the ablation. `figures` a token, as the record names them; empty where the budget is too small for it,
    which `problem` then says."""

    name: str
    ablation: Mapping[str, Any]
    problem: str
    dram_bytes: int | None
    figures: Mapping[str, float]

    def figure(self, name: str) -> float | None:
        """A figure, or None where the row does not fit."""
        return self.figures.get(name)


@dataclass(frozen=True)
class PlanRecord:
    """`workbench plan --json`. dram: bytes of DRAM by use, of 'all'; slots: neurons by layer. windows: those that were
    tried, as (k, bytes of DRAM that it needs, fits, total ms)."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    model_bytes: int
    position: int
    dram: Mapping[str, int]
    slots: tuple[int, ...]
    ffn_neurons: int
    window: int
    window_fits: bool
    depth: int
    compute_threads: int
    windows: tuple[tuple[int, int, bool, float], ...]
    assumed: tuple[str, ...]
    flash_source: str
    reuse_source: str
    rows: tuple[PlanRow, ...]

    def row(self, name: str) -> PlanRow | None:
        """The row of that name, if there is one."""
        return next((row for row in self.rows if row.name == name), None)


def read_plan(record: str | Path | Mapping[str, Any] | PlanRecord) -> PlanRecord:
    """A plan record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, PlanRecord) else _parse(record, _plan)


def _plan(data: Any, source: str) -> PlanRecord:
    f = _head(data, source, "plan")
    dram = _Fields(f.mapping("dram"), source, "dram")
    windows = tuple(
        (w.integer("window"), w.integer("need_bytes"), w.flag("fits"), w.number("total_ms")) for w in f.items("windows")
    )
    record = PlanRecord(
        source=source,
        machine=f.mapping("machine"),
        run=_run(f),
        model_bytes=f.integer("model_bytes"),
        position=f.integer("position"),
        dram={name: dram.integer(name) for name in _BYTES},
        slots=tuple(map(int, dram.numbers("slots"))),
        ffn_neurons=f.integer("ffn_neurons"),
        window=f.integer("window"),
        window_fits=f.flag("window_fits"),
        depth=f.integer("depth"),
        compute_threads=f.integer("compute_threads"),
        windows=windows,
        assumed=_sentences(f),
        flash_source=_Fields(f.mapping("flash"), source, "flash").text("source"),
        reuse_source=_Fields(f.mapping("reuse"), source, "reuse").text("source"),
        rows=tuple(map(_row, f.items("rows"))),
    )
    for name in ("compute", "depths", "slot_neurons", "predicted_share", "active_share"):
        f.take(name)
    f.done()
    return record


def _sentences(f: _Fields) -> tuple[str, ...]:
    found = f.take("assumed")
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise f.fail("assumed", "is not a list of sentences")
    return tuple(found)


def _row(f: _Fields) -> PlanRow:
    name, ablation, problem = f.text("name"), f.mapping("ablation"), f.text("problem")
    if problem:
        row = PlanRow(name, ablation, problem, None, {})
    else:
        row = PlanRow(name, ablation, "", f.integer("dram_bytes"), {figure: f.number(figure) for figure in _FIGURES})
    f.done()
    return row


def plan_table(record: PlanRecord) -> Table:
    """Each row's predicted latency and what it reads; what fits, and what was assumed, below it."""
    naive = record.row("naive")
    base = naive.figure("total_ms") if naive else None
    blocks = tuple((_line(row, base),) for row in record.rows)
    synthetic = ", synthetic weights" if record.run.synthetic else ""
    title = f"Plan: {record.run.model} ({record.run.dtype}{synthetic}, {size(record.model_bytes)}), predicted"
    return Table(title, "row", _COLUMNS, blocks, tuple(_notes(record)))


def _line(row: PlanRow, base: float | None) -> Line:
    if row.problem:
        return Line("measured", row.name, {"total": NONE, "speed": NONE})
    total = row.figures["total_ms"]
    cells = {part: ms(row.figures[f"{part}_ms"]) for part in ("io", "mem", "compute", "predictor", "total")}
    cells |= {
        "speed": _speed(row.figures["tokens_per_s"]),
        "faster": times(ratio(base, total)),
        "flash": size(row.figures["flash_bytes"]),
        "reads": count(row.figures["reads"]),
        "dram": size(row.dram_bytes),
    }
    return Line("measured", row.name, cells)


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def _notes(record: PlanRecord) -> list[str]:
    dram, slots = record.dram, sum(record.slots)
    notes = [
        f"DRAM: {size(dram['total_bytes'])} of {size(dram['budget_bytes'])} ({record.run.dram}): resident weights "
        f"{size(dram['resident_bytes'])}, predictors {size(dram['predictor_bytes'])}, KV cache "
        f"{size(dram['kv_bytes'])}, scratch {size(dram['scratch_bytes'])}, slots {size(slots * dram['slot_bytes'])} "
        f"({percent(slots / record.ffn_neurons)} of the FFN; {_by_layer(record.slots)}).",
        _window_note(record),
        f"Token {record.position + 1}; {record.depth} reads in flight, {record.compute_threads} threads compute. "
        f"Flash: {record.flash_source}.",
    ]
    notes += [f"{row.name} does not fit: {row.problem}" for row in record.rows if row.problem]
    return [*notes, *record.assumed]


def _by_layer(slots: tuple[int, ...]) -> str:
    low, high = min(slots), max(slots)
    return f"{low:,} neurons in each layer" if low == high else f"{low:,} to {high:,} neurons by layer"


def _window_note(record: PlanRecord) -> str:
    fitting = [k for k, _, fits, _ in record.windows if fits]
    needs = [f"k = {k} {size(need)}" for k, need, _, _ in record.windows if k in (0, PAPER_WINDOW, record.window)]
    tail = f"DRAM that a window needs: {', '.join(needs)} (reuse of {record.reuse_source})."
    if not record.window_fits:
        return f"Window: {record.window}, cut short: its oldest neurons leave when there are no slots left. {tail}"
    longest = max(fitting)
    more = "the longest that was tried" if longest == record.windows[-1][0] else "longer ones are cut short"
    return f"Window: {record.window}; up to {longest} fit, {more}. {tail}"


def headline(record: PlanRecord) -> str:
    """The answer in a sentence."""
    row, naive = record.row("+ bundling (all)"), record.row("naive")
    if row is None or row.problem:
        return f"{record.run.model} does not fit in {size(record.dram['budget_bytes'])}."
    faster = times(ratio(naive.figure("total_ms") if naive else None, row.figures["total_ms"]))
    return (
        f"{record.run.model} fits in {size(record.dram['budget_bytes'])}: {ms(row.figures['total_ms'])} ms a token "
        f"predicted, {_speed(row.figures['tokens_per_s'])} tokens/s, {faster} naive; "
        f"`--window {record.window} --depth {record.depth} --dram {record.run.dram}`."
    )
