"""Figure 8: flash latency of each token over a long text, greedy and nucleus sampling."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.report import style
from workbench.report.numbers import NONE, caption, count, ms, ratio, size, times
from workbench.report.reading import _Fields, _head, _parse, _run
from workbench.report.records import Run
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import NO_NUMBER, NOT_MEASURED, Drawn, Entry, Picture, Records, measured, says

TITLE = "Figure 8: flash latency over a long text"
METHOD = (
    "One text goes on from a prompt; each token's time of reading flash as the engine counts it. Drift: the median of "
    "the last stretch over that of the first one after the warm-up. The floor of io is a token's bytes at the speed "
    "that random reads of that size reach."
)
SMOOTHED = 25
"""Tokens of the running median that the figure draws."""


@dataclass(frozen=True)
class LongRow:
    """One way of sampling. io_ms, total_ms, flash_bytes: of each token in order. rss: (token, bytes). first_ms,
    first_bytes: the prompt and the first token together. flash_rate: bytes/s of random reads, None where not probed."""

    name: str
    temperature: float
    top_p: float
    first_ms: float | None
    first_bytes: float | None
    io_ms: tuple[float, ...]
    total_ms: tuple[float, ...]
    flash_bytes: tuple[float, ...]
    rss: tuple[tuple[int, int], ...]
    flash_rate: float | None

    def stretches(self, values: Sequence[float], warm_up: int, stretch: int) -> tuple[float, float] | None:
        """Medians of the first stretch after the warm-up and of the last; None where there are too few tokens."""
        counted = values[warm_up:]
        if len(counted) < 2:
            return None
        length = min(stretch, max(1, len(counted) // 2))
        return statistics.median(counted[:length]), statistics.median(counted[-length:])


@dataclass(frozen=True)
class LongRunRecord:
    """A record of kind long_run. warm_up: tokens before the first stretch; stretch: tokens of each."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    warm_up: int
    stretch: int
    rows: tuple[LongRow, ...]


def read_long_run(record: str | Path | Mapping[str, Any]) -> LongRunRecord:
    """A long run's record, from a path or a parsed object. Raises RecordError, one line."""
    return _parse(record, _long_run)


def _long_run(data: Any, source: str) -> LongRunRecord:
    f = _head(data, source, "long_run")
    warm_up, stretch = f.integer("warm_up"), f.integer("stretch")
    return LongRunRecord(source, f.mapping("machine"), _run(f), warm_up, stretch, tuple(map(_row, f.items("rows"))))


def _row(f: _Fields) -> LongRow:
    # Fields beside these may stand in a row: drifts as the experiment printed them, the text.
    io = f.numbers("io_ms")
    if not io:
        raise f.fail("io_ms", "is empty: no token was counted")
    marks = f.items("rss", least=0) if "rss" in f.data else []
    return LongRow(
        f.text("name"),
        f.number("temperature"),
        f.number("top_p", 1),
        f.optional("first_token_ms") if "first_token_ms" in f.data else None,
        f.optional("first_token_bytes") if "first_token_bytes" in f.data else None,
        io,
        f.numbers("total_ms", len(io)),
        f.numbers("flash_bytes", len(io)),
        tuple((mark.integer("token"), mark.integer("rss_bytes")) for mark in marks),
        f.optional("flash_bytes_per_s") if "flash_bytes_per_s" in f.data else None,
    )


def draw(records: Records) -> Drawn:
    """From a record of kind long_run."""
    record = read_long_run(records["long_run"])
    parts = []
    for row in record.rows:
        ends = row.stretches(row.io_ms, record.warm_up, record.stretch)
        if ends:
            read = _drift(row.stretches(row.flash_bytes, record.warm_up, record.stretch))
            parts.append(f"{row.name} {ms(ends[0])} to {ms(ends[1])} ms ({_drift(ends)}, flash bytes {read})")
    headline = f"Flash latency from the first stretch to the last: {'; '.join(parts) or NOT_MEASURED}; the paper: flat."
    return Drawn(
        "figure8", TITLE, headline, f"{says('figure8')} {NO_NUMBER}", METHOD, (measured("long run", record),),
        (_table(record),), (Picture("Flash latency of each token", long_run_figure(record)),),
        notes=(
            "The paper prints no number; it says flat, which is a drift of 1.0×.",
            f"The paper's text has 1,000 tokens, this one {record.run.tokens:,}.",
        ),
    )  # fmt: skip


