"""The panel without a browser: controls from the fields, refusals that snap back, drawings, one line for bad input."""

from __future__ import annotations

import dataclasses
import html
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed; pip install 'flash-workbench[notebooks]'")
import ipywidgets

from workbench.ablation import Ablation
from workbench.engines.setting import Setting
from workbench.errors import BudgetError, StoreError
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.report import read_ablation
from workbench.spec import LIMITS, RunSpec
from workbench.widgets import readout
from workbench.widgets.chart import SHOWN_TOKENS, axis, latency_chart
from workbench.widgets.controls import Controls, never, share, steps
from workbench.widgets.panel import Panel, panel
from workbench.widgets.stretch import COLUMNS, INDEX
from workbench.widgets.worker import Mark

WAIT = 120.0
RUN = RunSpec(dram="95%")


@pytest.fixture(scope="module")
def shown(demo_store: Store, demo_predictors: Predictors) -> Iterator[Panel]:
    """A panel on the demo model."""
    made = panel(demo_store.path, demo_predictors, run=RUN, prompt="The farmer", name="tests")
    yield made
    made.close()


@pytest.mark.parametrize("kind", [Ablation, RunSpec])
def test_every_field_has_the_control_of_its_type(shown: Panel, kind: Any) -> None:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        control = shown.controls.widgets[field.name]
        if hints[field.name] is bool:
            assert isinstance(control, ipywidgets.Checkbox)
        elif get_args(hints[field.name]):
            assert control.options == get_args(hints[field.name])
        elif field.name in LIMITS and isinstance(control, ipywidgets.SelectionSlider):
            low, high = LIMITS[field.name]
            values = [value for _, value in control.options]
            assert values == sorted(set(values))
            assert low == values[0]
            assert values[-1] <= high
        else:
            assert field.name in ("dram", "seed", "draft")
        assert control.description
        assert control.tooltip
    names = [f.name for f in dataclasses.fields(kind)]
    assert all(name in shown.controls.help_html() for name in names if name in ("hybrid", "windowing", "context"))


def test_every_step_of_a_slider_is_a_setting(demo_predictors: Predictors) -> None:
    for name in LIMITS.keys() - {"seed"}:
        for value in steps(name):
            dataclasses.replace(RUN, **{name: value})
    assert [share(text) for text in ("50%", "12.5 %", "3GiB", "half%")] == [50, 12, None, None]
    assert all(never(name) == "" for name in ("bundling", "windowing", "prefetch", "speculative"))
    told: list[Any] = []
    controls = Controls(Setting(Ablation(), RUN, demo_predictors), lambda *change: told.append(change))
    other = Setting(Ablation(bundling=False), dataclasses.replace(RUN, window=5, dram="40MB"), demo_predictors.at(0.1))
    controls.show(other)
    assert told == []  # showing is not changing
    assert controls.widgets["window"].value == 5  # which was no step before
    assert controls.widgets["false_negative"].value == 0.1
    assert controls.dram_text.value == "40MB"
    controls.widgets["bundling"].value = True
    controls.widgets["dram"].value = 70
    controls.dram_text.value = " 2GiB "
    assert told == [("bundling", True), ("dram", "70%"), ("dram", "2GiB")]


def test_a_refused_choice_snaps_back_and_says_why(shown: Panel) -> None:
    controls, before = shown.controls.widgets, shown.session.setting
    controls["predictor"].value = "off"
    assert controls["predictor"].value == "low_rank"
    assert "windowing=True with predictor='off' is undefined" in html.unescape(shown._html["status"].value)
    controls["dram"].value = 5
    assert shown.controls.dram_text.value == "95%"
    assert "set the DRAM budget to" in shown._html["status"].value
    assert shown.session.setting is before
    controls["window"].value = 8
    assert shown.session.setting.run.window == 8
    assert "⚠" not in shown._html["status"].value
    shown.session.wait(WAIT)
    controls["window"].value = 4
    shown.wait(WAIT)


def test_buttons_do_what_the_session_does(shown: Panel, tmp_path: Path) -> None:
    shown.buttons["pin"].click()
    assert "12 are needed" in shown._html["status"].value
    shown.prompt.value, shown.tokens.value = "The <b>farmer</b>", 14
    shown.buttons["start"].click()
    shown.wait(WAIT)
    assert "The &lt;b&gt;farmer&lt;/b&gt;" in shown._html["text"].value
    shown.buttons["pin"].click()
    shown.controls.widgets["bundling"].value = False
    shown.buttons["continue"].click()
    shown.wait(WAIT)
    assert "present / A" in shown._html["table"].value
    assert "bundling off" in shown._html["marks"].value
    assert ">bundling off</text>" in shown._html["chart"].value
    shown.path.value = str(tmp_path / "live")
    for kind in ("json", "md", "tex"):
        shown.buttons[kind].click()
        assert f"live.{kind}</a>" in shown.exported.value
    on, off = read_ablation(tmp_path / "live.json").rows
    assert off.flash_bytes > 1.5 * on.flash_bytes
    assert "**" in shown.table().data
    shown.path.value = str(tmp_path / "live.json" / "x")
    shown.buttons["md"].click()
    assert "cannot be written" in shown._html["status"].value
    shown.buttons["unpin"].click()
    assert "present / A" not in shown._html["table"].value
    shown.buttons["reset"].click()
    shown.wait(WAIT)
    assert shown.session.snapshot().tokens == 0


