"""Figures of sparsity (the paper's figure 9), aggregated neuron use (4a) and neuron windows (7).

Each function takes a record and returns PNG bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from workbench.errors import RecordError
from workbench.report import style
from workbench.report.analysis_records import SparsityRecord, WindowRecord, ZerosSpread
from workbench.report.analysis_tables import fitting_sentence, zeros_text
from workbench.report.figures import _PARTS, segments
from workbench.report.numbers import caption, ms, size
from workbench.report.paper import paper
from workbench.report.records import AggregatedUse, PredictorCard, ReuseRecord

_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g}%")
_WHISKER, _BOX = (0, 4), (1, 3)
"""Which of the record's percentiles the fine line and the bar go between: 5 to 95, 25 to 75."""


def sparsity_figure(record: SparsityRecord, predictors: PredictorCard | None = None) -> bytes:
    """Share of FFN activations that are zero: by layer with the spread over tokens, and by how much text came before
    the token; the paper's mean for its model as a dashed line. With the card of trained predictors a third panel has
    the paper's figure 9: neurons active, predicted and missed by layer. RecordError where the card is another model's.
    """
    mean = sum(row.zeros for row in record.rows) / len(record.rows)
    with style.style():
        figure = style.new_figure(
            4.3, "FFN activations that are zero", "Dot: mean; bar: half of the tokens; fine line: 90% of the tokens",
            caption(record.run, record.machine), record.run.synthetic,
        )  # fmt: skip
        box = style.area(figure, 0.7, 1.15, above=1.2)
        widths, gap = ((1.5, 1, 1.2), 0.36) if predictors else ((1.5, 1), 0.18)
        grid = figure.add_gridspec(1, len(widths), wspace=gap, width_ratios=widths, **box)
        layers, places = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        style.panel_title(layers, "By layer", f"mean over layers {zeros_text(mean)}")
        x = [row.layer for row in record.rows]
        _spreads(layers, x, [row.zeros for row in record.rows], [row.spread for row in record.rows], style.BLUE, "o")
        layers.set(xlabel="layer", ylabel="share of zeros", xlim=(min(x) - 0.7, max(x) + 0.7))
        layers.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        style.panel_title(places, "By place in the text", "mean over layers")
        _places(places, record, 1 if predictors is None else 2)
        _zeros_axes(layers, places, record, labelled=predictors is None)
        if predictors:
            _predicted(figure.add_subplot(grid[0, 2]), predictors, len(x))
        return style.png(figure)


def _zeros_axes(layers: Axes, places: Axes, record: SparsityRecord, *, labelled: bool) -> None:
    """One axis for both panels, with the paper's line."""
    model = paper().source["model"]
    theirs = paper().sparsity[model]
    values = [v for row in record.rows for v in _values(row.zeros, row.spread)]
    values += [v for place in record.by_place for v in _values(place.spread.mean, place.spread)]
    low = min([theirs, *values])
    for axes in (layers, places):
        axes.set_ylim(max(0.0, low - 0.06 * (1 - low)), 1.0 + 0.02 * (1 - low))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(_PERCENT)
        axes.grid(axis="y")
        style.paper_line(axes, theirs)
    places.tick_params(labelleft=False)
    if labelled:
        style.end_labels(places, [(theirs, f"paper {100 * theirs:g}%,\n{model}", style.INK)])
    else:
        note = layers.annotate(
            f"paper {100 * theirs:g}%, {model}", (0.98, theirs), xycoords=("axes fraction", "data"),
            xytext=(0, 3), textcoords="offset points", ha="right", size=8.5,
        )  # fmt: skip
        style.halo(note)


def _predicted(axes: Axes, card: PredictorCard, layers: int) -> None:
    """Neurons predicted, active, and active but missed by the predictor, as shares of the FFN."""
    model = card.about.get("model")
    d_ff = model.get("d_ff") if isinstance(model, Mapping) else None
    if len(card.layers) != layers or not isinstance(d_ff, int) or d_ff < 1:
        raise RecordError(f"{card.source}: is not the card of predictors for this model; pass the one that fits")
    rows = sorted(card.layers, key=lambda layer: layer.layer)
    x = [row.layer for row in rows]
    curves = (
        ("predicted", [row.predicted / d_ff for row in rows], style.ORANGE, "^"),
        ("active", [row.active / d_ff for row in rows], style.BLUE, "o"),
        ("missed", [row.false_negative * row.active / d_ff for row in rows], style.VERMILLION, "s"),
    )
    for _, values, colour, marker in curves:
        axes.plot(x, values, color=colour, marker=marker, markersize=4 if layers <= 16 else 3, linewidth=1.2)
    shown = [value for _, values, _, _ in curves for value in values if value > 0]
    axes.set_yscale("log")
    axes.set(xlabel="layer", xlim=(min(x) - 0.7, max(x) + 0.7), ylim=(min(shown) / 1.6, max(shown) * 1.6))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**e for e in range(-6, 1) for m in (1, 2, 5)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_PERCENT)
    axes.grid(axis="y")
    style.panel_title(axes, "Predicted, active, missed", "share of the FFN (log scale)")
    style.end_labels(axes, [(values[-1], name, colour) for name, values, colour, _ in curves if values[-1] > 0])


