"""Progress with a rate and an end time, in a notebook."""

from __future__ import annotations

import html
import time
from collections.abc import Callable

from workbench.widgets.errors import widgets_module

SHOW_SECONDS = 0.25
"""Between two updates of the page."""


class Pace:
    """Where a long job stands, in words. Stages follow one another, each with its own total."""

    def __init__(self) -> None:
        self.stage, self.done, self.total = "", 0, 0
        self._begun, self._first = time.monotonic(), 0

    def at(self, stage: str, done: int, total: int) -> None:
        """The job has done so much of the total of its present stage."""
        if stage != self.stage:
            self._begun, self._first = time.monotonic(), done
        self.stage, self.done, self.total = stage, done, total

    @property
    def share(self) -> float:
        """Of the present stage, 0 to 1."""
        return self.done / self.total if self.total else 0.0

    def line(self, unit: str = "") -> str:
        """'training: 5,120 of 91,648 tokens · 3,021 tokens/s · 0:28 left, until 15:04:05'; at first no rate."""
        unit = f" {unit}" if unit else ""
        text = f"{self.stage}: {self.done:,} of {self.total:,}{unit}"
        spent = time.monotonic() - self._begun
        if self.done <= self._first or spent <= 0:
            return text
        rate = (self.done - self._first) / spent
        left = max(0.0, (self.total - self.done) / rate)
        ends = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        return f"{text} · {speed}{unit}/s · {int(left) // 60}:{int(left) % 60:02d} left, until {ends}"


def progress_bar(title: str) -> Callable[[str, int, int], None]:
    """Shows a bar in the cell that runs; returns the function to give as `progress`. DeviceError without ipywidgets."""
    w = widgets_module()
    from IPython.display import display

    bar, line = w.FloatProgress(min=0, max=1, layout=w.Layout(width="16em")), w.HTML(html.escape(title))
    row = w.HBox([bar, line], layout=w.Layout(align_items="center", display="none"))
    display(row)  # seen from the first call on: what was done before shows no bar
    pace, shown = Pace(), 0.0

    def show(stage: str, done: int, total: int) -> None:
        nonlocal shown
        pace.at(stage, done, total)
        if time.monotonic() - shown < SHOW_SECONDS and done < total:
            return
        shown = time.monotonic()
        row.layout.display = ""
        bar.value = pace.share
        line.value = html.escape(f"{title} · {pace.line()}")

    return show
