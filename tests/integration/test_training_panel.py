"""The training panel on a tiny real model: what it shows, stop and resume, errors in a line, memory given back."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from predictor_runs import LAYERS, SPEC, write_model, write_text

from workbench.errors import DataError, TrainingError
from workbench.predictor.train import train_predictors
from workbench.predictor.watch import Seen
from workbench.widgets.training import TrainingPanel, training_panel

LONG = replace(SPEC, tokens=262_144)
"""Some thousand steps: time enough to press a button."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "opt", data)


def files(out: Path) -> tuple[object, bytes]:
    card = json.loads((out / "card.json").read_text())
    del card["measured"]
    return card, (out / "predictors.safetensors").read_bytes()


def until(panel: TrainingPanel, condition: object) -> None:
    """Wait until `condition()`, which a run fulfils at some moment; fail when the run ends before."""
    assert callable(condition)
    while not condition():
        assert panel.state in ("running", "stopping"), panel.status()
        time.sleep(0.01)


def trained_some(panel: TrainingPanel) -> bool:
    return panel._seen is not None and panel._seen.step >= 3


def test_a_run_shows_losses_errors_and_its_end(tmp_path: Path, model: Path, data: Path) -> None:
    with training_panel(model, data, SPEC, out=tmp_path / "out") as panel:
        assert panel.status() == "press Start, or call start()"
        with pytest.raises(TrainingError, match="before the first step"):
            panel.figure()
        before = signal.getsignal(signal.SIGINT)
        predictors = panel.start().wait()
        assert signal.getsignal(signal.SIGINT) is before
        assert predictors is not None
        assert len(predictors.layers) == LAYERS
        assert panel.state == "done"
        panel._start.click()  # no second run
        assert panel.state == "done"
        seen = panel._seen
        assert seen is not None
        assert seen.step == seen.steps == predictors.card["steps"]
        assert seen.quality is not None
        assert [row["false_negative"] for row in seen.quality] == [
            layer["false_negative"] for layer in predictors.card["layers"]
        ]
        assert panel.figure().startswith(b"\x89PNG")
        assert "model_id" in str(panel._repr_mimebundle_())
    assert panel.state == "closed"


def test_the_result_does_not_depend_on_the_panel(tmp_path: Path, model: Path, data: Path) -> None:
    train_predictors(model, data, SPEC, out=tmp_path / "plain")
    with training_panel(model, data, SPEC, out=tmp_path / "panel") as panel:
        panel.start().wait()
    assert files(tmp_path / "plain") == files(tmp_path / "panel")


def test_stop_and_resume_by_their_buttons_lose_nothing(tmp_path: Path, model: Path, data: Path) -> None:
    spec = replace(SPEC, tokens=65_536)
    train_predictors(model, data, spec, out=tmp_path / "plain")
    with training_panel(model, data, spec, out=tmp_path / "out", checkpoint_seconds=1e9) as panel:
        panel._start.click()
        assert panel._start.disabled
        until(panel, lambda: trained_some(panel))
        panel._stop.click()
        assert panel.wait() is None
        assert panel.state == "stopped"
        assert panel._start.description == "Resume"
        stopped_at = panel._seen.step if panel._seen else 0
        assert "Resume goes on" in panel.status()
        assert not (tmp_path / "out").exists()
        panel._start.click()
        until(panel, lambda: panel._pace.stage == "training")
        assert panel._seen is not None
        assert panel._seen.step >= stopped_at
        assert panel.wait() is not None
    assert files(tmp_path / "plain") == files(tmp_path / "out")


def test_awaiting_leaves_the_loop_to_the_buttons(tmp_path: Path, model: Path, data: Path) -> None:
    async def pressed(panel: TrainingPanel) -> object:
        async def press() -> None:
            while not trained_some(panel):
                await asyncio.sleep(0.01)
            panel._stop.click()

        return (await asyncio.gather(panel, press()))[0]

    async def interrupted(panel: TrainingPanel) -> None:
        waiting = asyncio.ensure_future(panel._awaited())
        while panel._pace.stage != "training":
            await asyncio.sleep(0.01)
        waiting.cancel()  # what a notebook's interrupt does to a cell that awaits
        await waiting

    with training_panel(model, data, LONG, out=tmp_path / "out") as panel:
        assert asyncio.run(pressed(panel.start())) is None
        assert panel.state == "stopped"
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(interrupted(panel.start()))
        assert panel.state == "stopped"
    assert (tmp_path / "out.partial" / "state").exists()


def test_another_panel_goes_on_where_a_closed_one_was(tmp_path: Path, model: Path, data: Path) -> None:
    panel = training_panel(model, data, LONG, out=tmp_path / "out", checkpoint_seconds=1e9)
    panel.start()
    until(panel, lambda: trained_some(panel))
    panel.close()
    assert (tmp_path / "out.partial" / "state").exists()
    with pytest.raises(TrainingError, match="it was closed"):
        panel.start()
    seen: list[Seen] = []
    other = training_panel(model, data, LONG, out=tmp_path / "out")
    other._watch = seen.append  # type: ignore[method-assign]
    other.start()
    until(other, lambda: seen)
    other.close()
    assert seen[0].step >= 3


def test_a_panel_made_again_closes_the_one_before(tmp_path: Path, model: Path, data: Path) -> None:
    first = training_panel(model, data, LONG, out=tmp_path / "out")
    first.start()
    until(first, lambda: trained_some(first))
    with training_panel(model, data, LONG, out=tmp_path / "out") as second:
        assert first.state == "closed"
        assert second.state == "ready"
        second.start()
        until(second, lambda: trained_some(second))


def test_ctrl_c_while_waiting_stops_without_loss(tmp_path: Path, model: Path, data: Path) -> None:
    with training_panel(model, data, LONG, out=tmp_path / "out", checkpoint_seconds=1e9) as panel:
        panel.start()
        until(panel, lambda: trained_some(panel))
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            panel.wait()
        assert panel.state == "stopped"
        assert (tmp_path / "out.partial" / "state").exists()


def test_a_failure_is_one_line_and_can_be_mended(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "text.jsonl"
    with training_panel(model, path, SPEC, out=tmp_path / "out") as panel:
        with pytest.raises(DataError, match="no such file"):
            panel.start().wait()
        assert panel.state == "failed"
        until_shown = time.monotonic() + 10
        while "failed: " not in panel._line.value and time.monotonic() < until_shown:
            time.sleep(0.01)
        assert f"failed: {path}: no such file" in panel._line.value
        assert "\n" not in panel._line.value
        write_text(path)
        panel._start.click()
        assert panel.wait() is not None


def test_closing_frees_what_the_run_held(tmp_path: Path, model: Path, data: Path) -> None:
    threads = threading.active_count()
    panel = training_panel(model, data, LONG, out=tmp_path / "out")
    panel.start()
    until(panel, lambda: trained_some(panel))
    held = weakref.ref(panel._seen)
    panel.close()
    deadline = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == threads
    gc.collect()
    assert held() is None
    assert panel._image.value == b""


def test_the_figure_is_drawn_at_most_twice_a_second(tmp_path: Path, model: Path, data: Path) -> None:
    with training_panel(model, data, LONG, out=tmp_path / "out") as panel:
        begun = time.monotonic()
        panel.start()
        until(panel, lambda: panel.draws >= 3)
        assert panel.draws <= 2 * (time.monotonic() - begun) + 1
        assert len(panel._image.value) < 150_000
