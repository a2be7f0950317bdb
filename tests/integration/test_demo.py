"""The whole demo on a shorter training run: what must hold of its records, whatever the machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from workbench.ablation import PAPER_ROWS
from workbench.experiments.demo import TRAINING, Demo, demo
from workbench.flash.store import verify
from workbench.report import read_ablation, read_flash, read_reuse, write_report

SHORT = dataclasses.replace(TRAINING, tokens=12_288, init_tokens=8192, validation_tokens=2048)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def stages() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def result(out: Path, stages: list[tuple[str, int, int]]) -> Demo:
    def stage(title: str) -> Any:
        return lambda what, done, total: stages.append((title, done, total))

    return demo(out, stage=stage, tokens=12, training=SHORT, command="workbench demo")


def test_rows_are_the_papers_and_bytes_fall(result: Demo) -> None:
    rows = {row["name"]: row for row in result.ablation["rows"]}
    assert list(rows)[: len(PAPER_ROWS)] == list(PAPER_ROWS)
    sizes = [rows[name]["flash_bytes"] for name in PAPER_ROWS]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= result.store.model_bytes
    assert rows["all + coalesce"]["reads"] < rows["+ bundling (all)"]["reads"]
    assert rows["all + coalesce"]["loaded"] == rows["+ bundling (all)"]["loaded"]
    for row in rows.values():
        assert row["total_ms"] > 0
        assert row["tokens"] == 12
        assert row["dram_bytes"] <= 0.8 * result.store.model_bytes
    every = rows["+ bundling (all)"]
    assert every["active"] < every["predicted"] <= every["in_window"] < result.store.spec.ffn_neurons


def test_records_are_on_disk_and_readable(result: Demo, out: Path) -> None:
    assert json.loads((out / "ablation.json").read_text()) == result.ablation
    assert read_ablation(out / "ablation.json").run.synthetic is False
    assert read_flash(out / "flash.json").fit
    shares = read_reuse(out / "reuse.json").rows
    assert [p.kept_share for p in shares] == sorted(p.kept_share for p in shares)
    assert [p.new_share for p in shares] == sorted((p.new_share for p in shares), reverse=True)
    assert not list(out.glob("*.partial*"))
    verify(out / "store")


def test_every_stage_ends_full(result: Demo, stages: list[tuple[str, int, int]]) -> None:
    titles = list(dict.fromkeys(title for title, _, _ in stages))
    assert len(titles) == 5
    for title in titles:
        done, total = [(d, t) for name, d, t in stages if name == title][-1]
        assert done == total > 0


def test_the_report_is_drawn(result: Demo, out: Path) -> None:
    paths = write_report(
        out,
        ablation=out / "ablation.json",
        flash=out / "flash.json",
        reuse=out / "reuse.json",
        predictors=result.predictors,
    )
    assert [path.name for path in paths] == [
        "report.html", "latency.png", "throughput.png", "reuse.png", "predictors.png",
    ]  # fmt: skip
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_done_again_it_only_measures_again(result: Demo, out: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in [*(out / "store").rglob("*"), *(out / "predictors").rglob("*")]}
    ran: list[str] = []

    def stage(title: str) -> Any:
        ran.append(title)
        if title.startswith("run every row"):
            raise KeyboardInterrupt
        return lambda *_: None

    with pytest.raises(KeyboardInterrupt):
        demo(out, stage=stage, tokens=12, training=SHORT)
    assert before == {p: p.stat().st_mtime_ns for p in before}
    assert len(ran) == 3
