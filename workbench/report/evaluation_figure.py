"""The trade-off curve: what a false-negative rate saves in bytes and time, and what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.report import style
from workbench.report.evaluation import EvaluationRecord, EvaluationRow
from workbench.report.evaluation_table import perplexity
from workbench.report.numbers import caption, ms, percent

Value = Callable[[EvaluationRow], float | None]


@dataclass(frozen=True)
class _Panel:
    """One measure: its title, how its axis and labels are written, and its lines as (name, value of a row)."""

    title: str
    label: str
    write: Callable[[float], str]
    lines: tuple[tuple[str, Value], ...]
    from_zero: bool


def tradeoff_figure(record: EvaluationRecord) -> bytes:
    """Bytes loaded, perplexity, ms a token and accuracy against the false-negative rate, as PNG; panels without data
    are left out. Oracle is an open mark at zero, dense a dashed line."""
    panels = [panel for panel in _panels(record) if _any(record, panel)]
    columns = 1 if len(panels) == 1 else 2
    lines = -(-len(panels) // columns)
    with style.style():
        figure = style.new_figure(
            1.75 + 2.55 * max(1, lines),
            "What missed neurons cost and save",
            "Predictors at several false-negative rates; open mark at zero: oracle (true neurons); dashed: dense",
            _explain(record) + caption(record.run, record.machine),
            record.run.synthetic,
        )
        box = style.area(figure, 0.75, 1.5, above=0.98)
        grid = figure.add_gridspec(max(1, lines), columns, wspace=0.68, hspace=0.62, **box)
        for index, panel in enumerate(panels):
            _draw(figure.add_subplot(grid[index // columns, index % columns]), record, panel)
        return style.png(figure)


def _panels(record: EvaluationRecord) -> list[_Panel]:
    percent_of_dense = ("loaded", record.of_dense)
    return [
        _Panel("Loaded from flash a token", "share of dense", percent, (percent_of_dense,), True),
        _Panel("Perplexity", "perplexity", perplexity, (("perplexity", lambda row: row.perplexity),), False),
        _Panel("Time of a token", "ms, median", ms, (("total", lambda row: row.total),), True),
        _Panel("Zero-shot accuracy", "acc", percent, tuple((t.name, _accuracy(t.name)) for t in record.tasks), False),
    ]


def _accuracy(task: str) -> Value:
    def value(row: EvaluationRow) -> float | None:
        metrics: Any = row.tasks[task].metrics
        return metrics["acc"].value if "acc" in metrics else None

    return value


def _any(record: EvaluationRecord, panel: _Panel) -> bool:
    return any(value(row) is not None for row in record.rows for _, value in panel.lines)


def _draw(axes: Axes, record: EvaluationRecord, panel: _Panel) -> None:
    axes.set_title(panel.title)
    oracle = next((row for row in record.rows if row.predictor == "oracle"), None)
    points = sorted(((_x(row), row) for row in record.predicted), key=lambda point: point[0])
    dense_in_view = panel.label != "share of dense"  # its own value is 100%, far above every other point
    seen: list[float] = []
    ends: list[tuple[float, str, str]] = []
    for index, (name, value) in enumerate(panel.lines):
        colour, marker = style.LINES[index % len(style.LINES)], style.MARKERS[index % len(style.MARKERS)]
        drawn = [(x, y) for x, row in points if (y := value(row)) is not None]
        if drawn:
            axes.plot([x for x, _ in drawn], [y for _, y in drawn], color=colour, marker=marker)
            seen += [y for _, y in drawn]
            last = panel.write(drawn[-1][1])
            ends.append((drawn[-1][1], f"{name} {last}" if len(panel.lines) > 1 else last, colour))
        true = value(oracle) if oracle is not None else None
        if true is not None:
            axes.plot([0], [true], color=colour, linestyle="none", marker=marker, markerfacecolor="white", zorder=3)
            seen.append(true)
        dense = value(record.dense)
        if dense is not None and dense_in_view:
            axes.axhline(dense, color=colour, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1.5)
            seen.append(dense)
            if len(panel.lines) == 1:
                ends.append((dense, f"dense {panel.write(dense)}", colour))
    _limits(axes, panel, [x for x, _ in points], seen)
    style.end_labels(axes, ends)


def _x(row: EvaluationRow) -> float:
    """The measured rate; the asked one where none was measured."""
    return row.false_negative if row.false_negative is not None else row.rate or 0.0


def _limits(axes: Axes, panel: _Panel, xs: list[float], ys: list[float]) -> None:
    right = max([*xs, 0.01])
    low, high = min(ys), max(ys)
    room = 0.12 * (high - low) or 0.05 * abs(high) or 0.01
    axes.set(xlim=(-0.03 * right, 1.04 * right), xlabel="active neurons missed", ylabel=panel.label)
    axes.set_ylim(0 if panel.from_zero else low - room, 1.12 * high if panel.from_zero else high + room)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if panel.write is percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.grid(axis="y")


def _explain(record: EvaluationRecord) -> str:
    if record.data is None:
        return "Rates as asked for: no text was given to measure them on.\n"
    return (
        f"Missed: measured over {record.dense.quality_tokens} tokens. Perplexity: {record.run.tokens:,} tokens. Bytes "
        f"and times: decode of {record.dense.decoded} tokens, DRAM budget {record.run.dram}; dense reads its whole FFN "
        "for each token.\n"
    )
