"""Predictors trained by two processes over gloo: the result of one, shared resuming, and one line when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from predictor_runs import SPEC, write_model, write_text

from workbench.errors import TrainingError
from workbench.predictor.config import PredictorSpec
from workbench.predictor.low_rank import Predictors
from workbench.predictor.train import train_predictors
from workbench.predictor.trainer import choose_micro_windows
from workbench.spec import ModelSpec
from workbench.training.distributed import connect

SPLIT = replace(SPEC, store_dtype="float32")

WORKER = """
import os, signal, sys
import torch
from workbench.errors import DataError, WorkbenchError
from workbench.predictor.config import PredictorSpec
from workbench.predictor import trainer
from workbench.predictor.train import train_predictors

model, data, out, spec, event, who, at = sys.argv[1:]
torch.set_num_threads(1)
rank, steps = int(os.environ["RANK"]), 0
real = trainer.Trainer.one_step

def one_step(self):
    global steps
    steps += 1
    if rank == int(who) and steps == int(at):
        if event == "fail":
            raise DataError("text.jsonl: line 7 is not JSON")
        if event == "crash":
            raise RuntimeError("not our doing")
        os.kill(os.getpid(), {"int": signal.SIGINT, "kill": signal.SIGKILL}[event])
    return real(self)

if event:
    trainer.Trainer.one_step = one_step
try:
    train_predictors(model, data, PredictorSpec(**eval(spec)), out=out)
except WorkbenchError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
"""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "opt", data)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Predictors:
    """What one process makes."""
    return train_predictors(model, data, SPLIT, out=tmp_path_factory.mktemp("single") / "p")


def start(
    count: int,
    model: Path,
    data: Path,
    out: Path,
    spec: PredictorSpec = SPLIT,
    event: str = "",
    who: int = 0,
    at: int = 0,
) -> list[tuple[int, str]]:
    """Run as torchrun would; exit status and standard error of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fields = {f: getattr(spec, f) for f in spec.__dataclass_fields__}
    command = [sys.executable, "-c", WORKER, *map(str, (model, data, out)), repr(fields), event, str(who), str(at)]
    running = []
    for rank in range(count):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        running.append(
            subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
        )
    try:
        return [(process.wait(timeout=120), process.communicate()[1]) for process in running]
    finally:
        for process in running:
            process.kill()


def assert_alike(found: Predictors, wanted: Predictors) -> None:
    """Equal up to the order of sums, which the optimiser's division by tiny moments enlarges."""
    for one, other in zip(found.layers, wanted.layers, strict=True):
        assert one.threshold == pytest.approx(other.threshold, abs=2e-3)
        for name in ("a", "b", "bias"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-3, atol=1e-3)
    assert found.card["loss_curve"]["step"] == wanted.card["loss_curve"]["step"]
    np.testing.assert_allclose(found.card["loss_curve"]["loss"], wanted.card["loss_curve"]["loss"], atol=1e-5)
    assert found.card["request"] == wanted.card["request"]
    for one, other in zip(found.card["layers"], wanted.card["layers"], strict=True):
        assert one["active"] == pytest.approx(other["active"], rel=1e-3)
        assert one["predicted"] == pytest.approx(other["predicted"], rel=1e-2)


def test_two_processes_make_what_one_makes(tmp_path: Path, model: Path, data: Path, single: Predictors) -> None:
    assert [code for code, _ in start(2, model, data, tmp_path / "p")] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    found = Predictors.load(tmp_path / "p")
    assert found.card["run"]["processes"] == 2
    assert_alike(found, single)


@pytest.mark.slow
def test_ctrl_c_in_one_ends_both_and_another_number_goes_on(
    tmp_path: Path, model: Path, data: Path, single: Predictors
) -> None:
    (main, shown), (other, silent) = start(2, model, data, tmp_path / "p", event="int", who=1, at=5)
    assert (main, shown.strip()) == (130, "interrupted")
    assert (other, silent) == (130, "")
    seen: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "train":
            seen.append(done)

    found = train_predictors(model, data, SPLIT, out=tmp_path / "p", progress=progress)
    assert len(seen) == 12 - 5
    assert_alike(found, single)


@pytest.mark.slow
def test_a_failure_in_one_ends_both_with_one_line(tmp_path: Path, model: Path, data: Path) -> None:
    (main, shown), (other, silent) = start(2, model, data, tmp_path / "p", event="fail", who=1, at=3)
    assert (main, other) == (1, 1)
    assert shown.strip() == "process 1 of 2: text.jsonl: line 7 is not JSON"
    assert silent == ""


def test_a_killed_process_ends_the_other_and_the_run_goes_on(tmp_path: Path, model: Path, data: Path) -> None:
    spec = replace(SPLIT, allocation="measured", tokens=2048)
    (main, shown), (other, _) = start(2, model, data, tmp_path / "p", spec, event="kill", who=1, at=2)
    assert other == -signal.SIGKILL
    assert main == 1
    assert "process of this run was lost" in shown
    assert shown.count("\n") == 1
    went_on = train_predictors(model, data, spec, out=tmp_path / "p")  # with the ranks that two measured
    alone = train_predictors(model, data, spec, out=tmp_path / "alone")
    assert went_on.card["allocation"]["candidates"] == alone.card["allocation"]["candidates"]
    np.testing.assert_allclose(
        went_on.card["allocation"]["predicted"], alone.card["allocation"]["predicted"], rtol=1e-3
    )
    assert_alike(went_on, alone)


def test_the_micro_batch_suits_the_processes() -> None:
    model = ModelSpec("opt", 2, 32, 96, 400, "relu", 128)
    spec = replace(SPEC, batch_tokens=32 * 12)
    assert [choose_micro_windows(spec, model, 1 << 30, size) for size in (1, 2, 3, 4, 5, 12)] == [12, 6, 4, 3, 2, 1]
    assert choose_micro_windows(spec, model, 1, 2) == 1
    with pytest.raises(TrainingError, match="12 windows of 32, too few for 13 processes"):
        choose_micro_windows(spec, model, 1 << 30, 13)


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(TrainingError, match="RANK=None in the environment"), connect("cpu"):
        pass
