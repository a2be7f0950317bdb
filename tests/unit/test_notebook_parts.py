"""What notebooks show: the training figure, tables, progress in words, the gallery's page, a record's text."""

from __future__ import annotations

import base64
import io
import sys
import threading
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from workbench.errors import DeviceError
from workbench.experiments.gallery import Picture, page, pictures
from workbench.pictures import WIDTH, smaller
from workbench.report import style
from workbench.report.table import Column, Line, Table
from workbench.report.training import training_figure
from workbench.widgets import bar
from workbench.widgets.bar import Pace

CURVE = {"step": [1, 2, 3], "loss": [[0.9, 0.7], [0.6, 0.5], [0.5, 0.4]]}
NOTHING: dict[str, Any] = {"step": [], "loss": []}
QUALITY = [{"false_negative": 0.04, "false_positive": 0.1}, {"false_negative": 0.05, "false_positive": 0.02}]


def drawn(**change: Any) -> bytes:
    given: dict[str, Any] = {"curve": CURVE, "quality": QUALITY, "steps": 10, "target": 0.05, "quality_of": "here"}
    given |= {"caption": "a model · a machine", **change}
    return training_figure(given.pop("curve"), given.pop("quality"), **given)


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.mark.parametrize(
    "change",
    [{}, {"quality": None}, {"curve": NOTHING, "quality": None}, {"curve": {"step": [1], "loss": [[0.5]]}}],
    ids=["whole", "no quality yet", "nothing yet", "one step of one layer"],
)
def test_the_training_figure_is_drawn_at_any_moment(change: dict[str, Any]) -> None:
    png = drawn(**change)
    assert pixels(png).shape[1] == 920
    assert len(png) < 150_000
    assert png == drawn(**change)


def test_errors_can_be_told_apart_without_colour() -> None:
    """Each series alone changes the grey picture elsewhere than the other: marker and dash differ, not colour only."""
    grey = [pixels(drawn(quality=[{**row, other: 0.0} for row in QUALITY])).mean(axis=2) for other in QUALITY[0]]
    assert np.abs(grey[0] - grey[1]).max() > 60


def test_threads_that_draw_leave_the_settings_alone() -> None:
    before = dict(mpl.rcParams)
    threads = [threading.Thread(target=drawn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(mpl.rcParams) == before
    with style.style():
        assert mpl.rcParams["text.parse_math"] is False


def test_a_table_shows_itself_in_a_notebook() -> None:
    line = Line("measured", "<row>", {"a": "1 & 2"})
    shown = Table("a title", "row", (Column("a", "head", "ms"),), ((line,),))._repr_html_()
    assert "&lt;row&gt;" in shown
    assert "1 &amp; 2" in shown
    assert shown.startswith('<div class="workbench"><style>')


def test_pace_says_rate_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(bar.time, "monotonic", lambda: now)
    pace = Pace()
    pace.at("reading", 1000, 9000)
    assert pace.line("tokens") == "reading: 1,000 of 9,000 tokens"
    now = 110.0
    pace.at("reading", 3000, 9000)
    assert pace.line("tokens").startswith("reading: 3,000 of 9,000 tokens · 200 tokens/s · 0:30 left, until ")
    assert pace.share == pytest.approx(1 / 3)
    pace.at("writing", 0, 4)  # a stage of its own: its rate is not the one before's
    assert pace.line() == "writing: 0 of 4"
    now = 114.0
    pace.at("writing", 1, 4)
    assert pace.line().startswith("writing: 1 of 4 · 0.25/s · 0:12 left")


def test_a_progress_bar_without_ipywidgets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(DeviceError, match=r"flash-workbench\[notebooks\]"):
        bar.progress_bar("title")


def test_pictures_stand_under_their_headings() -> None:
    png = drawn()
    out = {"data": {"image/png": base64.b64encode(png).decode()}}
    cells = [
        SimpleNamespace(
            cell_type="markdown", source="# Title\n\ntext\n\n## Part one\n\nOne\nline of 1.5 kB: more. And another"
        ),
        {"outputs": [out, {"output_type": "stream"}]},
        SimpleNamespace(cell_type="markdown", source="no heading"),
        {"outputs": [out]},
    ]
    made = [cell if not isinstance(cell, dict) else _code(cell) for cell in cells]
    found = list(pictures("01_name", SimpleNamespace(cells=made)))
    assert [picture.heading for picture in found] == ["Part one", "Part one"]
    assert found[0].png == png
    assert found[0].line == "One line of 1.5 kB: more."
    text = page([(found[0], "gallery/01.png")], {"01_name": "Title"})
    assert "## Title" in text
    assert "**Part one.** One line of 1.5 kB: more.\n\n![Part one](gallery/01.png)" in text


class _code(dict[str, Any]):
    cell_type = "code"


def test_pictures_are_brought_to_size() -> None:
    small = smaller(drawn(dpi=300))
    assert pixels(small).shape[1] == WIDTH
    assert len(small) < 150_000
    assert Picture("n", "h", small).png == small
