"""The figures of the report, drawn from records, each beside the paper's value.

Each function takes a record and returns PNG bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Polygon
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from workbench.report import style
from workbench.report.numbers import caption, chunk, ms, percent, ratio, times
from workbench.report.paper import paper
from workbench.report.records import (
    AblationRecord,
    AblationRow,
    FlashPoint,
    FlashRecord,
    PredictorCard,
    PredictorLayer,
    ReusePoint,
    ReuseRecord,
)
from workbench.report.rows import fit_sentence
from workbench.report.words import card_caption

# part: label, colour, hatch. The hatches tell the parts apart in greyscale.
_PARTS: dict[str, tuple[str, str, str]] = {
    "io": ("io: reading flash", style.BLUE, ""),
    "mem": ("mem: neurons in and out of DRAM", style.ORANGE, "////"),
    "compute": ("compute, the predictor apart", style.SKY, "...."),
    "predictor": ("predictor", style.VERMILLION, "xxxx"),
}


def segments(row: AblationRow) -> dict[str, float]:
    """The medians of a row's parts in ms a token, the predictor taken out of compute."""
    predictor = row.times["predictor"].median
    return {
        "io": row.times["io"].median,
        "mem": row.times["mem"].median,
        "compute": max(row.times["compute"].median - predictor, 0.0),
        "predictor": predictor,
    }


def enlarged_limit(rows: Sequence[AblationRow]) -> float | None:
    """Where the enlarged panel ends, ms: just beyond the slowest of the rows that are less than a quarter
    of the slowest; None where there is nothing to enlarge."""
    slowest = max(row.total for row in rows)
    fast = [max(row.times["total"].p95, row.total) for row in rows if row.total < slowest / 4]
    return 1.04 * max(fast) if fast and max(fast) < slowest / 2 else None


def latency_figure(record: AblationRecord) -> bytes:
    """Latency of a token by row: the parts stacked; a second panel enlarges the fast rows, since naive is
    many times slower. Totals, and the speed-up beside the paper's, stand next to the bars."""
    rows, limit = record.rows, enlarged_limit(record.rows)
    with style.style():
        figure = style.new_figure(
            2.3 + 0.44 * len(rows),
            "Latency of a token, technique by technique",
            "Medians, stacked; the fine line ends at the 95th percentile of the total",
            "Medians of parts need not add up to the median total.\n" + caption(record.run, record.machine),
            record.run.synthetic,
        )
        box = style.area(figure, 1.55, 0.2, above=1.38)
        names = max(len(row.name) for row in rows)
        box["left"] = (0.3 + 0.078 * max(names, 12)) / style.WIDTH
        ratios = [1.0, 1.25, 1.75] if limit else [2.25, 1.75]
        grid = figure.add_gridspec(1, len(ratios), width_ratios=ratios, wspace=0.13, **box)
        panels = [figure.add_subplot(grid[0, i]) for i in range(len(ratios))]
        whole = 1.05 * max(row.times["total"].p95 for row in rows)
        _stack(panels[0], rows, whole, labels=False)
        panels[0].set_yticks(range(len(rows)), [row.name for row in rows], size=9, color=style.INK)
        panels[0].set_title("All rows")
        if limit:
            _stack(panels[1], rows, limit, labels=True)
            panels[1].set_yticks([])
            panels[1].set_title(f"Enlarged {whole / limit * ratios[1] / ratios[0]:.0f} times")
        _speed_ups(panels[-1], record)
        handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=text) for text, c, h in _PARTS.values()]
        figure.legend(
            handles=handles, loc="upper left", ncols=4, fontsize=8.5, handlelength=1.6, handleheight=1.1,
            columnspacing=1.8, borderpad=0, bbox_to_anchor=(0.012, 1 - 0.67 / figure.get_figheight()), borderaxespad=0,
        )  # fmt: skip
        return style.png(figure)