def _values(mean: float, spread: ZerosSpread | None) -> list[float]:
    return [mean, spread.quantiles[_WHISKER[0]]] if spread else [mean]


def _spreads(
    axes: Axes,
    x: Sequence[int],
    means: Sequence[float],
    spreads: Sequence[ZerosSpread | None],
    colour: str,
    marker: str,
) -> None:
    width = min(9.0, 130 / max(1, len(x)))
    for at, spread in zip(x, spreads, strict=True):
        if spread:
            for (first, last), line, shade in ((_WHISKER, 1.0, colour), (_BOX, width, style.SKY)):
                ends = [spread.quantiles[first], spread.quantiles[last]]
                axes.plot([at, at], ends, color=shade, linewidth=line, solid_capstyle="butt", zorder=2)
    axes.plot(x, means, linestyle="none", color=colour, marker=marker, markersize=min(4.0, 1 + width), zorder=3)


def _places(axes: Axes, record: SparsityRecord, every: int) -> None:
    places = record.by_place
    x = list(range(len(places)))
    _spreads(axes, x, [p.spread.mean for p in places], [p.spread for p in places], style.VERMILLION, "s")
    axes.set_xticks(x[::every], [str(p.first) for p in places[::every]])
    axes.set(xlabel="tokens of text before it (4: 4 to 7)", xlim=(-0.7, max(len(places), 1) - 0.3))


def aggregated_figure(record: ReuseRecord) -> bytes:
    """Aggregated neuron use s_agg(k) as a share of the FFN, and the share that one more token adds, against k; fine
    lines are single layers. RecordError for a record of an earlier version, which has no aggregated use."""
    use = record.aggregated
    if use is None:
        raise RecordError(f"{record.source}: has no aggregated use; run `workbench analyze reuse` again")
    with style.style():
        figure = style.new_figure(
            4.3, "Aggregated neuron use", "Neurons that k tokens in a row use together; fine lines are single layers",
            caption(record.run, record.machine), record.run.synthetic,
        )  # fmt: skip
        grid = figure.add_gridspec(1, 2, wspace=0.24, **style.area(figure, 0.7, 0.25, above=1.22))
        left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        window = paper().source["window"]
        style.panel_title(left, "Used by k tokens, s_agg(k)", _at(use, window + 1, "tokens"))
        style.panel_title(right, "Added by one more token, s_agg(k+1) − s_agg(k)", _added_at(use, window))
        for values in (*use.by_layer, use.mean):
            whole = values is use.mean
            look = {"color": style.BLUE if whole else style.PALE, "linewidth": 1.7 if whole else 0.8}
            left.plot(use.tokens, values, **look, marker="o" if whole else None, markersize=3.5)
            look["color"] = style.VERMILLION if whole else style.PALE
            right.plot(
                between(use.tokens), added(use.tokens, values), **look, marker="s" if whole else None, markersize=3.5
            )
        left.set(ylim=(0, None), ylabel="share of the FFN")
        _log_tokens(right, use.tokens[-1])
        right.set_yscale("log")
        right.yaxis.set_major_locator(FixedLocator([m * 10.0**e for e in range(-6, 1) for m in (1, 2, 5)]))
        right.yaxis.set_minor_locator(NullLocator())
        right.set(ylabel="share of the FFN (log scale)")
        published = {point["window"]: point["new_share"] for point in paper().reuse}
        for k, share in published.items():
            here = dict(zip(use.tokens, added(use.tokens, use.mean), strict=False)).get(k)
            below = here is not None and share < here  # the curve falls: the free side is above it or below it
            style.paper_point(right, k, share, f"paper, k = {k}", left=k > 0 and below)
        # The paper's points show how far down its model goes; the axis has to hold them too.
        mean = [v for v in added(use.tokens, use.mean) if v > 0]
        right.set_ylim(
            min([*mean, *published.values()]) / 1.8, max([*added(use.tokens, use.mean), *published.values()]) * 2
        )
        for axes in (left, right):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
            axes.grid(axis="y")
        left.set(xlabel="k, tokens", xlim=(-0.02 * use.tokens[-1], 1.02 * use.tokens[-1]))
        return style.png(figure)


