"""Placement: reads a token before and after neurons that are loaded together were stored side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.report import style
from workbench.report.numbers import NONE, caption, chunk, count, ms, percent, ratio, size, speed
from workbench.report.reading import _Fields, _head, _parse, _run
from workbench.report.records import Run
from workbench.report.table import Column, Line, Table

NAMES = {False: "own order", True: "placed"}


@dataclass(frozen=True)
class PlacementRow:
    """One setting through the engine: counts are means a token, times medians."""

    placement: bool
    gap_bytes: int
    tokens: int
    reads: float
    flash_bytes: float
    loaded: float
    throughput: float | None
    io_ms: float
    io_ms_p95: float
    total_ms: float


@dataclass(frozen=True)
class PlannedRow:
    """Reads and bytes a token by the reader's plan; `name` is 'own order', 'placed', or a method that was compared."""

    name: str
    gap_bytes: int
    reads: float
    flash_bytes: float


@dataclass(frozen=True)
class PlacementLayer:
    """One layer by plan, at the run's own gap: means a token."""

    layer: int
    loaded: float
    own_reads: float
    placed_reads: float
    own_bytes: float
    placed_bytes: float


@dataclass(frozen=True)
class PlacementRecord:
    """A record of kind placement. about: what the order was fitted on, and how. own_runs, placed_runs: the share of
    loaded neurons that come in runs of 1, 2 .. neurons, the last of so many and more."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    about: Mapping[str, Any]
    fitted_own_reads: float
    fitted_placed_reads: float
    gap_bytes: int
    stride: int
    rows: tuple[PlacementRow, ...]
    planned: tuple[PlannedRow, ...]
    by_layer: tuple[PlacementLayer, ...]
    own_runs: tuple[float, ...]
    placed_runs: tuple[float, ...]
    methods: tuple[PlannedRow, ...]

    def measured(self, placement: bool, gap: int | None = None) -> PlacementRow:
        """The row of an order at a gap, the run's own when None. KeyError when there is none."""
        for row in self.rows:
            if row.placement == placement and row.gap_bytes == (self.gap_bytes if gap is None else gap):
                return row
        raise KeyError(gap)

    def plan(self, placement: bool, gap: int) -> PlannedRow | None:
        """What the reader's plan has for an order at a gap."""
        return next((p for p in self.planned if p.name == NAMES[placement] and p.gap_bytes == gap), None)


