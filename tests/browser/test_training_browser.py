"""Notebook 02 as its reader sees it: run all, then stop and resume by their buttons while a cell waits for the end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from lab_server import Lab, until_connected

# By hand: the panel test drives the same server and view in less time, and a faster test awaits a panel.
pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = "02_train_predictors.ipynb"
PATIENCE = 150_000  # ms, on a machine that has other things to do


def with_more_tokens(path: Path) -> None:
    """So many that the training is never done before a button is pressed."""
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "tokens=16_000" in cell.source]
    cell.source = cell.source.replace("tokens=16_000", "init_tokens=4096, batch_tokens=512, tokens=40_000_000")
    nbformat.write(notebook, path)


def test_stop_and_resume_while_the_notebook_waits(lab_page: Any, lab: Lab, tmp_path: Path) -> None:
    with_more_tokens(lab.folder / NOTEBOOK)
    page = lab_page
    page.set_default_timeout(PATIENCE)
    page.goto(lab.url(NOTEBOOK))
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    until_connected(page, PATIENCE)
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click()
    page.get_by_text(re.compile(r"^training: [\d,]+ of [\d,]+ tokens · .* left, until")).wait_for()
    figure = page.locator(".jp-OutputArea-output img.widget-image")
    figure.wait_for()
    page.screenshot(path=tmp_path / "1-training.png")
    assert page.locator(".jp-Notebook-ExecutionIndicator[data-status='busy']").count() == 1  # a cell waits
    page.get_by_role("button", name="Stop").click()
    page.get_by_text(re.compile(r"^stopped at step [\d,]+ of [\d,]+; Resume goes on from there")).wait_for()
    page.screenshot(path=tmp_path / "2-stopped.png")
    assert (lab.folder / "runs" / "demo-model" / "predictors.partial" / "state").exists()
    page.get_by_role("button", name="Resume").click()
    page.get_by_text(re.compile(r"^training: ")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text(re.compile(r"^stopped at step ")).wait_for()
    assert lab.console == []
