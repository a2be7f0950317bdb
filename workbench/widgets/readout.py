"""A session's figures as HTML: the numbers of the last tokens, the DRAM gauge, A beside the present, the list of marks.

Every text that comes from outside is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from workbench.engines.budget import DramPlan
from workbench.report.numbers import NONE, count, ms, ratio, size, speed, times
from workbench.widgets.chart import INK
from workbench.widgets.session import Snapshot
from workbench.widgets.stretch import INDEX, Summary, tokens_per_s
from workbench.widgets.worker import Mark

ROLLING = 32
"""Tokens that the rolling figures are of."""
MARKS_SHOWN = 5
_LINE = "border-top:1px solid color-mix(in srgb,currentColor 18%,transparent)"
_SOFT = "opacity:.72"
_USE_NAMES = {
    "resident": "resident weights",
    "predictor": "predictors",
    "kv": "KV cache",
    "scratch": "scratch",
    "ahead": "read ahead",
    "draft": "draft model",
}
_GREYS = ("#4d4d4d", "#8c8c8c", "#b5b5b5", "#d0d0d0", "#e2e2e2", "#6f6f6f", "#0072B2")


def rolling(snapshot: Snapshot) -> str:
    """The means of the last tokens made under the present setting."""
    rows = snapshot.rows[-min(ROLLING, snapshot.stretch_tokens) :] if snapshot.stretch_tokens else snapshot.rows[:0]
    some = len(rows) > 0
    read, io_s = (float(rows[:, INDEX[n]].sum()) for n in ("read_bytes", "io_ms"))
    cells = {
        "tokens a second": f"{tokens_per_s(rows):.1f}" if some and tokens_per_s(rows) else NONE,
        "ms a token": ms(float(rows[:, INDEX["total_ms"]].mean())) if some else NONE,
        "flash a token": size(read / len(rows)) if some else NONE,
        "reads a token": count(round(float(rows[:, INDEX["reads"]].mean()))) if some else NONE,
        "read speed": speed(1000 * read / io_s if io_s else None) if some else NONE,
        "tokens made": count(snapshot.tokens),
    }
    tiles = "".join(
        f"<div class='wb-figure' style='min-width:104px'><div style='font-size:20px;line-height:1.25;"
        f"font-variant-numeric:tabular-nums'>{value}</div>"
        f"<div style='{_SOFT};font-size:12px;line-height:1.3'>{name}</div></div>"
        for name, value in cells.items()
    )
    note = f"means of the last {len(rows)} tokens of this setting"
    note = f"<div style='{_SOFT};font-size:11px;line-height:1.5'>{note}</div>"
    return f"<div style='{INK}'><div style='display:flex;flex-wrap:wrap;gap:4px 26px'>{tiles}</div>{note}</div>"


def gauge(plan: DramPlan, rss_bytes: int, dram: str) -> str:
    """Where the DRAM goes, against the budget; and by how much the process really grew."""
    uses = {name: getattr(plan, f"{use}_bytes") for use, name in _USE_NAMES.items()}
    uses["neuron slots"] = sum(plan.slots) * plan.slot_bytes
    full = max(plan.budget_bytes, plan.total, 1)
    bars = "".join(
        f"<span title='{name}: {size(value)}' style='display:inline-block;height:14px;width:{100 * value / full:.2f}%;"
        f"background:{colour};box-shadow:inset -1px 0 #fff'></span>"
        for (name, value), colour in zip(uses.items(), _GREYS, strict=True)
        if value
    )
    swatches = " &nbsp; ".join(
        f"<span style='white-space:nowrap'><span style='display:inline-block;width:10px;height:10px;margin-right:4px;"
        f"background:{colour}'></span>{name} {size(value)}</span>"
        for (name, value), colour in zip(uses.items(), _GREYS, strict=True)
        if value
    )
    return (
        f"<div style='{INK};font-size:12px;line-height:1.6'><div><b>DRAM</b> planned {size(plan.total)} of a budget of "
        f"{size(plan.budget_bytes)} ({html.escape(dram)}); measured: the process grew by {size(rss_bytes)}, "
        "libraries included</div>"
        f"<div style='max-width:960px;border:1px solid currentColor;height:14px;font-size:0;line-height:0;"
        f"white-space:nowrap;overflow:hidden'>{bars}</div><div style='{_SOFT}'>{swatches}</div></div>"
    )


_COMPARED = (
    ("tokens a second", "tokens_per_s", lambda v: f"{v:.1f}"),
    ("total, ms", "total_ms", ms),
    ("io, ms", "io_ms", ms),
    ("mem, ms", "mem_ms", ms),
    ("compute, ms", "compute_ms", ms),
    ("of it predictor, ms", "predictor_ms", ms),
    ("flash a token", "flash_bytes", size),
    ("reads a token", "reads", count),
    ("tokens counted", "tokens", count),
)


def comparison(now: Summary | None, pinned: Summary | None, waiting: str = "") -> str:
    """The present setting's medians, and those of A with the ratio where one is pinned."""
    if now is None and pinned is None:
        return f"<div style='{INK};{_SOFT};font-size:12px'>{html.escape(waiting)}</div>"
    shown = [s for s in (pinned, now) if s is not None]
    heads = [f"A: {pinned.label}" if s is pinned and pinned is not None else f"present: {s.label}" for s in shown]
    both = pinned is not None and now is not None and now.number != pinned.number
    if pinned is not None and not both and now is not None:
        shown, heads = [pinned], [f"A, present: {pinned.label}"]
    cell = "padding:1px 14px 1px 0;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"
    left = cell.replace("text-align:right", "text-align:left")
    columns = [*heads, *(["present / A"] if both else [])]
    head = "".join(f"<th scope='col' style='{cell};font-weight:600'>{html.escape(h)}</th>" for h in columns)
    lines = []
    for name, key, form in _COMPARED:
        values = [s.tokens_per_s if key == "tokens_per_s" else s.row[key] for s in shown]
        texts = [form(v) for v in values]
        if both:
            texts.append(NONE if key == "tokens" else times(ratio(values[1], values[0])))
        cells = "".join(f"<td style='{cell}'>{t}</td>" for t in texts)
        lines.append(f"<tr style='{_LINE}'><th scope='row' style='{left};font-weight:400'>{name}</th>{cells}</tr>")
    note = (
        waiting if now is None else "medians a token; the first 8 tokens of a setting fill the window and do not count"
    )
    return (
        f"<div style='{INK};font-size:12px'><table class='wb-compare' style='border-collapse:collapse'><thead><tr>"
        f"<th scope='col' style='{left};font-weight:600'>setting</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
        f"</table><div style='{_SOFT};font-size:11px'>{html.escape(note)}</div></div>"
    )


