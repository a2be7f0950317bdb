"""A GPU as one engine uses it: its kernels, its memory, and the order in which things are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from workbench.engines.stats import StepClock
from workbench.flash.layout import round_up
from workbench.kernels.metal.kernel import Machine
from workbench.kernels.metal.torch_machine import TorchMachine

PAGE = 4096
BANDWIDTH_BYTES = 1 << 30


def check_device() -> None:
    """DeviceError, with the remedy, when torch-cuda cannot run here."""
    TorchMachine()


def copy_bandwidth(nbytes: int = BANDWIDTH_BYTES, repeats: int = 10) -> float:
    """Bytes/s that the card reads and writes when it copies `nbytes` of its memory: the best of some copies."""
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    best = 0.0
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source)
        ended.record()
        ended.synchronize()
        best = max(best, 2 * nbytes / (began.elapsed_time(ended) / 1000))
    return best


class Pinned:
    """Host memory that the card copies from by itself, from a page boundary: `bytes` for numpy, `tensor` for torch."""

    def __init__(self, nbytes: int, pin: bool) -> None:
        whole = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=pin)
        start = -whole.data_ptr() % PAGE
        self.tensor = whole[start : start + nbytes]
        self.bytes: np.ndarray[Any, Any] = self.tensor.numpy()


Lists = list[tuple[torch.Tensor, torch.Tensor]]
"""Lists of neurons on the card: (ids uint32 [n], how many of them count uint32 [1]) each."""


def send_lists(lists: Lists, to: Pinned) -> list[tuple[int, int]]:
    """Have lists copied to the host. Returns where they will be, for `read_lists`."""
    host, at, places = to.tensor.view(torch.int32), 0, []
    for ids, count in lists:
        host[at : at + len(ids)].copy_(ids.view(torch.int32), non_blocking=True)
        host[at + len(ids) : at + len(ids) + 1].copy_(count.view(torch.int32), non_blocking=True)
        places.append((at, at + len(ids)))
        at += len(ids) + 1
    return places


def read_lists(held: Pinned, places: list[tuple[int, int]]) -> list[np.ndarray[Any, Any]]:
    """Lists that have arrived, int32 each."""
    found = held.bytes.view(np.int32)
    return [found[start : start + int(found[end])].copy() for start, end in places]


class Half:
    """A half of the staging: records on the host, as many on the card, and when the card is done with them."""

    def __init__(self, card: Card, host: torch.Tensor) -> None:
        self.host, self.bytes = host, host.numpy()
        self.device = torch.empty(len(host), dtype=torch.uint8, device=card.device)
        self.free: torch.cuda.Event | None = None


class Card:
    """What the layers of an engine share. All is done in the order in which it is asked for: in the stream that is
    torch's current one now or, within `apart`, in one of its own.

    kernels: runs the Metal bodies, on tensors of `device`. On the CPU (emulation) there are no streams.
    """

    def __init__(self, kernels: Machine, device: torch.device) -> None:
        self.machine, self.device = kernels, device
        self.on_gpu = device.type == "cuda"
        self._main = torch.cuda.current_stream(device) if self.on_gpu else None
        self._apart = torch.cuda.Stream(device) if self.on_gpu else None
        self.graphs: Any = None
        """TokenGraphs of the present setting, once a token has been taken by itself."""
        self.active: list[torch.Tensor] = []
        """Counts of neurons that fired, int32 [1], not yet read."""
        self.halves: tuple[Half, ...] = ()
        self._next = 0
        self._lists: tuple[Pinned, torch.Tensor] | None = None
        self._listed: Pinned | None = None
        self._numbers = torch.zeros(0, dtype=torch.int32)
        self._spans: list[tuple[str, Any, Any]] = []
        self._events: list[Any] = []  # made, and free again

    # memory

    def staging(self, nbytes: int, record_bytes: int) -> np.ndarray[Any, Any]:
        """uint8 [nbytes] of pinned memory for records on their way, which is used by halves; as much on the card."""
        self.halves = ()
        pinned = Pinned(nbytes + PAGE, self.on_gpu)
        half = max(1, nbytes // record_bytes // 2) * record_bytes
        starts = [0, round_up(half, PAGE)] if 2 * half <= nbytes else [0]
        self.halves = tuple(Half(self, pinned.tensor[start : start + half]) for start in starts)
        return pinned.bytes[:nbytes]

    def half(self) -> Half:
        """The next half, once the card is done with what it held."""
        self._next = (self._next + 1) % len(self.halves)
        half = self.halves[self._next]
        if half.free is not None:
            half.free.synchronize()
        return half

    def numbers(self, count: int) -> torch.Tensor:
        """uint32 [count + 1] on the card: 0, 1, 2 ... Its part [n : n + 1] holds n: a count that need not be sent."""
        if len(self._numbers) <= count:
            self._numbers = torch.arange(round_up(count + 1, 1024), dtype=torch.int32, device=self.device)
        return self._numbers[: count + 1].view(torch.uint32)

    def count(self, number: int) -> torch.Tensor:
        """uint32 [1] on the card that holds `number`."""
        return self.numbers(number)[number:]

    def array(self, values: np.ndarray[Any, Any], dtype: str = "float32") -> Any:
        """A tensor on the card with these values."""
        return self.machine.array(np.ascontiguousarray(values), dtype)

    def send(self, parts: list[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """Small arrays of 32-bit values to the card in one copy. All that reads the arrays sent before must have been
        asked for, and what is sent must have arrived before the next call: a wait for the card in between sees to it.
        """
        sizes = [round_up(max(len(part), 1), 4) for part in parts]
        nbytes = 4 * sum(sizes)
        if self._lists is None or len(self._lists[0].bytes) < nbytes:
            pinned = Pinned(round_up(nbytes, PAGE), self.on_gpu)
            self.wait()
            self._lists = pinned, torch.empty(len(pinned.tensor), dtype=torch.uint8, device=self.device)
        pinned, held = self._lists
        at, sent = 0, []
        for part, size in zip(parts, sizes, strict=True):
            pinned.bytes[at : at + 4 * len(part)] = np.ascontiguousarray(part).view(np.uint8)
            kind = torch.float32 if part.dtype == np.float32 else torch.uint32
            sent.append(held[at : at + 4 * size].view(kind)[: max(len(part), 1)])
            at += 4 * size
        held[:nbytes].copy_(pinned.tensor[:nbytes], non_blocking=True)
        return sent

    def fetch(self, lists: Lists, clock: StepClock) -> list[np.ndarray[Any, Any]]:
        """Lists of neurons as int32 arrays: one wait."""
        nbytes = sum(4 * (len(ids) + 1) for ids, _ in lists)
        if self._listed is None or len(self._listed.bytes) < nbytes:
            self._listed = Pinned(round_up(nbytes, PAGE), self.on_gpu)
        places = send_lists(lists, self._listed)
        with clock.wait():
            self.wait()
        return read_lists(self._listed, places)

    # order

    def wait(self) -> None:
        """Until the card has done all that the current stream was asked for."""
        if self._main is not None:
            self._main.synchronize()

    def mark(self) -> torch.cuda.Event | None:
        """The present point of the current stream."""
        if self._main is None:
            return None
        event = torch.cuda.Event()
        event.record(self._main)
        return event

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The arithmetic within the block is in a stream that can be recorded; it comes after all before the block."""
        former = self._main
        if former is None or self._apart is None:
            yield
            return
        self._apart.wait_stream(former)
        with torch.cuda.stream(self._apart):
            self._main = self._apart
            try:
                yield
            finally:
                former.wait_stream(self._apart)
                self._main = former

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """The card's time for what is asked for within the block, in the stream in which it is; see `settle`."""
        if self._main is None:
            yield
            return
        began, ended = (self._events.pop() if self._events else torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(self._main)
        yield
        ended.record(self._main)
        self._spans.append((part, began, ended))

    @contextmanager
    def timed(self, part: str, clock: StepClock) -> Iterator[None]:
        """As `span`, from when the host begins to ask; without a card, the host's time. Not within another part's."""
        with clock.time(part) if self._main is None else self.span(part):
            yield

    def settle(self, clock: StepClock) -> None:
        """Count the spans so far, once the card has done all; and what was still to be read of the counts."""
        for part, began, ended in self._spans:
            clock.seconds[part] += began.elapsed_time(ended) / 1000
            self._events += began, ended
        self.forget()

    def forget(self) -> None:
        """Drop spans and counts."""
        self._spans.clear()
        self.active.clear()

    def close(self) -> None:
        """Give back the memory."""
        self.forget()
        self.halves, self._lists, self._listed, self.graphs = (), None, None, None
        if self.on_gpu:
            torch.cuda.empty_cache()
