"""Controls made from the fields of Ablation and RunSpec: a new field there is a new control here.

bool: check box. Literal: drop-down list. Text: text field. int with limits: slider over round values. dram: slider in
percent, with a text field beside it for sizes such as 3GiB. All are ipywidgets' own, so that the keyboard alone reaches
and works them.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import os
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from workbench.ablation import Ablation
from workbench.engines.setting import Setting
from workbench.errors import AblationError, WorkbenchError
from workbench.fields import field_help
from workbench.report.numbers import chunk, percent
from workbench.spec import LIMITS, RunSpec
from workbench.widgets.errors import widgets_module

Change = Callable[[str, Any], None]
FIELDS = {f.name: f for kind in (Ablation, RunSpec) for f in dataclasses.fields(kind)}
HINTS = {**get_type_hints(Ablation), **get_type_hints(RunSpec)}
HELP = {
    **field_help(Ablation),
    **field_help(RunSpec),
    "false_negative": "share of active neurons that the predictors may miss: a lower one loads more",
}
LABELS = {
    "window": "window k",
    "dram": "DRAM budget",
    "depth": "reads in flight",
    "chunk_bytes": "longest read",
    "coalesce_gap_bytes": "merge gap",
    "compute_threads": "threads",
    "false_negative": "FN rate",
    "io": "io engine",
    "draft": "draft store",
    "draft_tokens": "drafted at once",
}
"""Shorter names where the field's own would not fit; others are shown as they are."""
LARGEST_EXACT = 2**53 - 1
"""Integers up to here survive the way to the browser."""
TIMES_DEFAULT = 16
"""A slider ends at this many times the field's default, where its limits allow more."""


class Controls:
    """Widgets by field name in `widgets`; `change(name, value)` is told what the user does.

    `show(setting)` puts every control where the setting is, without telling anyone: that is also how a refused choice
    snaps back.
    """

    def __init__(self, setting: Setting, change: Change):
        self._w = widgets_module()
        self._change, self._silent = change, False
        self.rates = setting.predictors.false_negatives if setting.predictors is not None else []
        names = [*FIELDS, *(["false_negative"] if self.rates else [])]
        values = setting.values()
        self.widgets: dict[str, Any] = {name: self._widget(name, values[name]) for name in names}
        self.dram_text = self._w.Text(
            value=setting.run.dram, continuous_update=False, layout=self._w.Layout(width="76px"),
            tooltip="a share such as 50%, or a size such as 3GiB; Enter sets it",
        )  # fmt: skip
        self.dram_text.observe(lambda event: self._told("dram", event["new"].strip()), "value")
        for name, widget in self.widgets.items():
            widget.observe(lambda event, name=name: self._told(name, self._value(name, event["new"])), "value")

    def show(self, setting: Setting) -> None:
        """Put every control where the setting is."""
        self._silent = True
        try:
            for name, value in setting.values().items():
                if name in self.widgets:
                    self._put(name, value)
            self.dram_text.value = setting.run.dram
        finally:
            self._silent = False

    def names(self, kind: Any) -> list[str]:
        """The names of a class's fields that have a control here, in its order."""
        return [f.name for f in dataclasses.fields(kind) if f.name in self.widgets]

    def help_html(self) -> str:
        """What every control does, as a list that opens and closes."""
        items = "".join(
            f"<dt style='font-weight:600'>{html.escape(label(name))}</dt>"
            f"<dd style='margin:0 0 4px 1em'>{html.escape(HELP.get(name, ''))}</dd>"
            for name in self.widgets
        )
        return f"<details><summary style='cursor:pointer'>What the controls do</summary><dl>{items}</dl></details>"

    def _told(self, name: str, value: Any) -> None:
        if not self._silent:
            self._change(name, value)

    # one widget a field

    def _widget(self, name: str, value: Any) -> Any:
        w, hint = self._w, HINTS.get(name, float)
        common: dict[str, Any] = {"description": label(name), "tooltip": HELP.get(name, ""), "disabled": False}
        wide = {"layout": w.Layout(width="calc(100% - 6px)"), "style": {"description_width": "104px"}}
        if hint is bool:
            reason = never(name)
            common |= {"tooltip": f"{common['tooltip']}: {reason}" if reason else common["tooltip"]}
            common |= {"disabled": bool(reason) and not value, "indent": False}
            return w.Checkbox(value=value, layout=w.Layout(width="auto"), **common)
        if get_args(hint):
            return w.Dropdown(options=get_args(hint), value=value, **common, **wide)
        if name == "dram":
            return w.IntSlider(
                value=share(value), min=5, max=200, step=5, readout=False, continuous_update=False, **common, **wide
            )
        if hint is str:
            return w.Text(value=value, continuous_update=False, placeholder="none", **common, **wide)
        if LIMITS.get(name, (0, 0))[1] > LARGEST_EXACT:
            return w.BoundedIntText(value=value, min=LIMITS[name][0], max=LARGEST_EXACT, **common, **wide)
        options = self._options(name, value)
        return w.SelectionSlider(options=options, value=value, continuous_update=False, **common, **wide)

    def _options(self, name: str, value: Any) -> list[tuple[str, Any]]:
        if name == "false_negative":
            own = [("as trained", None)] if value is None else []
            return [*own, *((percent(rate), rate) for rate in self.rates)]
        return [(shown(name, v), v) for v in sorted({*steps(name), value})]

    def _value(self, name: str, new: Any) -> Any:
        return f"{new}%" if name == "dram" else new.strip() if isinstance(new, str) else new

    def _put(self, name: str, value: Any) -> None:
        widget = self.widgets[name]
        if name == "dram":
            value = share(value) or widget.value
        elif isinstance(widget, self._w.SelectionSlider) and value not in [v for _, v in widget.options]:
            widget.options = self._options(name, value)
        widget.value = value


