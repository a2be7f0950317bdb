"""A running engine that can be watched and changed while it makes text. Nothing here knows of widgets.

with Session.open("store", predictors) as session:
    session.start("Once upon a time", tokens=200)
    session.change(bundling=False)      # from the next token on
    session.wait()
    session.record()                    # an ablation record: one row a setting
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.ablation import Ablation
from workbench.engines import load
from workbench.engines.budget import DramPlan, process_rss
from workbench.engines.pipeline import FlashEngine
from workbench.engines.setting import Setting
from workbench.errors import BudgetError, DataError
from workbench.experiments.ablate import LEAST_TOKENS, WARM_UP
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec
from workbench.widgets.stretch import Stretch, Summary
from workbench.widgets.worker import TEXT_KEPT, Mark, State, Wish, Worker

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Snapshot:
    """A session at one moment. `line` is its state, `error` whether that is a failure; `notice` why the last setting
    was refused. `rows`: the last tokens (columns: `stretch.COLUMNS`). `now`, `pinned`: stretches that have tokens
    enough. `rss_bytes`: of the process, beyond what it held before the engine."""

    version: int
    state: State
    line: str
    error: bool
    notice: str
    setting: Setting
    plan: DramPlan
    rss_bytes: int
    tokens: int
    text: str
    rows: NDArray[np.float64]
    marks: tuple[Mark, ...]
    stretch_tokens: int
    now: Summary | None
    pinned: Summary | None


class Session:
    """One engine, and the thread that makes its text. Every method may be called from any thread and returns at once,
    but for `wait` and `close`.

    A change of setting takes effect at the next token and keeps the text. When the KV cache is full, the text goes on
    from its last half, with a mark. What fails while text is made ends up as one line in `snapshot().line`; what is
    asked for wrongly is raised. `close` gives DRAM, threads and files back, and so does losing the last reference, or
    the end of the process.
    """

    def __init__(
        self, engine: FlashEngine, *, predictors_name: str = "", command: str = "", rss_before: int | None = None
    ):
        self._worker = Worker(engine, process_rss() if rss_before is None else rss_before)
        self.store, self.context = engine.store, engine.context
        self.predictors_name, self.command = predictors_name, command
        self._check: Callable[[Setting], DramPlan] | None = engine.check
        self._pinned: Stretch | None = None
        self._finalizer = weakref.finalize(self, self._worker.close)

    @classmethod
    def open(
        cls,
        store: str | Path,
        predictors: Predictors | str | Path | None = None,
        *,
        ablation: Ablation | None = None,
        run: RunSpec | None = None,
        backend: str = "torch-cpu",
    ) -> Session:
        """Load a store. Without predictors and without an ablation, the oracle says which neurons to load.

        WorkbenchError, one line, when the store, the predictors, flash or the DRAM budget do not allow it.
        """
        before = process_rss()
        if ablation is None:
            ablation = Ablation() if predictors is not None else Ablation(predictor="oracle")
        name = str(predictors) if isinstance(predictors, str | Path) else "given" if predictors is not None else ""
        engine = load(store, ablation=ablation, predictors=predictors, backend=backend, run=run)
        return cls(engine, predictors_name=name, command=f"wb.panel({str(store)!r})", rss_before=before)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back, after the present token. Closing twice does nothing."""
        self._check = None
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return not self._finalizer.alive

    # what to do

    def start(
        self,
        prompt: str,
        tokens: int = 200,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        past_end: bool = True,
    ) -> None:
        """Make text after `prompt`, from an empty context; what is running is stopped.

        past_end: an end-of-text token is taken like any other, so that `tokens` are made; else it ends the text.
        DataError for a prompt without words, or arguments out of range.
        """
        if not prompt.strip():
            raise DataError("prompt: it is empty; give at least one word")
        if tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise DataError(
                f"start: tokens={tokens}, temperature={temperature:g}, top_p={top_p:g}: "
                "give at least 1 token, a temperature of 0 or more and a top_p in (0, 1]"
            )
        seed = self._worker.setting.run.seed if seed is None else seed
        self._worker.ask(wish=Wish(prompt, tokens, temperature, top_p, seed, past_end))

    def go_on(self, tokens: int = 200) -> None:
        """Continue the text so far, as it was sampled before."""
        if tokens < 1:
            raise DataError(f"continue: tokens={tokens}; give at least 1")
        self._worker.ask(wish=Wish(None, tokens))

    def stop(self) -> None:
        """Stop after the present token; `go_on` continues."""
        self._worker.ask(stop=True)

    def reset(self) -> None:
        """Stop, and forget text, statistics and marks. The setting stays."""
        self._pinned = None
        self._worker.ask(reset=True)

    @property
    def setting(self) -> Setting:
        """The setting from the next token on."""
        with self._worker.lock:
            return self._worker.pending or self._worker.setting

    def change(self, setting: Setting | None = None, **values: Any) -> None:
        """From the next token on: another setting, or fields of Ablation and RunSpec and `false_negative` by name.

        AblationError, PredictorError or BudgetError, one line and nothing changed, for what cannot be. Flash that
        cannot be read as asked is found when the reader is opened, before the next token: the former setting stays,
        and `snapshot().notice` says why.
        """
        new = (setting or self.setting).changed(**values)
        if self._check is None:
            raise BudgetError("session: it is closed; run the cell that opened it again")
        self._check(new)
        self._worker.ask(setting=new)

    def pin(self) -> Summary:
        """Keep the present setting's figures as A, to compare later ones with. DataError before there are enough."""
        with self._worker.lock:
            stretch = self._worker.stretches[-1]
            tokens = stretch.ring.count
            summary = stretch.summary()
        if summary is None:
            raise DataError(
                f"pin: the present setting has made {tokens} tokens; {WARM_UP + LEAST_TOKENS} are needed, "
                f"of which the first {WARM_UP} fill the window"
            )
        self._pinned = stretch
        self._touch()
        return summary

    def unpin(self) -> None:
        """Forget A."""
        self._pinned = None
        self._touch()

    def _touch(self) -> None:
        with self._worker.lock:
            self._worker.version += 1

    # how it goes

    @property
    def version(self) -> int:
        """A number that grows whenever a snapshot would show something else."""
        return self._worker.version

    @property
    def running(self) -> bool:
        """Whether text is being made."""
        return self._worker.state == "running"

    def snapshot(self, figures: bool = True) -> Snapshot:
        """Everything to show, copied; without `figures`, which cost the most, `now` and `pinned` are None."""
        worker = self._worker
        with worker.lock:
            stretch, pinned = worker.stretches[-1], self._pinned
            counted = stretch.counted() if figures and stretch.enough else None
            pinned_rows = pinned.counted() if figures and pinned is not None else None
            text = worker.text[-TEXT_KEPT:]
            if worker.text_cut or len(worker.text) > TEXT_KEPT:
                text = "… " + text
            values: dict[str, Any] = {
                "version": worker.version,
                "state": worker.state,
                "line": worker.line,
                "error": worker.failed,
                "notice": worker.notice,
                "setting": worker.setting,
                "plan": worker.plan,
                "rss_bytes": max(0, worker.rss - worker.rss_before),
                "tokens": worker.tokens,
                "text": text,
                "rows": worker.ring.rows(),
                "marks": tuple(worker.marks),
                "stretch_tokens": stretch.ring.count,
            }
        now = Summary.of(stretch, counted) if counted is not None else None
        then = Summary.of(pinned, pinned_rows) if pinned is not None and pinned_rows is not None else None
        return Snapshot(**values, now=now, pinned=then)

    def summaries(self) -> list[Summary]:
        """The figures of every setting that made tokens enough, oldest first; at most the last 32."""
        with self._worker.lock:
            found = [(stretch, stretch.counted()) for stretch in self._worker.stretches if stretch.enough]
        return [Summary.of(stretch, rows) for stretch, rows in found]

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is asked for."""
        with self._worker.lock:
            return self._worker.idle

    def wait(self, timeout: float | None = None, on_tick: Callable[[], None] | None = None) -> Snapshot:
        """Until nothing runs and nothing is asked for, or `timeout` seconds; `on_tick` is called while it waits."""
        worker, until = self._worker, None if timeout is None else time.monotonic() + timeout
        while True:
            with worker.lock:
                if worker.idle or (until is not None and time.monotonic() > until):
                    break
                worker.lock.wait(POLL_SECONDS)
            if on_tick is not None:
                on_tick()
        return self.snapshot()
