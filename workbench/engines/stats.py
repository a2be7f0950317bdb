"""What one token cost, and the clock that the parts of a step report to."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenStats:
    """Latency split and counts of one decoding step; the paper's io / mem / compute (section 4).

    total_ms = io_ms + mem_ms + compute_ms; predictor_ms is a part of compute_ms, shown apart.
    Neuron counts are of all layers together. `active` counts the computed neurons that fired: with
    the oracle, every neuron that fires. `oracle_ms`, what finding the true activations took, is in
    none of the other figures, since no pipeline could have them. `wait_ms`, a part of compute_ms: what the CPU
    waited for a GPU to finish, in `waits` waits. On a GPU, whose work cannot be timed piece by piece while it runs,
    predictor_ms is what the predictors took when they were timed by themselves.
    With prefetch, io_ms is the time in which the token waited for flash; hidden_io_ms, in no sum, is that of reading
    beside other work. read_bytes has all bytes; `prefetched` neurons were read ahead, and of them `wasted`, in
    wasted_bytes, were not needed.
    With speculative decoding, a round of drafting and verifying gives several tokens, which share its cost equally.
    `drafted` tokens were proposed and `accepted` of them taken; draft_ms, a part of compute_ms, is the draft model's.
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
    wait_ms: float = 0.0
    waits: int = 0
    hidden_io_ms: float = 0.0
    prefetched: int = 0
    wasted: int = 0
    wasted_bytes: int = 0
    draft_ms: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def shared(self, tokens: int) -> list[TokenStats]:
        """Of a round that ended at this position, the stats of each of its `tokens`: times and counts in equal parts
        (of what cannot be halved, the first tokens have the rest), so that they add up to the round's."""
        found = []
        for i in range(tokens):
            part: dict[str, Any] = {f.name: _part(getattr(self, f.name), tokens, i) for f in dataclasses.fields(self)}
            part |= {"position": self.position - tokens + 1 + i, "in_window": self.in_window}
            found.append(TokenStats(**part))
        return found


def _part(value: float, tokens: int, index: int) -> float:
    """The share of one token of a round."""
    if isinstance(value, int):
        return value // tokens + (index < value % tokens)
    return value / tokens


class StepClock:
    """Sums, over one step, the seconds of each part and the counts that layers report."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        parts = ("io", "mem", "predictor", "oracle", "wait", "hidden_io", "draft")
        self.seconds: dict[str, float] = dict.fromkeys(parts, 0.0)
        self.read_bytes = self.reads = self.waits = 0
        self.prefetched = self.wasted = self.wasted_bytes = 0
        self.drafted = self.accepted = 0
        self.active = self.predicted = self.loaded = self.in_window = self.window_trims = 0
        self.began = time.perf_counter()

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - began

    @contextmanager
    def wait(self) -> Iterator[None]:
        """A wait for a GPU."""
        self.waits += 1
        with self.time("wait"):
            yield

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
            wait_ms=ms["wait"],
            waits=self.waits,
            hidden_io_ms=ms["hidden_io"],
            prefetched=self.prefetched,
            wasted=self.wasted,
            wasted_bytes=self.wasted_bytes,
            draft_ms=ms["draft"],
            drafted=self.drafted,
            accepted=self.accepted,
        )
