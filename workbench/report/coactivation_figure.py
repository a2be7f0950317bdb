"""The figure of co-activation: how fast it falls with rank, who the closest friends are, what bundling them costs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from workbench.report import style
from workbench.report.analysis_records import CoactivationLayer, CoactivationRecord
from workbench.report.numbers import caption, count, percent, times
from workbench.report.paper import paper


def coactivation_figure(record: CoactivationRecord) -> bytes:
    """Three panels: the mean share of a neuron's firing that its friend of each rank shares (log-log), the popularity
    of closest friends, most popular first, and the bytes that bundles of friends read, by layer."""
    with style.style():
        figure = style.new_figure(
            4.4, "Co-activation, and why bundling closest friends does not pay",
            f"Exact counts of all pairs of {record.d_ff:,} neurons, {len(record.rows)} layers; fine lines are single "
            "layers",
            f"Bundle: a neuron's record and its closest friend's. Bytes of the fewest bundles that hold the wanted "
            f"neurons, {record.cost_tokens:,} tokens. Paper, appendix D (no numbers): "
            f"{paper().coactivation['appendix_d']}.\n{caption(record.run, record.machine)}",
            record.run.synthetic,
        )  # fmt: skip
        grid = figure.add_gridspec(1, 3, wspace=0.46, **style.area(figure, 0.7, 0.95, above=1.22))
        ranks, friends, cost = (figure.add_subplot(grid[0, i]) for i in range(3))
        _rank_panel(ranks, record)
        _friend_panel(friends, record)
        _cost_panel(cost, record)
        return style.png(figure)


def _mean(rows: Sequence[CoactivationLayer], name: str) -> list[float]:
    curves = [getattr(row, name) for row in rows]
    return [sum(values) / len(curves) for values in zip(*curves, strict=True)]


def _curves(axes: Axes, record: CoactivationRecord, name: str, colour: str) -> None:
    axes.set(xlim=(0.8, 1.1 * record.d_ff), ylim=(0.7 / record.d_ff, 1.5))  # a logarithmic axis needs them first
    for row in record.rows:
        own = [(rank, value) for rank, value in zip(record.ranks, getattr(row, name), strict=True) if value > 0]
        axes.plot([r for r, _ in own], [v for _, v in own], color=style.PALE, linewidth=0.8)
    mean = _mean(record.rows, name)
    shown = [(rank, value) for rank, value in zip(record.ranks, mean, strict=True) if value > 0]
    axes.plot([r for r, _ in shown], [v for _, v in shown], color=colour, linewidth=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(NullLocator())
    axes.grid(axis="both")


def _rank_panel(axes: Axes, record: CoactivationRecord) -> None:
    _curves(axes, record, "rank_share", style.BLUE)
    law, last = record.power_law, max(3, record.ranks[-1] // 10)
    line = f"dashed: {law.scale:.2g} × rank^−{law.exponent:.2f}, r² {law.r2:.2f}" if law else "no power law fits"
    style.panel_title(axes, "How often a friend fires too", line)
    if law:
        x = record.ranks[: sum(rank <= last for rank in record.ranks)]
        fit = [law.scale * rank**-law.exponent for rank in x]
        axes.plot(x, fit, color=style.INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set(xlabel="rank of the friend", ylabel="share of the neuron's firing")


def _friend_panel(axes: Axes, record: CoactivationRecord) -> None:
    _curves(axes, record, "popularity", style.VERMILLION)
    distinct = sum(row.distinct_friends for row in record.rows) / len(record.rows)
    hot = sum(row.hot_friends for row in record.rows) / len(record.rows)
    style.panel_title(
        axes, "Who is the closest friend",
        f"{count(round(distinct))} of {record.d_ff:,}; {percent(hot)} in the hottest {percent(record.hottest)}",
    )  # fmt: skip
    axes.set(xlabel="closest friends, by popularity", ylabel="share of neurons that have it")


def _cost_panel(axes: Axes, record: CoactivationRecord) -> None:
    window = f"k = {record.run.window}"
    rows = [row for row in record.rows if row.bundle_bytes is not None and row.window_bytes is not None]
    x = [row.layer for row in rows]
    ends, highest = [(1.0, "single", style.INK)], 2.0
    for name, text, colour, marker in (
        ("bundle_bytes", "no window", style.ORANGE, "^"),
        ("window_bytes", window, style.GREEN, "D"),
    ):
        values = [getattr(row, name) for row in rows]
        axes.plot(x, values, color=colour, marker=marker, markersize=4 if len(x) <= 16 else 3, linewidth=1.2)
        ends += [(value, text, colour) for value in values[-1:]]
        highest = max([highest, *values])
    style.paper_line(axes, 2, style.SOFT)
    axes.axhline(1, color=style.INK, linewidth=1.1)
    axes.set(xlabel="layer", ylabel="bytes of single records", ylim=(0, 1.12 * highest))
    axes.set_xlim(min(x, default=0) - 0.6, max(x, default=1) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    line = ""
    if rows:
        mean, wasted = (
            sum(getattr(row, name) for row in rows) / len(rows) for name in ("window_bytes", "window_all_duplicates")
        )
        line = f"{window}: {times(mean)}, {percent(wasted)} duplicates"
    style.panel_title(axes, "Flash bytes with bundles", line)
    style.end_labels(axes, ends)
