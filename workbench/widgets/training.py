"""A panel that trains predictors while one watches: loss by step, errors by layer, stop and resume."""

from __future__ import annotations

import asyncio
import atexit
import gc
import html
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from workbench.errors import TrainingError, WorkbenchError
from workbench.experiments.record import commit, machine
from workbench.predictor.config import PredictorSpec
from workbench.predictor.low_rank import Predictors
from workbench.predictor.train import train_predictors
from workbench.predictor.watch import Seen
from workbench.report.numbers import machine_line, short_commit
from workbench.report.training import training_figure
from workbench.training.interrupts import Interrupts
from workbench.widgets.bar import Pace
from workbench.widgets.errors import widgets_module

DRAW_SECONDS = 0.5
"""Between two drawings of the figure."""
TICK_SECONDS = 0.25
"""Between two updates of the bar and its line."""
_STAGES = {
    "statistics": "reading statistics",
    "ranks": "choosing ranks",
    "train": "training",
    "thresholds": "setting thresholds",
    "measure": "measuring on held-out text",
}


_OPEN: WeakValueDictionary[Path, TrainingPanel] = WeakValueDictionary()
"""By OUT. A cell that is run again makes a new panel, and the one before must not go on training behind it."""


def _close_open() -> None:
    for panel in list(_OPEN.values()):
        panel.close()


def training_panel(
    model: str | Path, data: str | Path, spec: PredictorSpec | None = None, *, out: str | Path, **options: Any
) -> TrainingPanel:
    """A panel that trains predictors of `model` on `data` into `out`; show it, and press Start or call `start()`.

    options: those of `train_predictors` (device, dtype, memory_bytes, checkpoint_seconds, ...). DeviceError where
    ipywidgets is not installed.
    """
    return TrainingPanel(model, data, spec, out=out, **options)


