"""Figure 10: MMLU of the dense model and with predictors."""

from __future__ import annotations

from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.report import style
from workbench.report.evaluation import EvaluationRecord, EvaluationRow, Metric, read_evaluation
from workbench.report.evaluation_table import METHOD, accuracy
from workbench.report.numbers import NONE, caption, percent
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Picture, Records, measured, says
from workbench.report.tables.table1 import acc, accuracy_notes

TITLE = "Figure 10: MMLU with predictors"
TASK = "mmlu"
CHANCE = 0.25
"""Of four answers."""


def draw(records: Records) -> Drawn:
    """From a record of kind evaluation with the task mmlu, as 'mmlu'."""
    record = read_evaluation(records["mmlu"])
    dense, row = acc(record.dense, TASK), record.near_paper()
    found = acc(row, TASK)
    if dense and found and row:
        change = f"{100 * (found.value - dense.value):+.1f} points with predictors ({row.name})"
    else:
        change = "no predictors were measured"
    headline = f"MMLU here: {accuracy(dense)}% dense, {change}; the paper: Persimmon 0, Phi-2 -2.3 points."
    pictures = (Picture("MMLU, dense and with predictors", mmlu_figure(record)),) if dense else ()
    return Drawn(
        "figure10", TITLE, headline, says("figure10"), METHOD, (measured("MMLU", record),), (_table(record),), pictures,
        notes=(*accuracy_notes(record, row), f"By chance: {percent(CHANCE)}."),
    )  # fmt: skip


def _table(record: EvaluationRecord) -> Table:
    columns = (
        Column("acc", "MMLU", "% here"),
        Column("change", "change", "points here"),
        Column("missed", "missed", "of the active, here"),
        Column("paper", "change", "points, paper"),
    )
    dense = acc(record.dense, TASK)
    blocks = []
    for row in record.rows:
        found = acc(row, TASK)
        change = NONE if found is None or dense is None else f"{100 * (found.value - dense.value):+.1f}"
        missed = row.false_negative if row.false_negative is not None else row.rate
        near = "Persimmon 0, Phi-2 -2.3" if row is record.near_paper() else NONE
        cells = {"acc": accuracy(found), "change": change, "missed": percent(missed), "paper": near}
        blocks.append((Line("measured", row.name, cells),))
    return Table(f"MMLU: {record.run.model}", "row", columns, tuple(blocks))


def mmlu_figure(record: EvaluationRecord) -> bytes:
    """Accuracy of each row with its standard error, the dense model's and chance's as lines, as PNG."""
    points: list[tuple[EvaluationRow, Metric]] = []
    for row in record.rows:
        found = acc(row, TASK)
        if found is not None:
            points.append((row, found))
    with style.style():
        figure = style.new_figure(
            1.9 + 0.34 * len(points), "MMLU, dense and with predictors", f"Paper: {says('figure10')}",
            caption(record.run, record.machine), record.run.synthetic,
        )  # fmt: skip
        axes = figure.add_subplot(figure.add_gridspec(1, 1, **style.area(figure, 2.0, 1.6, above=0.85))[0, 0])
        for y, (row, metric) in enumerate(points):
            colour = style.BLUE if row.predictor == "low_rank" else style.INK
            axes.errorbar(
                [metric.value], [y], xerr=[metric.stderr or 0.0], color=colour, marker="o", capsize=3, linewidth=1.2
            )
            axes.annotate(
                accuracy(metric), (1, y), xycoords=("axes fraction", "data"), xytext=(10, 0),
                textcoords="offset points", va="center", size=8.5,
            )  # fmt: skip
        axes.axvline(CHANCE, color=style.GREY, linewidth=1.1, linestyle=(0, (1, 1.5)))
        axes.axvline(points[0][1].value, color=style.INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1.5)
        axes.set_yticks(range(len(points)), [row.name for row, _ in points], color=style.INK)
        axes.set(ylim=(len(points) - 0.4, -0.6), xlabel="accuracy; dashed: dense; dotted: chance")
        axes.xaxis.set_major_locator(MaxNLocator(7))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
        axes.grid(axis="x")
        return style.png(figure)


ENTRY = Entry("figure10", TITLE, ("mmlu",), draw)
