"""The look of every figure: one typeface, Okabe-Ito colours with hatches and markers, a caption line.

Figures are made from `Figure` objects on an Agg canvas, never through pyplot, so that drawing leaves no
state behind and needs no display.
"""

from __future__ import annotations

import io
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.text import Text

INK, SOFT, PALE, FAINT = "#1a1a1a", "#5f5f5f", "#b5b5b5", "#e2e2e2"
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#8c8c8c"
DPI = 200
_DRAWING = threading.RLock()
WIDTH = 9.2
"""Inches; every figure has it, so that type is the same size in all of them."""

# The legible order of Okabe-Ito for lines on white; yellow is left out, it vanishes there.
LINES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, INK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib ships it, so a figure looks alike on every machine
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.labelsize": 9,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "text.color": INK,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,  # a '$' in a model's name is a dollar
}


@contextmanager
def style() -> Iterator[None]:
    """The figures' settings, for as long as the block runs. They are the process's: one thread draws at a time."""
    with _DRAWING, mpl.rc_context(_STYLE):
        yield


def new_figure(height: float, title: str, subtitle: str, caption: str, synthetic: bool) -> Figure:
    """A figure of WIDTH by `height` inches with its title above and its caption line below; the axes
    belong between `top(figure)` and `bottom(figure)`."""
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    figure.text(_x(0.12), 1 - 0.16 / height, title, size=12.5, weight="bold", va="top")
    figure.text(_x(0.12), 1 - 0.43 / height, subtitle, size=9, color=SOFT, va="top")
    lines = [part for line in caption.split("\n") for part in textwrap.wrap(line, 165)] or [""]
    figure.text(_x(0.12), 0.1 / height, "\n".join(lines), size=7, color=SOFT, va="bottom", linespacing=1.35)
    figure.caption_lines = len(lines)  # type: ignore[attr-defined]
    if synthetic:
        figure.text(
            1 - _x(0.14), 1 - 0.17 / height, "synthetic weights", size=9, weight="bold", va="top", ha="right",
            bbox={"boxstyle": "round,pad=0.35", "facecolor": YELLOW, "edgecolor": INK, "linewidth": 0.8},
        )  # fmt: skip
    return figure


def _x(inches: float) -> float:
    return inches / WIDTH


def area(figure: Figure, left: float, right: float, above: float = 1.0, below: float = 0.55) -> dict[str, float]:
    """Grid limits from margins in inches; `above` is counted from the top, `below` from the caption."""
    height = figure.get_figheight()
    below += 0.1 + 0.13 * figure.caption_lines  # type: ignore[attr-defined]
    return {"left": _x(left), "right": 1 - _x(right), "top": 1 - above / height, "bottom": below / height}


def spread(values: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least `gap` apart, inside low..high where they fit, as near to `values` as that allows."""
    order = sorted(range(len(values)), key=values.__getitem__)
    placed = [values[i] for i in order]
    for _ in range(200):
        moved = False
        for a in range(len(placed) - 1):
            short = gap - (placed[a + 1] - placed[a])
            if short > 1e-9:
                placed[a] -= short / 2
                placed[a + 1] += short / 2
                moved = True
        if placed and placed[-1] > high:
            placed[-1], moved = high, True
        if placed and placed[0] < low:
            placed[0], moved = low, True
        if not moved:
            break
    result = [0.0] * len(values)
    for position, index in zip(placed, order, strict=True):
        result[index] = position
    return result


def paper_line(axes: Axes, y: float, colour: str = INK) -> None:
    """A dashed reference line of the paper's."""
    axes.axhline(y, color=colour, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1.5)


def paper_point(axes: Axes, x: float, y: float, text: str, *, left: bool = False) -> None:
    """A point of the paper's: an open star with a short label to its upper right, or `left`."""
    axes.plot([x], [y], linestyle="none", marker="*", markersize=11, zorder=6, **PAPER_MARK)
    note = axes.annotate(
        text, (x, y), xytext=(-6 if left else 6, 5), textcoords="offset points", size=8.5, style="italic", zorder=7,
        ha="right" if left else "left",
    )  # fmt: skip
    halo(note)


def halo(text: Text) -> None:
    """Keeps a label legible where a line runs under it."""
    text.set_path_effects([Stroke(linewidth=2.5, foreground="white"), Normal()])


def panel_title(axes: Axes, title: str, line: str = "") -> None:
    """A panel's title, and a soft line between it and the panel."""
    axes.set_title(title, pad=23 if line else 9)
    axes.annotate(
        line, (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points", size=8.5, color=SOFT
    )


def end_label(axes: Axes, place: float, own: float, text: str, colour: str) -> None:
    """Names something at the right edge: `own` is its height there in points, `place` the label's."""
    height = axes_height(axes)
    axes.annotate(
        text, (1, own / height), xycoords="axes fraction", xytext=(16, place - own), textcoords="offset points",
        va="center", ha="left", size=8.5, color=INK,
        arrowprops={
            "arrowstyle": "-", "color": colour, "linewidth": 1.2, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5),
        },
    )  # fmt: skip


def end_labels(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """(y, text, colour): labels at the right edge, moved apart where they would touch. Call it when the
    limits are final."""
    height = axes_height(axes)
    low, high = (axes.transAxes.transform((0, share))[1] for share in (0, 1))
    own = [(axes.transData.transform((1, y))[1] - low) / (high - low) * height for y, _, _ in ends]
    for at, place, (_, text, colour) in zip(own, spread(own, 12.5, 0, height), ends, strict=True):
        end_label(axes, place, at, text, colour)


def axes_height(axes: Axes) -> float:
    """Height of the axes in points."""
    return axes.get_position().height * axes.figure.get_figheight() * 72  # type: ignore[union-attr]


PAPER_MARK: Mapping[str, Any] = {"markerfacecolor": "white", "markeredgecolor": INK, "markeredgewidth": 1.1}


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as PNG. Two drawings of one record are the same bytes: no date is stored."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()
