"""What the command line makes of dataclasses, sources, shares and Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from workbench.cli import main
from workbench.cli.app import _sources
from workbench.cli.options import directory, field_help, made, numbers
from workbench.errors import RecordError
from workbench.experiments.record import write_json
from workbench.predictor.config import PredictorSpec
from workbench.relufy.config import RelufySpec
from workbench.spec import RunSpec


@pytest.mark.parametrize("kind", [PredictorSpec, RelufySpec, RunSpec], ids=lambda kind: kind.__name__)
def test_every_field_that_is_an_option_is_explained(kind: Any) -> None:
    fields = {f.name for f in dataclasses.fields(kind)}
    assert fields - set(field_help(kind)) <= {"seed"}  # which every command has of its own


def test_help_is_the_clause_of_the_field() -> None:
    found = field_help(PredictorSpec)
    assert found["warmup"] == "share of the steps"
    assert found["rank"] == found["last_rank"]
    assert found["sequence"] == "tokens a window"


def test_a_value_that_the_dataclass_refuses_is_wrong_usage() -> None:
    assert made(PredictorSpec, {"tokens": 5}).tokens == 5
    with pytest.raises(typer.BadParameter, match="tokens=0"):
        made(PredictorSpec, {"tokens": 0})


def test_sources_and_shares(tmp_path: Path) -> None:
    odd = tmp_path / "a=1.txt"
    odd.touch()
    assert _sources(["x.json.gz", "y.txt=0.25", str(odd)]) == [("x.json.gz", 1.0), ("y.txt", 0.25), (str(odd), 1.0)]
    with pytest.raises(typer.BadParameter, match="PATH=WEIGHT"):
        _sources(["x=abc"])
    assert numbers("0.01, 0.05", float, "shares") == [0.01, 0.05]
    for bad in ("x", "", "0.1,,0.2", "0.1,"):
        with pytest.raises(typer.BadParameter, match="list of shares"):
            numbers(bad, float, "shares")


def test_a_figure_is_refused_under_another_pictures_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "reuse.jpg"
    monkeypatch.setattr(sys, "argv", ["workbench", "analyze", "reuse", "M", "--data", "D", "--figure", str(target)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "figures are PNG; give --figure a name that ends in .png" in capsys.readouterr().err
    assert not target.exists()


def test_records_go_through_links_and_not_over_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.touch()
    link.symlink_to(real)
    write_json(link, {"schema": 1})
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"schema": 1}
    os.mkfifo(pipe)
    with pytest.raises(RecordError, match="is not a regular file"):
        write_json(pipe, {})
    monkeypatch.setattr(sys, "argv", ["workbench", "analyze", "reuse", "M", "--data", "D", "--json", str(pipe)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "is not a regular file; choose another --json" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_directory_for_results_is_checked_at_once(tmp_path: Path) -> None:
    assert directory(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="choose another --out"):
        directory(tmp_path / "file")


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.flash.store.verify", interrupted)
    monkeypatch.setattr("workbench.experiments.convert.convert", interrupted)
    for command, rest in (("verify", ""), ("convert", "; the same command goes on from what was saved")):
        monkeypatch.setattr(sys, "argv", ["workbench", command, "model", "store"][: 3 if command == "verify" else 4])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 130
        assert capsys.readouterr().err.splitlines() == [f"workbench: interrupted{rest}"]


def test_no_help_is_lost_to_markup() -> None:
    """rich drops what stands in brackets."""
    from typer.main import get_command

    from workbench.cli.app import app

    def check(command: Any) -> None:
        for parameter in command.params:
            assert "[" not in (getattr(parameter, "help", None) or ""), (command.name, parameter.name)
        for inner in getattr(command, "commands", {}).values():
            check(inner)

    check(get_command(app))