def _table(record: LongRunRecord) -> Table:
    columns = (
        Column("first", "prompt and", "first token, ms"),
        Column("early", "io, first", "stretch, ms"),
        Column("late", "io, last", "stretch, ms"),
        Column("drift", "drift", "io"),
        Column("paper", "drift", "paper"),
        Column("bytes", "flash", "a token", group=1),
        Column("byte_drift", "drift", "bytes", group=1),
        Column("floor", "floor of io", "ms", group=1),
        Column("over", "io /", "floor", group=1),
        Column("total", "total", "ms, median", group=1),
        Column("rss", "peak RSS", "over the text", group=1),
        Column("tokens", "tokens", "", group=1),
    )
    blocks = tuple((Line("measured", row.name, _cells(record, row)),) for row in record.rows)
    note = f"A stretch is {record.stretch} tokens, the first after {record.warm_up} of warm-up; medians."
    return Table(f"A long text: {record.run.model} ({record.run.dtype})", "sampling", columns, blocks, (note,))


def _cells(record: LongRunRecord, row: LongRow) -> dict[str, str]:
    io = row.stretches(row.io_ms, record.warm_up, record.stretch)
    read = row.stretches(row.flash_bytes, record.warm_up, record.stretch)
    late_bytes = read[1] if read else None
    floor = 1000 * late_bytes / row.flash_rate if late_bytes is not None and row.flash_rate else None
    return {
        "first": NOT_MEASURED if row.first_ms is None else ms(row.first_ms),
        "early": ms(io[0] if io else None),
        "late": ms(io[1] if io else None),
        "drift": _drift(io),
        "paper": "flat",
        "bytes": size(late_bytes),
        "byte_drift": _drift(read),
        "floor": NOT_MEASURED if floor is None else ms(floor),
        "over": times(ratio(io[1] if io else None, floor)),
        "total": ms(statistics.median(row.total_ms)),
        "rss": _rss(row),
        "tokens": count(len(row.io_ms)),
    }


def _drift(ends: tuple[float, float] | None) -> str:
    found = ratio(ends[1], ends[0]) if ends else None
    return NONE if found is None else f"{found:.2f}×"


def _rss(row: LongRow) -> str:
    if not row.rss:
        return NOT_MEASURED
    held = [value for _, value in row.rss]
    return f"{size(held[0])} to {size(max(held))}"


def long_run_figure(record: LongRunRecord) -> bytes:
    """Flash latency of each token and its running median, a panel for each way of sampling, as PNG."""
    rows = record.rows
    with style.style():
        figure = style.new_figure(
            4.0, "Flash latency of each token over a long text",
            f"Dots: tokens; line: running median of {SMOOTHED}; the first tokens fill DRAM",
            caption(record.run, record.machine), record.run.synthetic,
        )  # fmt: skip
        grid = figure.add_gridspec(1, len(rows), wspace=0.14, **style.area(figure, 0.75, 0.3, above=1.2))
        # A few tokens are far above all others (the first, or another process): they would flatten the rest.
        top = 1.25 * max(_high(row.io_ms) for row in rows)
        for index, row in enumerate(rows):
            axes = figure.add_subplot(grid[0, index])
            _panel(axes, row, record, top)
            axes.tick_params(labelleft=index == 0)
        figure.axes[0].set_ylabel("io, ms a token")
        return style.png(figure)


def _high(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] or 1.0


def _panel(axes: Axes, row: LongRow, record: LongRunRecord, top: float) -> None:
    x = range(1, len(row.io_ms) + 1)
    axes.plot(x, row.io_ms, linestyle="none", marker="o", markersize=1.8, color=style.SKY, zorder=2)
    axes.plot(x, running_median(row.io_ms, SMOOTHED), color=style.BLUE, linewidth=1.6, zorder=3)
    ends = row.stretches(row.io_ms, record.warm_up, record.stretch)
    if ends:
        axes.axhline(ends[0], color=style.INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=4)
    above = sum(value > top for value in row.io_ms)
    line = f"last over first stretch (dashed) {_drift(ends)}" + (f"; beyond the axis: {above}" if above else "")
    settings = "" if row.temperature == 0 else f" (temperature {row.temperature:g}, top-p {row.top_p:g})"
    style.panel_title(axes, f"{row.name.capitalize()}{settings}", line)
    axes.set(xlim=(0, len(row.io_ms) + 1), ylim=(0, top), xlabel="token")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="y")


def running_median(values: Sequence[float], width: int) -> list[float]:
    """The median of the `width` values around each, of fewer at the ends."""
    half = width // 2
    return [statistics.median(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]


ENTRY = Entry("figure8", TITLE, ("long_run",), draw, number=False)
