"""Several processes that train together: started by torchrun, gloo between CPUs, NCCL between CUDA cards.

What a training run needs and no more: sums, copies from the first process, and one agreement a step on whether to
go on, so that Ctrl-C or a failure in one process ends all of them with one line. Nothing is assumed to be shared but
the network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed

from workbench.errors import DeviceError, TrainingError, WorkbenchError

T = TypeVar("T")
DEVICES = ("cpu", "cuda")
TIMEOUT = timedelta(minutes=30)  # the longest that one process may work alone: reading a large checkpoint
GOES_ON, STOPS, FAILED = 0, 1, 2


def is_main() -> bool:
    """Whether this process shows and writes: the first that torchrun started, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass
class World:
    """The processes of one run. `rank` counts from 0, which alone writes and shows; `device` is this process's own."""

    rank: int
    size: int
    device: torch.device
    _ended: bool = field(default=False, repr=False)

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """This process's share of a list that all have: every `size`-th from its rank on."""
        return items[self.rank :: self.size]

    def sum_(self, *tensors: torch.Tensor) -> None:
        """Replace each tensor by its sum over the processes."""
        if self.size > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)

    def copy_(self, *tensors: torch.Tensor, source: int = 0) -> None:
        """Replace each tensor by that of process `source`."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, source)

    def share(self, value: T) -> T:
        """The first process's value (anything that can be pickled)."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, 0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every process's value, in order of rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def first(self, make: Callable[[], T]) -> T:
        """What the first process makes, for all."""
        made: Any = make() if self.main else None
        self.agree()
        return self.share(made)

    def agree(self, stop: bool = False) -> bool:
        """Whether any process wants to stop. When one failed, this ends all: see `connect`."""
        if self.size == 1:
            return stop
        code = self._highest(STOPS if stop else GOES_ON)
        if code == FAILED:
            self._end(None)
        return code == STOPS

    def _highest(self, code: int) -> int:
        """On the CPU whatever the device, so that a GPU's queue is not waited for."""
        box = torch.tensor([code], dtype=torch.int32)
        distributed.all_reduce(box, distributed.ReduceOp.MAX)
        return int(box.item())

    def _end(self, error: BaseException | None) -> NoReturn:
        """Exchange what failed, and leave: the first process with the one line, the others silently."""
        self._ended = True
        told: list[tuple[str, str] | None] = self.gather(None if error is None else _told(error))
        kinds = [entry[0] for entry in told if entry]
        if "failure" not in kinds and "fault" not in kinds:
            raise KeyboardInterrupt if self.main else SystemExit(130)
        if not self.main:
            if error is not None and not isinstance(error, WorkbenchError | KeyboardInterrupt):
                raise error  # a fault of the program itself: its traceback is wanted
            raise SystemExit(1) from error
        if error is not None and not isinstance(error, KeyboardInterrupt):
            raise error
        rank, line = next((r, entry[1]) for r, entry in enumerate(told) if entry and entry[0] != "interrupt")
        raise TrainingError(f"process {rank} of {self.size}: {line}")


def _told(error: BaseException) -> tuple[str, str]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupt", "interrupted"
    if isinstance(error, WorkbenchError):
        return "failure", str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return "fault", f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextmanager
def connect(device: str) -> Iterator[World]:
    """The processes that torchrun started (RANK, WORLD_SIZE and LOCAL_RANK in the environment), or this one alone.

    When the body raises, all processes end: the first raises the error (TrainingError naming the process, where it was
    another's), or KeyboardInterrupt; the others raise SystemExit, so that one line is printed. A body ends in step:
    every process must reach `agree`, or fail, between one collective call and the next.

    Raises DeviceError (no such device, fewer cards than processes) and TrainingError (cannot connect, a process lost).
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        yield World(0, 1, _device(device, None))
        return
    world = World(_number("RANK"), size, _device(device, _number("LOCAL_RANK")))
    own = not distributed.is_initialized()
    if own:
        _start(world)
    try:
        yield world
    except BaseException as error:
        if isinstance(error, RuntimeError) and _lost(error):
            raise TrainingError("a process of this run was lost; run the same command to resume") from error
        if world._ended:
            raise
        with suppress(RuntimeError):  # the others are gone too
            world._highest(FAILED)
            world._end(error)
        raise
    finally:
        if own:
            distributed.destroy_process_group()


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, default)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TrainingError(f"{name}={value!r} in the environment is not a number; start with torchrun") from None


def _device(device: str, local: int | None) -> torch.device:
    if device not in DEVICES:
        raise DeviceError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("device cuda: this torch sees no CUDA GPU; install a CUDA build of torch or use --device cpu")
    if local is None:
        return torch.device("cuda", torch.cuda.current_device())
    if local >= torch.cuda.device_count():
        raise DeviceError(
            f"device cuda: process {local} of this machine has no card, it has {torch.cuda.device_count()}; "
            "start fewer with torchrun --nproc-per-node"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _start(world: World) -> None:
    cuda = world.device.type == "cuda"
    try:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=world.device if cuda else None
        )
    except (RuntimeError, ValueError) as error:
        raise TrainingError(f"the processes cannot connect ({_told(error)[1]}); start them with torchrun") from error


def _lost(error: RuntimeError) -> bool:
    text = str(error)
    return any(sign in text for sign in ("Connection closed by peer", "Connection reset", "gloo", "NCCL"))