def mark_list(marks: Sequence[Mark]) -> str:
    """The last marks in words."""
    items = "".join(
        f"<div>token {mark.token:,}: {html.escape(mark.words)}</div>" for mark in list(marks)[-MARKS_SHOWN:][::-1]
    )
    return f"<div style='{INK};{_SOFT};font-size:12px;line-height:1.5;min-height:1.5em'>{items}</div>"


def text_area(text: str) -> str:
    """The text so far, escaped, scrolled to its end by layout alone."""
    return (
        "<div tabindex='0' role='log' aria-label='generated text' style='display:flex;flex-direction:column-reverse;"
        "height:132px;overflow-y:auto;padding:6px 10px;border:1px solid "
        f"color-mix(in srgb,currentColor 30%,transparent);{INK}'><div class='wb-text' "
        "style='white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.45'>"
        f"{html.escape(text)}</div></div>"
    )


def status(line: str, error: bool, notice: str) -> str:
    """What the session does, and why the last choice was refused. Read out by screen readers when it changes."""
    state = f"<span class='wb-state'>{html.escape(line)}</span>"
    if error:
        state = f"<b class='wb-error' style='color:#b3261e'>⚠ {html.escape(line)}</b>"
    refused = f"<div class='wb-error' style='color:#b3261e'>⚠ {html.escape(notice)}</div>" if notice else ""
    return f"<div role='status' aria-live='polite' style='{INK};font-size:13px;min-height:1.5em'>{state}{refused}</div>"