def _log_tokens(axes: Axes, last: int) -> None:
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.xaxis.set_major_locator(FixedLocator([0, *(2**e for e in range(last.bit_length()))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="k, tokens (log scale)", xlim=(-0.15, 1.1 * last))


def added(tokens: Sequence[int], values: Sequence[float]) -> list[float]:
    """What one more token adds from each k but the last: s_agg(k+1) - s_agg(k), the mean of these between two k that
    are further apart."""
    steps = zip(itertools.pairwise(tokens), itertools.pairwise(values), strict=True)
    return [(high - low) / (after - before) for (before, after), (low, high) in steps]


def between(tokens: Sequence[int]) -> list[float]:
    """Where each value of `added` belongs: the middle of the k that it is the mean of."""
    return [(before + after - 1) / 2 for before, after in itertools.pairwise(tokens)]


def _at(use: AggregatedUse, tokens: int, word: str) -> str:
    """'5 tokens use 17.0% of the FFN'; nothing where the record has no such k."""
    found = dict(zip(use.tokens, use.mean, strict=True)).get(tokens)
    return (
        ""
        if found is None
        else f"{tokens} {word} use {zeros_text(found)} of the FFN, {use.tokens[-1]} use " + (zeros_text(use.mean[-1]))
    )


def _added_at(use: AggregatedUse, k: int) -> str:
    found = dict(zip(use.tokens, added(use.tokens, use.mean), strict=False))
    theirs = {point["window"]: point["new_share"] for point in paper().reuse}
    if k not in found or k not in theirs:
        return ""
    return f"k = {k}: {zeros_text(found[k])} here, {zeros_text(theirs[k])} in the paper ({paper().source['model']})"


def window_figure(record: WindowRecord) -> bytes:
    """Latency of a token by part, and the DRAM that the window needs, against the window; a window that does not fit
    the budget is hatched pale in the second panel, and named cut short in the first."""
    rows = sorted(record.rows, key=lambda row: row.window)
    x, names = range(len(rows)), [str(row.window) for row in rows]
    with style.style():
        figure = style.new_figure(
            4.6, "Latency and DRAM as the neuron window grows", fitting_sentence(record),
            "Medians of parts, stacked; they need not add up to the median total. Each was run within the budget.\n"
            f"{caption(record.run, record.machine)}", record.run.synthetic,
        )  # fmt: skip
        grid = figure.add_gridspec(1, 2, wspace=0.25, **style.area(figure, 0.75, 1.3, above=1.5, below=0.6))
        latency, dram = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        tops = [0.0] * len(rows)
        for part, (_, colour, hatch) in _PARTS.items():
            values = [segments(row.measured)[part] for row in rows]
            latency.bar(x, values, 0.68, bottom=tops, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
            tops = [top + value for top, value in zip(tops, values, strict=True)]
        for at, row, top in zip(x, rows, tops, strict=True):
            note = (
                f"{ms(row.measured.total)}{'*' if row.measured.window_trims else ''}\n{size(row.measured.flash_bytes)}"
            )
            latency.annotate(note, (at, top), xytext=(0, 4), textcoords="offset points", ha="center", size=7.5)
        latency.set(ylim=(0, 1.25 * max(tops)), ylabel="ms a token")
        style.panel_title(latency, "Latency of a token", "above: total ms and flash bytes; * cut short to fit")
        _dram(dram, record)
        for axes in (latency, dram):
            axes.set(xlabel="window k, tokens")
            axes.set_xticks(x, names)
            axes.tick_params(axis="x", length=0)
            axes.yaxis.set_major_locator(MaxNLocator(6))
            axes.grid(axis="y")
        handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=text) for text, c, h in _PARTS.values()]
        figure.legend(
            handles=handles, loc="upper left", ncols=4, fontsize=8.5, handlelength=1.6, handleheight=1.1,
            columnspacing=1.8, borderpad=0, bbox_to_anchor=(0.012, 1 - 0.67 / figure.get_figheight()), borderaxespad=0,
        )  # fmt: skip
        return style.png(figure)


def _dram(axes: Axes, record: WindowRecord) -> None:
    rows = sorted(record.rows, key=lambda row: row.window)
    unit, name = (1e9, "GB") if max(row.need_bytes for row in rows) >= 2e9 else (1e6, "MB")
    for at, row in enumerate(rows):
        slots, fixed = row.slot_bytes / unit, row.fixed_bytes / unit
        axes.bar(at, fixed, 0.68, color=style.GREY, edgecolor="white", linewidth=0.5)
        colour, hatch, edge = (style.GREEN, "", "white") if row.fits else ("white", "////", style.GREEN)
        axes.bar(at, slots, 0.68, bottom=fixed, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.8)
    top = 1.12 * max(*(row.need_bytes for row in rows), record.budget_bytes) / unit
    axes.set(ylabel=f"DRAM needed, {name}", ylim=(0, top))
    style.paper_line(axes, record.budget_bytes / unit)
    last = rows[-1]
    style.panel_title(axes, "DRAM that the whole window needs", "slots by calibration; hatched: does not fit")
    style.end_labels(
        axes,
        [
            (record.budget_bytes / unit, f"budget {size(record.budget_bytes)}", style.INK),
            ((last.fixed_bytes + last.slot_bytes / 2) / unit, "slots", style.GREEN),
            (last.fixed_bytes / unit / 2, "all else", style.GREY),
        ],
    )
