"""What one token cost, and the clock that the parts of a step report to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenStats:
    """Latency split and counts of one decoding step; the paper's io / mem / compute (section 4).

    total_ms = io_ms + mem_ms + compute_ms; predictor_ms is a part of compute_ms, shown apart.
    Neuron counts are of all layers together. `active` counts the computed neurons that fired: with
    the oracle, every neuron that fires. `oracle_ms`, what finding the true activations took, is in
    none of the other figures, since no pipeline could have them.
    """

    position: int
    io_ms: float
    mem_ms: float
    predictor_ms: float
    compute_ms: float
    total_ms: float
    oracle_ms: float
    read_bytes: int
    reads: int
    active: int
    predicted: int
    loaded: int
    in_window: int
    window_trims: int


class StepClock:
    """Sums, over one step, the seconds of each part and the counts that layers report."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.seconds = {"io": 0.0, "mem": 0.0, "predictor": 0.0, "oracle": 0.0}
        self.read_bytes = self.reads = 0
        self.active = self.predicted = self.loaded = self.in_window = self.window_trims = 0
        self.began = time.perf_counter()

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - began

    def finish(self, position: int) -> TokenStats:
        ms = {part: 1000 * seconds for part, seconds in self.seconds.items()}
        total = 1000 * (time.perf_counter() - self.began) - ms["oracle"]
        return TokenStats(
            position=position,
            io_ms=ms["io"],
            mem_ms=ms["mem"],
            predictor_ms=ms["predictor"],
            compute_ms=total - ms["io"] - ms["mem"],
            total_ms=total,
            oracle_ms=ms["oracle"],
            read_bytes=self.read_bytes,
            reads=self.reads,
            active=self.active,
            predicted=self.predicted,
            loaded=self.loaded,
            in_window=self.in_window,
            window_trims=self.window_trims,
        )
