"""A training run seen from outside while it goes on: losses by layer, and quality on held-out text now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from workbench.predictor.evaluate import Scorer, measure, thresholds

if TYPE_CHECKING:
    from workbench.predictor.trainer import Trainer

WATCHED_TOKENS = 2048
"""Of each half of the validation text, in a look at the quality during training."""
LOSSES_SECONDS = 0.5
SHARE = 0.1
"""Of the training time that looks at the quality may take."""
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Seen:
    """What is known at a step. `curve`: 'step' and 'loss', the latter by layer. `quality`: for each layer the card's
    figures (false_negative, false_positive, ...) as measured at step `quality_step`, on a part of the held-out text;
    None before the first look."""

    step: int
    steps: int
    batch_tokens: int
    curve: dict[str, list[Any]]
    quality: list[dict[str, float]] | None
    quality_step: int
    false_negative: float


Watch = Callable[[Seen], None]


class _Taps(Protocol):
    def lifted(self) -> AbstractContextManager[None]: ...


class Watcher:
    """Calls `watch` during training with what `Seen` says, without changing what is trained.

    Quality is looked at after the first step and then as often as keeps it below a tenth of the time; thresholds come
    from one half of `windows` ('calibrate'), counts from the other ('test'), as at the end of training.
    """

    def __init__(self, watch: Watch, windows: dict[str, Sequence[np.ndarray]]) -> None:
        self.watch = watch
        self._windows = {part: _few(found) for part, found in windows.items()}
        self._told = 0.0
        self._looked, self._took = 0.0, 0.0
        self._quality: list[dict[str, float]] | None = None
        self._quality_step = 0

    def begun(self, trainer: Trainer) -> None:
        """Tell where the run stands before its first step."""
        self._tell(trainer)

    def after_step(self, trainer: Trainer, taps: _Taps) -> None:
        """Look and tell, where it is time to. `taps`: those that training has on the model."""
        now = time.monotonic()
        last = trainer.step == trainer.steps
        due = now - self._looked >= max(LOOK_SECONDS, self._took / SHARE)
        if due or last or self._quality is None:
            with taps.lifted():
                self._look(trainer)
            self._looked = time.monotonic()
            self._took = self._looked - now
        elif now - self._told < LOSSES_SECONDS:
            return
        self._tell(trainer)

    def _look(self, trainer: Trainer) -> None:
        scorer, rate = Scorer(trainer.stored_factors()), trainer.spec.false_negative
        size = trainer.micro_windows
        batches = {
            part: [np.stack(found[at : at + size]) for at in range(0, len(found), size)]
            for part, found in self._windows.items()
        }
        model, ups, view = trainer.model, trainer.ups, trainer.view
        limits = thresholds(model, ups, scorer, batches["calibrate"], [rate], _ignore, view=view)
        counts = measure(model, ups, scorer, batches["test"], limits, _ignore, view=view)
        self._quality, self._quality_step = [row[0].as_dict() for row in counts], trainer.step

    def _tell(self, trainer: Trainer) -> None:
        trainer.flush()
        self._told = time.monotonic()
        curve = {name: list(values) for name, values in trainer.curve.items()}
        step, steps, tokens, rate = trainer.step, trainer.steps, trainer.batch_tokens, trainer.spec.false_negative
        self.watch(Seen(step, steps, tokens, curve, self._quality, self._quality_step, rate))


def _few(windows: Sequence[np.ndarray]) -> list[np.ndarray]:
    return list(windows[: max(1, WATCHED_TOKENS // len(windows[0]))])


def _ignore(done: int) -> None:
    """A look has no bar of its own."""