def label(name: str) -> str:
    """What a control is called."""
    return LABELS.get(name, name.replace("_", " "))


def shown(name: str, value: int) -> str:
    """A slider's value as text."""
    if name.endswith("_bytes"):
        return chunk(value)
    return "all" if value == 0 and name in ("compute_threads", "context") else str(value)


def share(dram: str) -> int | None:
    """'50%' as 50; None for a budget in bytes."""
    text = dram.strip().removesuffix("%").strip()
    return round(float(text)) if dram.strip().endswith("%") and text.replace(".", "", 1).isdigit() else None


def steps(name: str) -> list[int]:
    """Round values of an integer field within its limits: about two in each doubling, bytes in powers of two."""
    low, high = LIMITS[name]
    default = FIELDS[name].default
    if name == "compute_threads":
        return list(range(low, (os.cpu_count() or 1) + 1))
    top = min(high, TIMES_DEFAULT * max(1, default)) if isinstance(default, int) else high
    if name.endswith("_bytes"):
        return [0] * (low == 0) + [1 << i for i in range(12, top.bit_length()) if low <= 1 << i <= top]
    doubled = {v for i in range(top.bit_length()) for v in (1 << i, 3 << i)}
    return sorted({low} | {v for v in doubled if low <= v <= top})


def never(name: str) -> str:
    """Why a technique cannot be switched on with any other, such as one that is not there yet; '' when it can."""
    reason = ""
    for predictor, windowing in itertools.product(("oracle", "off"), (False, True)):
        try:
            Ablation(**{"predictor": predictor, "windowing": windowing, name: True})
        except AblationError as error:
            reason = reason or str(error).removeprefix("ablation: ")
        else:
            return ""
    return reason


def refusal(error: WorkbenchError) -> str:
    """Why a choice was refused, in the words of a panel, where a field is set by a control and not by an option."""
    text = str(error)
    for option, control in (
        ("pass --dram", "set the DRAM budget to"),
        ("pass --io", "set io to"),
        ("pass --draft STORE", "give its store as draft store"),
    ):
        text = text.replace(option, control)
    return text