def read_placement(record: str | Path | Mapping[str, Any] | PlacementRecord) -> PlacementRecord:
    """A placement record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, PlacementRecord) else _parse(record, _placement)


def _placement(data: Any, source: str) -> PlacementRecord:
    f = _head(data, source, "placement")
    fitted = _Fields(f.mapping("fitted"), source, "fitted")
    runs = _Fields(f.mapping("runs"), source, "runs")
    about = f.mapping("placement")
    for name in ("method", "tokens", "loads", "window"):
        if name not in about:
            raise f.fail(f"placement.{name}", "is missing")
    record = PlacementRecord(
        source, f.mapping("machine"), _run(f), about, fitted.number("own_reads"), fitted.number("placed_reads"),
        f.integer("gap_bytes"), f.integer("stride"), tuple(map(_row, f.items("rows"))),
        tuple(map(_planned, f.items("planned"))), tuple(map(_layer, f.items("by_layer"))),
        _shares(runs, "own"), _shares(runs, "placed"), tuple(map(_method, f.items("methods", least=0))),
    )  # fmt: skip
    for part in (f, fitted, runs):
        part.done()
    if len(record.own_runs) != len(record.placed_runs):
        raise runs.fail("placed", "has not as many shares as `own`")
    for placement in (False, True):
        if not any(row.placement == placement and row.gap_bytes == record.gap_bytes for row in record.rows):
            raise f.fail("rows", f"have none with placement={placement} at the run's gap")
    return record


def _row(f: _Fields) -> PlacementRow:
    row = PlacementRow(
        f.flag("placement"), f.integer("gap_bytes"), f.integer("tokens"), f.number("reads"), f.number("flash_bytes"),
        f.number("loaded"), f.optional("throughput"), f.number("io_ms"), f.number("io_ms_p95"), f.number("total_ms"),
    )  # fmt: skip
    f.done()
    return row


def _planned(f: _Fields) -> PlannedRow:
    return _counts(f, NAMES[f.flag("placement")])


def _method(f: _Fields) -> PlannedRow:
    return _counts(f, f.text("method"))


def _counts(f: _Fields, name: str) -> PlannedRow:
    row = PlannedRow(name, f.integer("gap_bytes"), f.number("reads"), f.number("flash_bytes"))
    f.done()
    return row


def _layer(f: _Fields) -> PlacementLayer:
    names = ("loaded", "own_reads", "placed_reads", "own_bytes", "placed_bytes")
    layer = PlacementLayer(f.integer("layer"), *(f.number(name) for name in names))
    f.done()
    return layer


def _shares(f: _Fields, name: str) -> tuple[float, ...]:
    values = f.take(name)
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(v, int | float) and 0 <= v <= 1 for v in values)
    ):
        raise f.fail(name, "is not a list of shares")
    return tuple(map(float, values))


_COLUMNS = (
    Column("reads", "reads", "a token"),
    Column("less", "reads", "vs own"),
    Column("flash", "flash", "a token"),
    Column("loaded", "neurons", "loaded", rank=4),
    Column("throughput", "read", "speed", rank=1),
    Column("io", "io", "ms"),
    Column("p95", "io p95", "ms", rank=3),
    Column("total", "total", "ms", rank=2),
    Column("planned", "reads", "by plan", rank=2),
)


def placement_table(record: PlacementRecord) -> Table:
    """Own order and placed, a block for each merging gap; measured through the engine, with the plan's count beside."""
    blocks = []
    for gap in dict.fromkeys(row.gap_bytes for row in record.rows):
        own = record.measured(False, gap)
        rows = (row for row in record.rows if row.gap_bytes == gap)
        blocks.append(tuple(_line(row, own, record) for row in rows))
    title = f"Placement: {record.run.model} ({record.run.dtype}), held-out text"
    return Table(title, "order, gap merged", _COLUMNS, tuple(blocks), _notes(record))


def _line(row: PlacementRow, own: PlacementRow, record: PlacementRecord) -> Line:
    planned = record.plan(row.placement, row.gap_bytes)
    return Line(
        "measured",
        f"{NAMES[row.placement]}, {chunk(row.gap_bytes)}",
        {
            "reads": count(row.reads),
            "less": _change(row.reads, own.reads) if row.placement else "",
            "flash": size(row.flash_bytes),
            "loaded": count(row.loaded),
            "throughput": speed(row.throughput),
            "io": ms(row.io_ms),
            "p95": ms(row.io_ms_p95),
            "total": ms(row.total_ms),
            "planned": count(planned.reads) if planned else NONE,
        },
    )


def _change(value: float, before: float) -> str:
    """'−14%', '+3.1%'."""
    share = ratio(value, before)
    if share is None:
        return NONE
    return ("−" if share < 1 else "+") + percent(abs(share - 1))


def headline(record: PlacementRecord) -> str:
    """One sentence: what placement did to reads, bytes, throughput and io on held-out text."""
    own, placed = record.measured(False), record.measured(True)
    parts = [
        f"reads a token {count(own.reads)} to {count(placed.reads)} ({_change(placed.reads, own.reads)})",
        f"bytes {size(own.flash_bytes)} to {size(placed.flash_bytes)} ({_change(placed.flash_bytes, own.flash_bytes)})",
        f"read speed {speed(own.throughput)} to {speed(placed.throughput)}",
        f"io {ms(own.io_ms)} to {ms(placed.io_ms)} ms ({_change(placed.io_ms, own.io_ms)})",
    ]
    return f"Placed by {record.about['method']}, held-out text: " + ", ".join(parts) + "."