class TrainingPanel:
    """Trains in a thread, so that the notebook stays usable, and shows how it goes.

    `start()` begins, or goes on where a stopped run was; `stop()` ends at the next step, its state saved;
    `await panel` gives the predictors, the panel's buttons working meanwhile, and `wait()` does so in a script;
    `close()` stops, frees memory and takes the panel off the page. What went wrong is one line in the panel, and raised
    to whoever waits. The trained result is that of `train_predictors`, and so is what OUT holds.
    """

    def __init__(
        self, model: str | Path, data: str | Path, spec: PredictorSpec | None = None, *, out: str | Path, **options: Any
    ) -> None:
        self.model, self.data, self.out = model, data, Path(out)
        self.spec = spec or PredictorSpec()
        self.state = "ready"
        """ready, running, stopping, stopped, done, failed or closed."""
        self.predictors: Predictors | None = None
        self.error: BaseException | None = None
        self.draws = 0
        self._options = options
        self._seen: Seen | None = None
        self._pace = Pace()
        self._drawn: Seen | None = None
        self._interrupts = Interrupts()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()  # waited for instead of the thread: Ctrl-C in a join leaves it marked as ended
        self._ended.set()
        self._page: threading.Thread | None = None
        self._about = f"{Path(model).name} · {machine_line(machine(Path('.')))} · commit {short_commit(commit())}"
        self._build()
        if (before := _OPEN.get(self.out.resolve())) is not None:
            before.close()
        _OPEN[self.out.resolve()] = self

    def _build(self) -> None:
        w = widgets_module()
        self._start = w.Button(description="Start", icon="play", tooltip="Train, or go on where a run was stopped")
        self._stop = w.Button(description="Stop", icon="stop", disabled=True, tooltip="Stop at the next step and save")
        self._bar = w.FloatProgress(min=0, max=1, value=0, layout=w.Layout(width="16em"))
        self._line = w.HTML()
        self._image = w.Image(format="png", layout=w.Layout(max_width="100%", width="920px"))
        self._image.layout.display = "none"
        self._start.on_click(lambda _: self.start())
        self._stop.on_click(lambda _: self.stop())
        row = w.HBox([self._start, self._stop, self._bar, self._line], layout=w.Layout(align_items="center"))
        self.widget = w.VBox([row, self._image])
        self._show()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.widget._repr_mimebundle_(**kwargs)

    # what it does

    def start(self) -> TrainingPanel:
        """Begin, or go on; nothing while it runs or when it is done. TrainingError when it was closed."""
        if self.state == "closed":
            raise TrainingError("training panel: it was closed; make a new one with the same out to go on")
        if self.state in ("running", "stopping", "done"):
            return self
        self.error, self._interrupts = None, Interrupts()
        self.state = "running"
        self._pace = Pace()
        self._ended.clear()
        # A daemon, so that a kernel can end; what is open is closed before, which saves its state.
        atexit.unregister(_close_open)
        atexit.register(_close_open)
        self._thread = threading.Thread(target=self._run, name="train predictors", daemon=True)
        self._thread.start()
        self._page = threading.Thread(target=self._refresh, name="training panel", daemon=True)
        self._page.start()
        return self

    def stop(self) -> None:
        """End after the step that runs now. Nothing is lost: `start()` goes on with the next one."""
        if self.state == "running":
            self.state = "stopping"
            self._interrupts.stop()
            self._show()

    def wait(self, timeout: float | None = None) -> Predictors | None:
        """The predictors, when training is done; None where `timeout` seconds or a stop came before that.

        Ctrl-C stops the training without loss. Raises what training raised. The kernel of a notebook takes no button's
        press while a cell waits here: there, `await panel`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._ended.wait(0.1) and (end is None or time.monotonic() < end):
                pass
        except KeyboardInterrupt:
            self.stop()
            self._ended.wait()
            raise
        return self._result()

    def __await__(self) -> Generator[Any, None, Predictors | None]:
        """As `wait()` without a timeout; a press of Stop ends it too, with None. The notebook's interrupt button stops
        the training without loss."""
        return self._awaited().__await__()

    async def _awaited(self) -> Predictors | None:
        try:
            while not self._ended.is_set():
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:  # what an interrupt is to a cell that awaits
            self.stop()
            self._ended.wait()
            raise
        return self._result()

    def _result(self) -> Predictors | None:
        """What waiting returns or raises."""
        if self._page is not None and self._ended.is_set():
            self._page.join()  # so that the page says what is returned here
        if self.error is not None:
            raise self.error
        return self.predictors

    def close(self) -> None:
        """Stop, wait until the state is saved, free what the run held and take the panel off the page."""
        if self.state == "closed":
            return
        self.stop()
        for thread in (self._thread, self._page):
            if thread is not None:
                thread.join()
        self.state = "closed"
        self._thread, self._page = None, None
        self.predictors, self._seen, self._drawn = None, None, None
        self._image.value = b""
        self.widget.close()
        gc.collect()

    def __enter__(self) -> TrainingPanel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def figure(self, dpi: int = 150) -> bytes:
        """The figure as it stands, as PNG. TrainingError before the first step."""
        seen = self._seen
        if seen is None:
            raise TrainingError("training panel: nothing to draw before the first step; call start()")
        of = "held-out text" if self.state == "done" else "a part of the held-out text"
        return training_figure(
            seen.curve, seen.quality, steps=seen.steps, target=seen.false_negative, dpi=dpi,
            quality_of=f"on {of}, at step {seen.quality_step:,}",
            caption=f"{self._about} · {seen.step * seen.batch_tokens:,} tokens trained on",
        )  # fmt: skip

    # the two threads

    def _run(self) -> None:
        """Train. The panel is told of the end here, whatever it is."""
        try:
            made = train_predictors(
                self.model, self.data, self.spec, out=self.out, interrupts=self._interrupts,
                watch=self._watch, progress=self._on_progress, **self._options,
            )  # fmt: skip
            self._seen = _of_card(made.card)
            self.predictors, self.state = made, "done"
        except KeyboardInterrupt:
            self.state = "stopped"
        except BaseException as error:
            self.error, self.state = error, "failed"
        gc.collect()
        self._ended.set()

    def _watch(self, seen: Seen) -> None:
        self._seen = seen

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        self._pace.at(_STAGES.get(stage, stage), done, total)

    def _refresh(self) -> None:
        """Bring the page up to date a few times a second, and once when the training has ended."""
        drawn_at = 0.0
        while not self._ended.is_set():
            self._show()
            if time.monotonic() - drawn_at >= DRAW_SECONDS:
                self._draw()
                drawn_at = time.monotonic()
            self._ended.wait(TICK_SECONDS)
        self._draw()
        self._show()

    # the page

    def _draw(self) -> None:
        if self._seen is None or self._seen is self._drawn:
            return
        self._drawn = self._seen
        self._image.value = self.figure(dpi=100)
        self._image.layout.display = ""
        self.draws += 1

    def _show(self) -> None:
        going = self.state in ("running", "stopping")
        self._start.disabled = going or self.state == "done"
        self._stop.disabled = self.state != "running"
        self._start.description = "Resume" if self.state in ("stopped", "failed") else "Start"
        if self._pace.total:
            self._bar.value = self._pace.share
        if self.state == "done":
            self._bar.value = 1.0
        self._bar.bar_style = {"done": "success", "failed": "danger", "stopped": "warning"}.get(self.state, "")
        self._line.value = html.escape(self.status())

    def status(self) -> str:
        """One line: what goes on, with rate and end time, or how it ended."""
        step = f"step {self._seen.step:,} of {self._seen.steps:,}" if self._seen else "the start"
        if self.state == "running":
            layers = self._pace.stage == _STAGES["ranks"]
            waiting = "loading the model and the held-out text"
            return self._pace.line("layers" if layers else "tokens") if self._pace.total else waiting
        if self.state == "stopping":
            return "stopping after this step; the state is saved"
        if self.state == "stopped":
            return f"stopped at {step}; Resume goes on from there"
        if self.state == "failed":
            shown = str(self.error) if isinstance(self.error, WorkbenchError) else repr(self.error)
            return f"failed: {(shown.splitlines() or [''])[0]}"
        if self.state == "done":
            return f"done: {self.out}"
        return "press Start, or call start()" if self.state == "ready" else "closed"


def _of_card(card: dict[str, Any]) -> Seen:
    """What a finished run's card says, as the panel shows it."""
    return Seen(
        card["steps"], card["steps"], card["batch_tokens"], card["loss_curve"], card["layers"], card["steps"],
        card["spec"]["false_negative"],
    )  # fmt: skip
