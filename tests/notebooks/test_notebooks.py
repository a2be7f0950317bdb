"""The notebooks: paired, stripped, thin, and run from the first cell to the last on the demo model."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from nbmake.nb_run import NotebookRun

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
NAMES = [path.stem for path in SCRIPTS]
SECONDS = 280
"""Of one cell: all notebooks together take less on two idle cores, and a machine that tests is not idle."""


def cells(path: Path) -> list[tuple[str, str]]:
    """Type and source of each cell, of a notebook or of its script."""
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def run(name: str, folder: Path, *edits: tuple[str, str]) -> Any:
    """A copy of the notebook, its sources edited, after its run in `folder`: the notebook, and what stopped it."""
    target = folder / f"{name}.ipynb"
    shutil.copy(ROOT / "notebooks" / target.name, target)
    if edits:
        notebook = nbformat.read(target, as_version=4)
        for old, new in edits:
            found = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
            assert len(found) == 1, f"{old!r} is in {len(found)} cells of {name}"
            found[0].source = found[0].source.replace(old, new)
        nbformat.write(notebook, target)
    return NotebookRun(target, default_timeout=SECONDS).execute()


def test_there_are_six_and_all_are_paired() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06"]
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_in_step_and_outputs_are_stripped(name: str) -> None:
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert cells(path) == cells(path.with_suffix(".py")), f"run: jupytext --sync notebooks/{name}.py"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_thin(name: str) -> None:
    sources = [source for kind, source in cells(ROOT / "notebooks" / f"{name}.py") if kind == "code"]
    for source in sources:
        for node in ast.walk(compile(source, name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
            assert not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
    assert "wb.notebook_setup()" in sources[0]
    assert 'assets.path("data/demo-model")' in sources[0]
    assert not any("demo-model" in source for source in sources[1:])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_to_its_end(name: str, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (ROOT / "notebooks").iterdir() if path.is_file()}
    result = run(name, tmp_path)
    assert result.error is None, result.error
    outputs = [out for cell in result.nb.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error"]
    shown = [kind for out in outputs for kind in out.get("data", {})]
    assert "image/png" in shown or "application/vnd.jupyter.widget-view+json" in shown
    assert [out.text for out in outputs if out.output_type == "stream" and out.name == "stderr"] == []
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("01_activation_sparsity", 'assets.path("data/text")', '"absent.txt"', "DataError: absent.txt: no such file"),
        ("01_activation_sparsity", 'assets.path("data/demo-model")', '"./absent"', "CheckpointError: absent"),
        ("03_window_reuse", 'assets.path("predictors/demo-model")', '"absent"', "PredictorError: absent"),
        ("02_train_predictors", "_tokens=2048", "_tokens=2048, validation_share=1e-9", "DataError: "),
    ],
    ids=["no text", "no model", "no predictors", "no held-out text"],
)
def test_bad_input_is_one_line_in_the_cell(name: str, old: str, new: str, says: str, tmp_path: Path) -> None:
    result = run(name, tmp_path, (old, new))
    assert result.error is not None
    outputs = [out for cell in result.nb.cells if cell.cell_type == "code" for out in cell.outputs]
    (error,) = [out for out in outputs if out.output_type == "error"]
    assert len(error.traceback) == 1
    assert error.traceback[0].startswith(says)
    assert "\n" not in error.traceback[0]