def _notes(record: PlacementRecord) -> tuple[str, ...]:
    about = record.about
    notes = [
        f"Order: {about['method']}, fitted to the neurons that {about['tokens']:,} tokens of training text load "
        f"({about['loads']}, window {about['window']}); there it takes {count(record.fitted_own_reads)} reads a token "
        f"to {count(record.fitted_placed_reads)}.",
        "Both orders take the same held-out stretches in turn; the plan counts more of that text, in a dense run.",
        "A larger gap merges more reads and brings the records in between too.",
    ]
    if record.methods:
        own = {row.gap_bytes: row.reads for row in record.methods if row.name == "own"}
        found = [
            f"{row.name} {count(row.reads)} reads, {size(row.flash_bytes)}"
            for row in record.methods
            if row.gap_bytes == record.gap_bytes
        ]
        if own:
            notes.append(f"By plan, gap {chunk(record.gap_bytes)}: " + "; ".join(found) + ".")
    return tuple(notes)


def placement_figure(record: PlacementRecord) -> bytes:
    """Reads a token by layer, own order and placed, and how many neurons come with one read."""
    own, placed = record.measured(False), record.measured(True)
    with style.style():
        figure = style.new_figure(
            4.3, "Placement: neurons that are loaded together lie side by side",
            f"Held-out text; gaps up to {chunk(record.gap_bytes)} are read through; through the engine "
            f"{_change(placed.reads, own.reads)} reads, {_change(placed.flash_bytes, own.flash_bytes)} bytes a token",
            caption(record.run, record.machine), record.run.synthetic,
        )  # fmt: skip
        grid = figure.add_gridspec(1, 2, wspace=0.24, **style.area(figure, 0.7, 0.25, above=1.22))
        _layers_panel(figure.add_subplot(grid[0, 0]), record)
        _runs_panel(figure.add_subplot(grid[0, 1]), record)
        return style.png(figure)


def _layers_panel(axes: Axes, record: PlacementRecord) -> None:
    layers = sorted(record.by_layer, key=lambda layer: layer.layer)
    x = [layer.layer for layer in layers]
    own, placed = ([getattr(layer, f"{name}_reads") for layer in layers] for name in ("own", "placed"))
    line = f"by plan, all layers: {count(sum(own))} to {count(sum(placed))}"
    style.panel_title(axes, "Reads a token by layer", line)
    axes.plot(x, own, color=style.VERMILLION, marker="s", label="own order")
    axes.plot(x, placed, color=style.BLUE, marker="o", label="placed")
    axes.set(
        xlabel="layer", ylabel="reads a token", xlim=(min(x) - 0.6, max(x) + 0.6), ylim=(0, 1.25 * max(own + placed))
    )
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.grid(axis="y")
    axes.legend(loc="upper right", ncols=2, fontsize=8.5)


def _runs_panel(axes: Axes, record: PlacementRecord) -> None:
    most = len(record.own_runs)
    style.panel_title(axes, "Neurons that come with one read", "share of all loaded neurons")
    width = 0.4
    bars = (
        (record.own_runs, -width / 2, style.VERMILLION, "////", "own order"),
        (record.placed_runs, width / 2, style.BLUE, "", "placed"),
    )
    for shares, shift, colour, hatch, label in bars:
        axes.bar(
            [i + 1 + shift for i in range(most)], shares, width, label=label, hatch=hatch, edgecolor=colour,
            facecolor="white" if hatch else colour, linewidth=1.0,
        )  # fmt: skip
    axes.set_xticks(range(1, most + 1), [*map(str, range(1, most)), f"{most}+"])
    axes.set(xlabel="neurons in a run", ylabel="share of loaded neurons")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.grid(axis="y")
    axes.legend(loc="upper right", fontsize=8.5)
