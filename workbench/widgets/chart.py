"""Latency by token as a small SVG: io, mem, compute and predictor stacked, reads a token below, a line at each change.

Text, not a picture: one path for each part, so that drawing it takes about a millisecond and sending it some kilobytes.
The parts differ in hatch and order as well as in colour, and stand on the axes with their units.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.report import style
from workbench.widgets.stretch import INDEX
from workbench.widgets.worker import Mark

SHOWN_TOKENS = 128
WIDTH, HEIGHT = 960, 306
LEFT, RIGHT = 58, 952
TOP, MIDDLE = 72, 206  # of the latency plot
STRIP_TOP, BOTTOM = 226, 270  # of the strip with the reads
LABEL_CHARACTERS = 30
CHARACTER_WIDTH = 5.9
"""Of the marks' labels, in the drawing's units: a guess that is safely wide."""
CUT = 2.5
"""The axis ends at this many times the 90th percentile: one slow token must not flatten the others."""

# part: label, colour, the strokes of its hatch on a tile of 6 units
PARTS: dict[str, tuple[str, str, str]] = {
    "io": ("io: reading flash", style.BLUE, ""),
    "mem": ("mem: neurons in and out of DRAM", style.ORANGE, "<path d='M0 6L6 0' stroke='#fff' stroke-width='1.4'/>"),
    "compute": ("compute, the predictor apart", style.SKY, "<circle cx='3' cy='3' r='1' fill='#1a1a1a'/>"),
    "predictor": ("predictor", style.VERMILLION, "<path d='M0 0L6 6M0 6L6 0' stroke='#fff' stroke-width='.9'/>"),
}
INK = "color:var(--jp-ui-font-color1,var(--vscode-foreground,#1a1a1a))"
SOFT = "fill='currentColor' fill-opacity='.72'"


def latency_chart(rows: NDArray[np.float64], marks: Sequence[Mark], name: str = "chart") -> str:
    """The last tokens of `rows` [tokens, stretch.COLUMNS] and the marks among them. `name`: unique on the page."""
    rows = rows[-SHOWN_TOKENS:]
    first = int(rows[0, INDEX["number"]]) if len(rows) else 1
    first = max(first, int(rows[-1, INDEX["number"]]) - SHOWN_TOKENS + 1) if len(rows) else 1
    each = (RIGHT - LEFT) / SHOWN_TOKENS
    x = LEFT + (rows[:, INDEX["number"]] - first) * each
    parts = segments(rows)
    total = np.sum(list(parts.values()), axis=0) if len(rows) else np.zeros(0)
    limit, ticks = axis(min(float(total.max()), CUT * float(np.percentile(total, 90))) if len(rows) else 10.0)
    reads = rows[:, INDEX["reads"]]
    most, read_ticks = axis(float(reads.max()) if len(rows) else 100.0, 2)
    out = [
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{_summary(rows)}' "
        f"style='width:100%;max-width:{WIDTH}px;height:auto;display:block;{INK}' font-family='DejaVu Sans,sans-serif' "
        f"font-size='11'><defs>{_patterns(name)}</defs>",
        _legend(name),
        _grid(ticks, limit, TOP, MIDDLE, "ms a token"),
        _grid(read_ticks, most, STRIP_TOP, BOTTOM, "reads"),
    ]
    scale, bar, floor = (MIDDLE - TOP) / limit, each * 0.86, np.full(len(rows), float(MIDDLE))
    for part, values in parts.items():
        top = np.maximum(floor - values * scale, TOP)
        out.append(_bars(x, floor, top, bar, f"url(#{name}-{part})" if PARTS[part][2] else PARTS[part][1], part))
        floor = top
    out.append(
        _bars(x, np.full(len(rows), BOTTOM), BOTTOM - reads * (BOTTOM - STRIP_TOP) / most, bar, "#8c8c8c", "reads")
    )
    for at, value in zip(x.tolist(), total.tolist(), strict=True):
        if value > limit * 1.001:  # a bar that goes on beyond the axis
            out.append(f"<path d='M{at:.1f} {TOP - 1}h{bar:.1f}l{-bar / 2:.1f} -5z' fill='currentColor'/>")
    out += [_tokens_axis(first, each), _marks(marks, first, each), "</svg>"]
    return "".join(out)


def segments(rows: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """ms by part, [tokens] each, the predictor taken out of compute; in the order in which they are stacked."""
    io, mem, compute, predictor = (rows[:, INDEX[f"{p}_ms"]] for p in ("io", "mem", "compute", "predictor"))
    return {"io": io, "mem": mem, "compute": np.maximum(compute - predictor, 0), "predictor": predictor}


def axis(most: float, count: int = 4) -> tuple[float, list[float]]:
    """Where an axis from 0 ends and its ticks, about `count` of them, at round numbers."""
    raw = max(most, 1e-3) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    return max(most * 1.04, step), [i * step for i in range(int(most * 1.04 / step) + 1)]


def _bars(
    x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64], width: float, fill: str, part: str
) -> str:
    steps = [
        f"M{a:.1f} {b:.1f}h{width:.1f}V{c:.1f}h-{width:.1f}z"
        for a, b, c in zip(x.tolist(), low.tolist(), high.tolist(), strict=True)
        if b - c > 0.05
    ]
    return f"<path class='wb-{part}' fill='{fill}' d='{''.join(steps)}'/>"


def _patterns(name: str) -> str:
    return "".join(
        f"<pattern id='{name}-{part}' width='6' height='6' patternUnits='userSpaceOnUse'>"
        f"<rect width='6' height='6' fill='{colour}'/>{hatch}</pattern>"
        for part, (_, colour, hatch) in PARTS.items()
        if hatch
    )


def _legend(name: str) -> str:
    out, x = [], float(LEFT)
    for part, (text, colour, hatch) in PARTS.items():
        fill = f"url(#{name}-{part})" if hatch else colour
        out.append(f"<rect x='{x:.0f}' y='8' width='18' height='12' fill='{fill}'/>")
        out.append(f"<text x='{x + 24:.0f}' y='18' fill='currentColor'>{text}</text>")
        x += 24 + 6.6 * len(text) + 26
    return "".join(out)


def _grid(ticks: list[float], limit: float, top: float, bottom: float, unit: str) -> str:
    out = []
    for tick in ticks:
        y = bottom - tick / limit * (bottom - top)
        out.append(f"<path d='M{LEFT} {y:.1f}H{RIGHT}' stroke='currentColor' stroke-opacity='.16'/>")
        out.append(f"<text x='{LEFT - 6}' y='{y + 3.8:.1f}' text-anchor='end' {SOFT}>{tick:,.10g}</text>")
    middle = (top + bottom) / 2
    out.append(f"<text transform='translate(13 {middle:.0f}) rotate(-90)' text-anchor='middle' {SOFT}>{unit}</text>")
    return "".join(out)


def _tokens_axis(first: int, each: float) -> str:
    out = []
    for number in range(-(-first // 16) * 16, first + SHOWN_TOKENS, 16):
        x = LEFT + (number - first + 0.43) * each
        out.append(f"<text x='{x:.1f}' y='{BOTTOM + 15}' text-anchor='middle' {SOFT}>{number}</text>")
    middle = (LEFT + RIGHT) / 2
    out.append(f"<text x='{middle:.0f}' y='{BOTTOM + 31}' text-anchor='middle' {SOFT}>token</text>")
    return "".join(out)


def _marks(marks: Sequence[Mark], first: int, each: float) -> str:
    """A dashed line at each mark; its words above, on the first of two lines that has room, else none: the list below
    the chart has them all."""
    out, free = [], [float(LEFT) - 1, float(LEFT) - 1]
    for mark in marks:
        if not first <= mark.token <= first + SHOWN_TOKENS:
            continue
        x = LEFT + (mark.token - first) * each - each * 0.07
        dash = "" if mark.kind == "setting" else " stroke-dasharray='2 3'"
        out.append(f"<path d='M{x:.1f} 34V{BOTTOM}' stroke='currentColor' stroke-width='1.2'{dash}/>")
        words = mark.words if len(mark.words) <= LABEL_CHARACTERS else mark.words[: LABEL_CHARACTERS - 1] + "…"
        width = CHARACTER_WIDTH * len(words) + 8
        left = x if x + width <= RIGHT else x - width - 4
        line = next((i for i, end in enumerate(free) if left >= end), None)
        if line is not None:
            free[line] = max(left + width, x + 4)
            weight = "600" if mark.kind == "setting" else "400"
            out.append(
                f"<text x='{left + 4:.1f}' y='{43 + 15 * line}' font-weight='{weight}' fill='currentColor'>"
                f"{html.escape(words)}</text>"
            )
    return "".join(out)


def _summary(rows: NDArray[np.float64]) -> str:
    """The chart in words, for those who cannot see it."""
    if not len(rows):
        return "Latency by token: no tokens yet"
    medians = ", ".join(f"{part} {np.median(values):.1f} ms" for part, values in segments(rows).items())
    reads = rows[:, INDEX["reads"]].mean()
    return f"Latency by token, medians of the last {len(rows)}: {medians}; {reads:.0f} reads a token"