def test_bad_input_is_one_line_in_the_panel(tmp_path: Path, demo_store: Store) -> None:
    lines = {
        panel(tmp_path / "none", name="bad"): StoreError,
        panel(demo_store.path, tmp_path / "none", name="bad"): Exception,
        panel(demo_store.path, run=RunSpec(dram="5%"), name="bad"): BudgetError,
        panel(demo_store.path, ablation=Ablation(), name="bad"): Exception,
    }
    for made, kind in lines.items():
        (line,) = made.view.children
        assert "wb-error" in line.value
        assert "\n" not in line.value
        with pytest.raises(kind):
            made.wait()
        made.close()


def test_running_the_cell_again_closes_the_former(demo_store: Store) -> None:
    first = panel(demo_store.path, run=RUN, name="again")
    session = first.session
    second = panel(demo_store.path, run=RUN, name="again")
    assert session.closed
    assert "closed" in first._html["status"].value
    with pytest.raises(BudgetError, match="closed"):
        first.session  # noqa: B018
    second.close()
    second.close()


def test_a_named_failure_is_one_line_in_a_cell() -> None:
    code = (
        "from IPython.core.interactiveshell import InteractiveShell as S; s = S.instance();"
        "s.run_cell('import workbench as wb; wb.notebook_setup(); wb.notebook_setup()');"
        "r = s.run_cell('from workbench.errors import DataError\\nraise DataError(\"words: none\")');"
        "print(r.success); s.run_cell('1/0')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT)
    assert "DataError: words: none\n" in done.stdout
    assert "False" in done.stdout
    assert done.stdout.count("Traceback") == 1  # of the division, which has no name of its own
    assert done.returncode == 0


def rows(count: int, **values: float) -> np.ndarray:
    """Ring rows, all alike but for their numbers."""
    made = np.zeros((count, len(COLUMNS)))
    for name, value in values.items():
        made[:, INDEX[name]] = value
    made[:, INDEX["number"]] = np.arange(1, count + 1)
    return made


def heights(svg: str, part: str) -> list[float]:
    """Heights of a part's bars."""
    path = re.search(rf"class='wb-{part}'[^>]* d='([^']*)'", svg)
    assert path is not None
    return [float(a) - float(b) for a, b in re.findall(r"M[\d.]+ ([\d.]+)h[\d.]+V([\d.]+)", path[1])]


def test_the_chart_stacks_what_was_measured() -> None:
    data = rows(20, io_ms=6, mem_ms=1, compute_ms=12, predictor_ms=2, total_ms=19, reads=300)
    data[10:, INDEX["io_ms"]] = 12
    svg = latency_chart(data, [Mark(11, "setting", "a <change>"), Mark(300, "setting", "out of sight")])
    root = ElementTree.fromstring(svg)
    assert "medians of the last 20" in root.attrib["aria-label"]
    io, mem, compute, predictor = (heights(svg, part) for part in ("io", "mem", "compute", "predictor"))
    assert len(io) == len(mem) == len(compute) == len(predictor) == len(heights(svg, "reads")) == 20
    assert io[15] / io[5] == pytest.approx(2, rel=0.01)
    assert io[5] / mem[5] == pytest.approx(6, rel=0.05)
    assert compute[5] / predictor[5] == pytest.approx(5, rel=0.05)  # compute without its predictor
    assert "a &lt;change&gt;" in svg
    assert "out of sight" not in svg
    assert "ms a token" in svg


def test_the_chart_stays_small_and_takes_any_tokens() -> None:
    for count in (0, 1, SHOWN_TOKENS, 512):
        data = rows(count, io_ms=3, compute_ms=5, total_ms=8)
        ElementTree.fromstring(latency_chart(data, []))
    spiky = rows(200, io_ms=3, compute_ms=5, total_ms=8, reads=3)
    spiky[150, INDEX["io_ms"]] = 9000
    svg = latency_chart(spiky, [Mark(i, "setting", f"change {i}") for i in range(80, 200)])
    assert len(svg) < 40_000
    assert min(heights(svg, "io")) > 5  # one slow token does not flatten the others
    assert axis(0)[0] > 0
    assert axis(87.0)[1] == [0, 25, 50, 75]


def test_readouts_escape_and_name_units() -> None:
    assert "&lt;script&gt;" in readout.text_area("<script>")
    assert "&lt;i&gt;" in readout.status("<i>", True, "<i>")
    assert "&lt;i&gt;" in readout.mark_list([Mark(3, "setting", "<i>")])
