"""Reading ahead: neurons that the next layer is likely to need are read while this one computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from workbench.flash.reader import ReadStats

MARGIN_STEP, MOST_MARGIN = 0.1, 4.0
"""On the predictor's logits: how much surer a guess has to be after a read that cost the token time, and at most."""
WASTE_ALLOWED = 0.1
"""The share of what is read ahead that may be for nothing where flash has no time to spare."""


class Arrived(NamedTuple):
    """What was read ahead. ids: int32 [n], sorted; neuron i is in place i of `buffer`. stats: of the read. waited_s:
    the part of its time in which the token had nothing else to do."""

    ids: np.ndarray[Any, Any]
    buffer: np.ndarray[Any, Any]
    stats: ReadStats
    waited_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds of reading beside other work."""
        return max(0.0, self.stats.seconds - self.waited_s)


class ReadAhead:
    """One read under way at a time, into a buffer of its own. Close it to end its thread."""

    def __init__(self, buffer: np.ndarray[Any, Any], slot_bytes: int) -> None:
        self.buffer, self.capacity = buffer, len(buffer) // slot_bytes
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._ids = np.zeros(0, np.int32)
        self._under_way: Future[ReadStats] | None = None

    def start(
        self, ids: np.ndarray[Any, Any], read: Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], ReadStats]
    ) -> None:
        """Begin read(ids, buffer) for the first of the sorted ids, as many as there is room for."""
        assert self._under_way is None, "what was read ahead for the layer before has not been taken"
        self._ids = ids[: self.capacity]
        if len(self._ids):
            self._under_way = self._thread.submit(read, self._ids, self.buffer)

    def take(self) -> Arrived | None:
        """Wait for what was begun; None where nothing was. The buffer is free again at the next `start`. Raises what
        the read raised."""
        if self._under_way is None:
            return None
        began = time.perf_counter()
        stats = self._under_way.result()
        self._under_way = None
        return Arrived(self._ids, self.buffer, stats, time.perf_counter() - began)

    def drain(self) -> None:
        """Wait for what was begun, whatever comes of it, and forget it."""
        if self._under_way is not None:
            self._under_way.exception()
            self._under_way = None

    def close(self) -> None:
        """End the thread."""
        self.drain()
        self._thread.shutdown()


def next_margin(margin: float, arrived: Arrived, wasted: int) -> float:
    """How sure the next guess has to be: a little surer when the token waited for a read of which too much was for
    nothing, a little less sure otherwise. So flash is never kept from what is needed by what is not."""
    costly = arrived.hidden_s < arrived.stats.seconds and wasted > WASTE_ALLOWED * len(arrived.ids)
    step = MARGIN_STEP if costly else -MARGIN_STEP
    return min(MOST_MARGIN, max(0.0, margin + step))