def _stack(axes: Axes, rows: Sequence[AblationRow], limit: float, *, labels: bool) -> None:
    for y, row in enumerate(rows):
        start = 0.0
        for part, value in segments(row).items():
            _, colour, hatch = _PARTS[part]
            axes.barh(y, value, 0.62, left=start, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
            if labels and part == "io" and 0.12 * limit < value < limit:
                axes.text(value / 2, y, ms(value), ha="center", va="center", color="white", size=8.5)
            start += value
        _mark_total(axes, y, row, start, limit, label=labels)
    axes.set(xlim=(0, limit), ylim=(len(rows) - 0.45, -0.55), xlabel="ms a token")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def _mark_total(axes: Axes, y: int, row: AblationRow, end: float, limit: float, *, label: bool) -> None:
    p95 = row.times["total"].p95
    if end <= limit:
        axes.plot([end, min(p95, limit)], [y, y], color=style.INK, linewidth=0.9, solid_capstyle="butt")
        axes.plot([p95, p95], [y - 0.12, y + 0.12], color=style.INK, linewidth=0.9)
    elif label:  # a bar that goes on beyond the panel: cut by two strokes
        for x in (0.955, 0.975):
            corners = [(x, y + 0.42), (x + 0.012, y - 0.42), (x + 0.02, y - 0.42), (x + 0.008, y + 0.42)]
            axes.add_patch(
                Polygon(corners, closed=True, facecolor="white", edgecolor="none", zorder=4,
                        transform=axes.get_yaxis_transform())
            )  # fmt: skip


def _speed_ups(axes: Axes, record: AblationRecord) -> None:
    """Columns of text beside the bars: the total, and times faster than naive here and in the paper."""
    naive, reference = record.naive, paper()
    at = (0.17, 0.40, 0.60, 0.82, 1.0)
    heads = ("total", "here", "paper*", "here", "paper*")
    axes.set(xlim=(0, 1), ylim=(len(record.rows) - 0.45, -0.55))
    axes.axis("off")
    for x, head in zip(at, heads, strict=True):
        _head(axes, x, 9, head if head != "total" else "ms", weight="bold" if head == "here" else "normal")
    for x, head in ((at[0], "total"), (at[2], "total, vs naive"), (at[4], "io, vs naive")):
        _head(axes, x, 23, head, weight="bold")
    for y, row in enumerate(record.rows):
        published, base = reference.row_for(row.ablation), reference.naive
        total = published.cpu.get("total_ms") if published else None
        cells = (
            ms(row.total),
            times(ratio(naive.total, row.total) if naive else None),
            times(ratio(base.cpu["total_ms"], total)),
            times(ratio(naive.times["io"].median, row.times["io"].median) if naive else None),
            times(ratio(base.io_ms, published.io_ms) if published else None),
        )
        for x, head, text in zip(at, heads, cells, strict=True):
            colour, weight = (style.SOFT, "normal") if head == "paper*" else (style.INK, "bold")
            axes.text(x, y, text, ha="right", va="center", color=colour, weight=weight if head == "here" else "normal")
    axes.annotate(
        f"* {reference.where}, CPU", (1, 0), xycoords="axes fraction", xytext=(0, -22), textcoords="offset points",
        ha="right", va="top", size=8, color=style.SOFT, style="italic",
    )  # fmt: skip


def _head(axes: Axes, x: float, rise: float, text: str, weight: str) -> None:
    axes.annotate(
        text, (x, 1), xycoords="axes fraction", xytext=(0, rise), textcoords="offset points", ha="right",
        va="baseline", size=9, weight=weight, color=style.INK if weight == "bold" else style.SOFT,
    )  # fmt: skip


def _series_name(point: FlashPoint) -> str:
    if point.engine == "threads":
        return f"{point.threads} thread{'' if point.threads == 1 else 's'}"
    return f"{point.engine}, {point.threads} deep"


def throughput_figure(record: FlashRecord) -> bytes:
    """Read throughput by chunk size, one line an engine and depth; the paper's records and its linear read
    as stars and a dashed line. Both axes are logarithmic."""
    cached = any(not point.direct for point in record.rows)
    with style.style():
        figure = style.new_figure(
            4.9,
            "Read throughput by chunk size",
            "Direct reads" + ("; dotted: through the page cache, not flash" if cached else ""),
            f"{fit_sentence(record)}\n{caption(record.run, record.machine)}".strip(),
            record.run.synthetic,
        )
        axes = figure.add_subplot(figure.add_gridspec(1, 1, **style.area(figure, 0.75, 1.95, above=0.9))[0, 0])
        series: dict[tuple[bool, str, int], list[FlashPoint]] = {}
        for point in record.rows:
            series.setdefault((not point.direct, point.engine, point.threads), []).append(point)
        ends: list[tuple[float, str, str]] = []
        for i, (key, points) in enumerate(sorted(series.items())):
            points.sort(key=lambda p: p.chunk_bytes)
            colour, y = style.LINES[i % len(style.LINES)], [p.bytes_per_s / 1e9 for p in points]
            dash = (0, (1.2, 1.2)) if key[0] else "-"
            axes.plot([p.chunk_bytes for p in points], y, color=colour, linestyle=dash, marker=style.MARKERS[i % 7])
            ends.append((y[-1], f"{_series_name(points[-1])}: {y[-1]:.3g}", colour))
        _throughput_axes(axes, record)
        style.end_labels(axes, ends)
        axes.annotate(
            f"GB/s at {chunk(max(p.chunk_bytes for p in record.rows))}", (1, 1), xycoords="axes fraction",
            xytext=(16, 12), textcoords="offset points", size=8.5, weight="bold",
        )  # fmt: skip
        return style.png(figure)


def _throughput_axes(axes: Axes, record: FlashRecord) -> None:
    published = paper().throughput
    chunks = sorted({p.chunk_bytes for p in record.rows})
    speeds = [p.bytes_per_s / 1e9 for p in record.rows] + [point["gb_per_s"] for point in published]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="chunk size (log scale)", ylabel="GB/s (log scale)")
    axes.set_xlim(min(chunks) / 1.25, max(chunks) * 1.12)
    axes.set_ylim(min(speeds) / 1.3, max(speeds) * 1.45)
    axes.xaxis.set_major_locator(FixedLocator(chunks[:: -(-len(chunks) // 12)]))
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**e for e in range(-4, 4) for m in (1, 2, 5)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: chunk(round(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y")
    words = [f"Paper ({paper().source['machine']}), GB/s"]
    for point in published:
        inside = min(chunks) <= point["chunk_bytes"] <= max(chunks)
        if inside:
            style.paper_point(axes, point["chunk_bytes"], point["gb_per_s"], f"{point['gb_per_s']:g}")
        else:
            style.paper_line(axes, point["gb_per_s"])
        size = f", {chunk(point['chunk_bytes'])}" if inside else ""
        words.append(f"{'☆' if inside else '╌'}  {point['gb_per_s']:.2f}  {point['what']}{size}")
    key = axes.text(0.985, 0.04, "\n".join(words), transform=axes.transAxes, ha="right", va="bottom", size=8.5)
    key.set(style="italic", linespacing=1.5, multialignment="left")
    style.halo(key)


def reuse_figure(record: ReuseRecord) -> bytes:
    """Window reuse: shares of the FFN kept in DRAM and new a token against k, beside the paper's k = 4;
    fine lines are single layers."""
    with style.style():
        subtitle = "Shares of the FFN's neurons, mean over tokens"
        if record.by_layer:
            subtitle += "; fine lines are single layers"
        figure = style.new_figure(
            4.2, "Neuron window: what stays and what is new", subtitle, caption(record.run, record.machine),
            record.run.synthetic,
        )  # fmt: skip
        grid = figure.add_gridspec(1, 2, wspace=0.2, **style.area(figure, 0.7, 0.25, above=1.22))
        panels = (
            ("kept_share", "Kept in DRAM", style.BLUE, "o"),
            ("new_share", "New: read from flash for a token", style.VERMILLION, "s"),
        )
        for i, (share, title, colour, marker) in enumerate(panels):
            axes = figure.add_subplot(grid[0, i])
            style.panel_title(axes, title, _at_paper_window(record, share))
            _reuse_panel(axes, record, share, colour, marker)
        return style.png(figure)


def _reuse_panel(axes: Axes, record: ReuseRecord, share: str, colour: str, marker: str) -> None:
    layers: dict[int, list[ReusePoint]] = {}
    for point in record.by_layer:
        layers.setdefault(point.layer or 0, []).append(point)
    for points in layers.values():
        points.sort(key=lambda p: p.window)
        axes.plot([p.window for p in points], [getattr(p, share) for p in points], color=style.PALE, linewidth=0.8)
    points = sorted(record.rows, key=lambda p: p.window)
    windows, values = [p.window for p in points], [getattr(p, share) for p in points]
    axes.plot(windows, values, color=colour, marker=marker)
    published = [p for p in paper().reuse if share in p]
    top = max([*values, *(getattr(p, share) for p in record.by_layer), *(p[share] for p in published)])
    last = max([*windows, *(p["window"] for p in published)])
    axes.set(
        xlim=(-0.03 * last, 1.04 * last), ylim=(0, 1.15 * top), xlabel="window k, tokens", ylabel="share of the FFN"
    )
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.grid(axis="y")
    for p in published:
        style.paper_point(axes, p["window"], p[share], "paper", left=p["window"] > 0.85 * last)


def _at_paper_window(record: ReuseRecord, share: str) -> str:
    """'k = 4: 15% here, 24% in the paper'; only what there is."""
    window = paper().source["window"]
    here = [percent(getattr(p, share)) for p in record.rows if p.window == window]
    theirs = [percent(p[share]) for p in paper().reuse if p["window"] == window and share in p]
    parts = [f"{value} here" for value in here] + [
        f"{value} in the paper ({paper().source['model']})" for value in theirs
    ]
    return f"k = {window}: " + ", ".join(parts)


def predictor_figure(card: PredictorCard) -> bytes:
    """Predictor quality by layer: false negatives and positives, and predicted/active, beside the paper's."""
    layers = sorted(card.layers, key=lambda layer: layer.layer)
    x, published = [layer.layer for layer in layers], paper().predictors
    with style.style():
        figure = style.new_figure(
            4.2, "Predictor quality by layer", "False negatives lose accuracy; false positives cost reads",
            card_caption(card), card.about.get("synthetic") is True,
        )  # fmt: skip
        grid = figure.add_gridspec(1, 2, wspace=0.5, **style.area(figure, 0.7, 0.85, above=1.22))
        errors, over = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        for axes in (errors, over):
            axes.set(xlabel="layer", xlim=(min(x) - 0.6, max(x) + 0.6))
            axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
            axes.grid(axis="y")
        _error_panel(errors, x, layers, published)
        _ratio_panel(over, x, [layer.predicted_over_active for layer in layers], published["predicted_over_active"])
        return style.png(figure)


def _error_panel(axes: Axes, x: list[int], layers: Sequence[PredictorLayer], published: Mapping[str, Any]) -> None:
    style.panel_title(axes, "False negatives and positives", " ")
    top, ends = 0.0, []
    for name, colour, marker, text in (
        ("false_negative", style.VERMILLION, "s", "negatives, of the active"),
        ("false_positive", style.BLUE, "o", "positives, of the inactive"),
    ):
        values, theirs = [getattr(layer, name) for layer in layers], published[name]
        axes.plot(x, values, color=colour, marker=marker, markersize=5 if len(x) <= 16 else 3.5, label=text)
        style.paper_line(axes, theirs, colour)
        ends.append((theirs, f"paper {100 * theirs:g}%", colour))
        top = max(top, theirs, *values)
    axes.set(ylim=(0, 1.1 * top), ylabel="share of neurons")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    style.end_labels(axes, ends)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.005), fontsize=8.5, ncols=2, borderpad=0, borderaxespad=0.2,
        handlelength=1.6, handletextpad=0.5, columnspacing=1.0,
    )  # fmt: skip


def _ratio_panel(axes: Axes, x: list[int], ratios: list[float], theirs: float) -> None:
    mean = sum(ratios) / len(ratios)
    style.panel_title(axes, "Predicted / active neurons", f"mean over layers {mean:.1f} here, {theirs:g} in the paper")
    axes.bar(x, ratios, 0.66, color=style.SKY, edgecolor=style.BLUE, linewidth=0.8)
    if len(x) <= 12:
        for at, value in zip(x, ratios, strict=True):
            note = axes.annotate(
                f"{value:.1f}", (at, value), xytext=(0, 3), textcoords="offset points", ha="center", size=8.5
            )
            style.halo(note)
    axes.set(ylim=(0, 1.12 * max([*ratios, theirs])), ylabel="ratio")
    style.paper_line(axes, theirs)
    style.end_labels(axes, [(theirs, f"paper {theirs:g}", style.INK)])
