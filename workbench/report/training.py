"""The course of a predictor training, drawn while it runs and after: loss by step, errors by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from workbench.report import style
from workbench.report.numbers import percent

LIVE_DPI = 100
"""Of a figure that is replaced several times a minute."""


def training_figure(
    curve: Mapping[str, Sequence[Any]],
    quality: Sequence[Mapping[str, float]] | None,
    *,
    steps: int,
    target: float,
    quality_of: str,
    caption: str,
    dpi: int = LIVE_DPI,
) -> bytes:
    """PNG of a training so far.

    curve: 'step' [n] and 'loss' [n][layers]. quality: of each layer false_negative and false_positive (shares), None
    before they are known. steps: how many there will be. target: the false-negative rate asked for. quality_of: on what
    text the quality was measured, and at which step.
    """
    with style.style():
        figure = style.new_figure(
            3.8,
            "Training of the predictors of all layers",
            "Loss by step; errors at the thresholds that the asked false-negative rate gives",
            caption,
            synthetic=False,
        )
        box = style.area(figure, 0.75, 0.25, above=1.12)
        grid = figure.add_gridspec(1, 2, wspace=0.24, **box)
        _losses(figure.add_subplot(grid[0, 0]), curve, steps)
        _errors(figure.add_subplot(grid[0, 1]), quality, target, quality_of)
        return style.png(figure, dpi)


def _losses(axes: Axes, curve: Mapping[str, Sequence[Any]], steps: int) -> None:
    at, losses = list(curve["step"]), np.array(curve["loss"], dtype=float)
    line = "waiting for the first step"
    if at:
        mean = losses.mean(axis=1)
        line = f"mean {mean[-1]:.4f} at step {at[-1]:,}; band: lowest to highest layer"
        axes.fill_between(at, losses.min(axis=1), losses.max(axis=1), color=style.SKY, alpha=0.35, linewidth=0)
        axes.plot(at, mean, color=style.BLUE, marker="o" if len(at) <= 40 else "", markersize=3.5)
        top, low = float(np.percentile(losses.max(axis=1), 98)), float(losses.min())
        axes.set_ylim(max(0.0, low - 0.08 * (top - low)), top + 0.08 * (top - low) + 1e-6)
    style.panel_title(axes, "Loss", line)
    axes.set(xlim=(0, max(steps, 1)), xlabel="step", ylabel="loss (log-likelihood, weighted)")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")


def _errors(axes: Axes, quality: Sequence[Mapping[str, float]] | None, target: float, quality_of: str) -> None:
    style.panel_title(axes, "Errors by layer", quality_of if quality else "not measured yet")
    axes.set(xlabel="layer", ylabel="share of neurons")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(axis="y")
    if not quality:
        axes.set(xlim=(-0.5, 0.5), ylim=(0, 2 * target))
        return
    x = list(range(len(quality)))
    shown = (
        ("false_negative", "false negatives, of the active", style.VERMILLION, "o"),
        ("false_positive", "false positives, of the inactive", style.BLUE, "s"),
    )
    for name, label, colour, marker in shown:
        y = [row[name] for row in quality]
        dash = "-" if name == "false_negative" else (0, (4, 2))
        axes.plot(x, y, color=colour, marker=marker, linestyle=dash, label=label)
    axes.axhline(target, color=style.INK, linewidth=1.1, linestyle=(0, (1, 1.5)), label=f"asked: {percent(target)}")
    high = max(target, *(row[name] for row in quality for name, *_ in shown))
    axes.set(xlim=(-0.4, len(x) - 0.6), ylim=(0, 1.45 * high))
    axes.legend(loc="upper left", fontsize=8.5, ncols=1, borderpad=0.2, handlelength=2.2)
