"""`workbench tables`: measured on the demo store, interrupted, taken up again, and what cannot be measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import fails, run

from workbench import assets
from workbench.ablation import PAPER_ROWS
from workbench.engines.budget import plan_dram
from workbench.errors import DataError, DeviceError, RecordError
from workbench.experiments.tables import PARTS, Parts, Subject
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.report import style
from workbench.report.tables import ENTRIES, Tables, stored_tables, tables
from workbench.spec import RunSpec

MODEL, TEXT = assets.path("data/demo-model"), assets.path("data/text")
PREDICTORS = assets.path("predictors/demo-model")
TASKS = Path(__file__).parents[1] / "data" / "eval"
RUN = RunSpec(dram="100%", context=128, compute_threads=1)
SMALL: dict[str, Any] = {"prompt": 16, "tokens": 4, "text_tokens": 256, "pair_tokens": 256, "long_tokens": 12,
                         "row_seconds": 3.0}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def light() -> Iterator[None]:
    """One thread, and pictures of few pixels."""
    threads, fine = torch.get_num_threads(), style.png
    torch.set_num_threads(1)
    style.png = lambda figure, dpi=0: fine(figure, 40)
    yield
    torch.set_num_threads(threads)
    style.png = fine


def measure(*names: str, store: Store, out: Path, **settings: Any) -> Tables:
    return tables(
        *names, store=store.path, predictors=PREDICTORS, model=MODEL, data=TEXT, out=out, run=RUN,
        **{**SMALL, **settings},
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tables, Path]:
    out = tmp_path_factory.mktemp("tables")
    return measure("table2", "table3", "table5", "figure2b", "figure8", store=demo_store, out=out), out


def test_tables_are_measured_once_and_written(measured: tuple[Tables, Path]) -> None:
    found, out = measured
    assert [drawn.name for drawn in found] == ["table2", "table3", "table5", "figure2b", "figure8"]
    for name in ("table2", "table3", "table5", "figure2b", "figure8"):
        assert {path.suffix for path in out.glob(f"{name}.*")} >= {".html", ".md", ".json"}
    two, three = (
        json.loads((out / f"{name}.json").read_text())["records"]["ablation"] for name in ("table2", "table3")
    )
    assert two == three
    names = [row["name"] for row in two["rows"]]
    assert names[:5] == list(PAPER_ROWS)
    assert all(
        row["ablation"]["predictor"] == "low_rank" and row["ablation"]["io"] == "threads" for row in two["rows"][5:]
    )
    assert two["rows"][0]["flash_bytes"] > 10 * two["rows"][4]["flash_bytes"]
    assert two["run"]["model"] == "demo-model"
    assert not (out / ".unfinished").exists()
    assert [f"](table{n}.md)" in (out / "index.md").read_text() for n in (2, 3, 5)] == [True] * 3


def test_dram_is_the_engines_own_plan(measured: tuple[Tables, Path], demo_store: Store) -> None:
    record = measured[0].records["table5"]["records"]["dram"]
    plan = plan_dram(demo_store, PAPER_ROWS["+ bundling (all)"], Predictors.load(PREDICTORS), RUN)
    assert sum(record["parts"].values()) == plan.total
    assert record["parts"]["predictor_bytes"] == plan.predictor_bytes
    assert record["model_bytes"] == demo_store.model_bytes


def test_records_are_drawn_again_and_stored_ones_found(measured: tuple[Tables, Path], tmp_path: Path) -> None:
    _, out = measured
    done = run("tables", "table2", "--record", out / "table3.json", "--out", tmp_path / "again", "--json",
               tmp_path / "all.json")  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "again" / "table2.md").read_text() == (out / "table2.md").read_text()
    assert "flash, vs naive" in done.stdout
    assert [table["table"] for table in json.loads((tmp_path / "all.json").read_text())["tables"]] == ["table2"]
    stored = tmp_path / "docs" / "results" / "tables"
    stored.mkdir(parents=True)
    (stored / "table3-demo.json").write_bytes((out / "table3.json").read_bytes())
    done = run("tables", "--stored", "--out", "docs/tables", cwd=tmp_path)
    assert done.returncode == 0
    assert sorted(path.name for path in (tmp_path / "docs" / "tables").iterdir()) == [
        "index.md", "table3-demo.md", "table3-demo.png",
    ]  # fmt: skip
    assert [drawn.files for drawn in stored_tables(folder=stored)] == ["table3-demo"]


def test_an_interrupted_run_keeps_what_is_finished_and_goes_on(
    demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    def never(*_: object) -> dict[str, Any]:
        raise AssertionError("measured twice")

    with monkeypatch.context() as patch:
        patch.setitem(PARTS, "sparsity", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure("figure4a", "figure9", store=demo_store, out=tmp_path)
    assert {path.name for path in tmp_path.glob("*.md")} == {"figure4a.md", "index.md"}
    assert (tmp_path / ".unfinished" / "reuse.json").is_file()
    with monkeypatch.context() as patch:
        patch.setitem(PARTS, "reuse", never)
        found = measure("figure4a", "figure9", store=demo_store, out=tmp_path)
    assert [drawn.name for drawn in found] == ["figure4a", "figure9"]
    assert "predicted" in next(found[1].tables[0].lines()).cells
    assert not (tmp_path / ".unfinished").exists()


def test_parts_of_another_request_are_not_taken_over(demo_store: Store, tmp_path: Path) -> None:
    subject = Subject(demo_store, TEXT, PREDICTORS, model=MODEL, run=RUN)
    first = Parts(subject, tmp_path)
    first.get("dram", lambda title: None)
    assert (tmp_path / ".unfinished" / "dram.json").is_file()
    assert Parts(subject, tmp_path).get("dram", lambda title: None) == first.known["dram"]
    Parts(dataclasses.replace(subject, run=dataclasses.replace(RUN, window=2)), tmp_path)
    assert not (tmp_path / ".unfinished" / "dram.json").exists()


def test_without_names_all_that_can_be_measured_is(
    measured: tuple[Tables, Path], demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = measured[0].records["figure2b"]["records"]["flash"]

    def broken(*_: object) -> dict[str, Any]:
        raise DataError("the text has too few tokens; give --data with more")

    for name in PARTS:
        monkeypatch.setitem(PARTS, name, broken)
    monkeypatch.setitem(PARTS, "flash", lambda *_: flash)
    found = tables(store=demo_store.path, data=TEXT, out=tmp_path, run=RUN, **SMALL)
    assert [drawn.name for drawn in found] == ["figure2b"]
    assert set(found.missing) == set(ENTRIES) - {"figure2b"}
    assert "pass --model MODEL" in found.missing["figure9"]
    assert "pass --predictors DIR" in found.missing["figure7"]
    assert found.missing["table2"] == "failed: the text has too few tokens; give --data with more"
    text = (tmp_path / "index.md").read_text()
    assert "Not measured:" in text
    assert "too few tokens" in text
    assert (tmp_path / ".unfinished" / "flash.json").is_file()


def test_mmlu_through_the_engine(demo_store: Store, tmp_path: Path) -> None:
    (drawn,) = measure("figure10", store=demo_store, out=tmp_path, tasks_dir=TASKS, limit=1)
    assert drawn.pictures
    assert [line.label for line in drawn.tables[0].lines()][:2] == ["dense", "oracle"]


def test_what_a_user_gets_wrong_is_one_line(demo_store: Store, tmp_path: Path) -> None:
    assert "'nope' is not a table or figure; choose of table1, table2" in fails("tables", "nope")
    assert "pass --store STORE with them" in fails("tables", "table2", "--data", TEXT, "--out", tmp_path)
    assert "pass --data with some" in fails("tables", "table2", "--store", demo_store.path, "--out", tmp_path)
    own = ("--store", demo_store.path, "--data", TEXT, "--out", tmp_path)
    assert "figure9 needs the dense checkpoint of the store; pass --model MODEL" in fails("tables", "figure9", *own)
    assert "figure7 needs trained predictors; pass --predictors DIR" in fails("tables", "figure7", *own)
    assert "could not be read" in fails("tables", "--record", tmp_path / "absent.json", "--out", tmp_path)
    with pytest.raises(DeviceError, match="backend 'abacus' is not available"):
        tables("table2", store=demo_store.path, data=TEXT, out=tmp_path, backend="abacus")
    with pytest.raises(RecordError, match="is not a table or figure"):
        tables("Table 2")
    assert not list(tmp_path.glob("*.md"))


def test_list_names_every_table_in_order() -> None:
    text = run("tables", "--list").stdout
    places = [text.index(f"{name}: ") for name in ENTRIES]
    assert places == sorted(places)
    assert run("tables", "--stored", "--record", "x").returncode == 2
