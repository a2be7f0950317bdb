"""Notebook 05 as its reader sees it: run all, switch bundling off in the stream, compare, export, keyboard alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lab_server import Lab, until_connected

from workbench.report import read_ablation

pytestmark = pytest.mark.browser
NOTEBOOK = "05_flash_pipeline_live.ipynb"
PATIENCE = 150_000  # ms, on a machine that has other things to do


def run_all(page: Any, lab: Lab) -> None:
    """Open the notebook, run every cell, and wait for the last one."""
    page.set_default_timeout(PATIENCE)
    page.goto(lab.url(NOTEBOOK))
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    until_connected(page, PATIENCE)
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click()
    page.locator(".jp-OutputArea-output", has_text="runs/notebooks/live.tex").wait_for()


def figure(page: Any, name: str) -> float:
    """One of the panel's rolling figures."""
    text = page.locator(".wb-figure", has_text=name).first.inner_text().split("\n")[0]
    return float(text.replace(",", "").split()[0]) if text[0].isdigit() else 0.0


def tokens_reach(page: Any, least: int) -> None:
    """Wait until so many tokens have been made."""
    page.wait_for_function(
        """least => { const all = [...document.querySelectorAll('.wb-figure')];
                      const at = all.find(e => e.innerText.includes('tokens made'));
                      return at && parseInt(at.innerText.replace(/,/g, '')) >= least }""",
        arg=least,
    )


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def test_bundling_off_while_text_streams(lab_page: Any, lab: Lab, tmp_path: Path) -> None:
    page = lab_page
    run_all(page, lab)
    page.locator(".wb-state").first.scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / "1-run-all.png")
    press(page, "Reset")
    page.get_by_role("spinbutton", name="tokens", exact=True).fill("90000")
    press(page, "Start")
    tokens_reach(page, 24)
    press(page, "Pin as A")
    before_io = page.locator("path.wb-io").first.get_attribute("d")
    before_reads, before_text = figure(page, "reads a token"), page.locator(".wb-text").first.inner_text()
    before_flash = figure(page, "flash a token")
    assert min(before_reads, before_flash) > 0
    page.screenshot(path=tmp_path / "2-streaming.png")
    page.get_by_role("checkbox", name="bundling", exact=True).uncheck()
    page.get_by_text(re.compile(r"token [\d,]+: bundling off")).first.wait_for()
    made = int(figure(page, "tokens made"))
    tokens_reach(page, made + 32)  # the rolling figures are of the last 32
    page.get_by_role("columnheader", name="present / A").wait_for()
    assert figure(page, "flash a token") > 1.5 * before_flash  # MB: half records of 2 KiB are read as 4 KiB
    assert figure(page, "reads a token") != before_reads
    assert page.locator("path.wb-io").first.get_attribute("d") != before_io
    assert page.locator(".wb-text").first.inner_text() != before_text
    press(page, "Stop")
    page.get_by_text(re.compile("stopped: ")).first.wait_for()
    page.screenshot(path=tmp_path / "3-compared.png")
    press(page, "JSON")
    page.locator(".wb-exported").wait_for()
    record = read_ablation(lab.folder / "session.json")
    on, off = record.rows
    assert [row.ablation["bundling"] for row in record.rows] == [True, False]
    assert off.flash_bytes > 1.5 * on.flash_bytes
    assert off.reads > on.reads
    press(page, "LaTeX")
    page.get_by_text("session.tex").wait_for()
    assert r"\toprule" in (lab.folder / "session.tex").read_text()
    refused_choices_snap_back(page)
    page.screenshot(path=tmp_path / "4-refused.png")
    assert lab.console == []
    assert lab.complaints() == []
    print(f"screenshots in {tmp_path}")


def refused_choices_snap_back(page: Any) -> None:
    """What cannot be is undone, and the reason stands in the status line."""
    page.get_by_role("combobox", name="predictor", exact=True).select_option("off")
    page.locator(".wb-error", has_text="windowing=True with predictor='off' is undefined").first.wait_for()
    assert page.get_by_role("combobox", name="predictor", exact=True).input_value() == "low_rank"


def test_keyboard_alone(lab_page: Any, lab: Lab, tmp_path: Path) -> None:
    page = lab_page
    run_all(page, lab)
    page.locator(".wb-state").first.scroll_into_view_if_needed()
    page.get_by_role("textbox", name="prompt", exact=True).focus()
    tab_to(page, "tokens")
    page.keyboard.press("Control+A")
    page.keyboard.type("90000")  # more than are made before the last key
    tab_to(page, "Start")
    page.keyboard.press("Space")
    tokens_reach(page, 12)
    tab_to(page, "coalesce")
    page.keyboard.press("Space")
    page.get_by_text(re.compile(r"token [\d,]+: coalesce off")).first.wait_for()
    tab_to(page, "window k")
    page.keyboard.press("ArrowRight")
    page.get_by_text(re.compile(r"token [\d,]+: window 6")).first.wait_for()
    page.screenshot(path=tmp_path / "5-keyboard.png")
    for _ in range(60):  # backwards too
        page.keyboard.press("Shift+Tab")
        if focused(page) == "Stop":
            break
    page.keyboard.press("Enter")
    page.get_by_text(re.compile("stopped: ")).first.wait_for()
    assert lab.console == []
    assert lab.complaints() == []
    print(f"screenshots in {tmp_path}")


def tab_to(page: Any, name: str) -> None:
    """Press Tab until the control of that name has the focus."""
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(focused(page))
        if seen[-1] == name:
            return
    pytest.fail(f"Tab does not reach {name!r}, only {seen}")


def focused(page: Any) -> str:
    """What the control that has the focus is called."""
    return page.evaluate(
        """() => { const at = document.activeElement;
                   if (at.tagName === 'BUTTON') return at.innerText.trim();
                   const box = at.closest('.widget-checkbox, .widget-inline-hbox');
                   return box ? box.innerText.replace(/\\u200b/g, '').trim().split('\\n')[0] : '' }"""
    )
