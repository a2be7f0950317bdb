"""The part of the model that is not FFN, as MLX arrays: in memory for good (hybrid), or read again for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workbench.engines.stats import StepClock
from workbench.flash.layout import Group
from workbench.flash.reader import FlashReader, aligned_buffer
from workbench.flash.store import Store

if TYPE_CHECKING:
    import mlx.core as mx

PAGE = 16384
"""Bytes of a page on Apple silicon; direct I/O goes to whole pages."""


def shared_bytes(nbytes: int) -> tuple[mx.array, NDArray[np.uint8]]:
    """Memory of MLX that the CPU may write: uint8 [nbytes], and numpy's view of the same bytes, from a page boundary.

    Neither copies: what is written through the second is what MLX reads from the first, and from views of it. Nothing
    that was not yet evaluated may depend on the bytes that are overwritten. Not on CUDA, whose memory is its own.
    """
    import mlx.core as mx

    whole = mx.zeros([nbytes + PAGE], mx.uint8)
    mx.eval(whole)
    seen: NDArray[np.uint8] = np.array(whole, copy=False)
    start = -seen.ctypes.data % PAGE
    part = whole[start : start + nbytes]
    mx.eval(part)
    return part, seen[start : start + nbytes]


class ResidentWeights:
    """Arrays of the store's resident tensors, by name, that groups of the store are read into.

    `arrays` is what the decoder looks its weights up in: the same mapping throughout. Hybrid: each group has memory of
    its own and is read once. Otherwise all decoder layers share one buffer, since their groups are laid out alike, and
    every group is read when it is about to run. `in_place`: whether the reader writes to the memory that MLX computes
    on (Apple, CPU). Else (CUDA) each group is read to the host and copied from there; the clock counts that as mem.
    """

    def __init__(self, store: Store, clock: StepClock, in_place: bool) -> None:
        self.store, self.clock, self.in_place = store, clock, in_place
        self.arrays: dict[str, mx.array] = {}
        self.buffers: dict[str, NDArray[np.uint8]] = {}
        """By group, where the reader writes."""
        self._shared: dict[str, mx.array] = {}  # by group, the bytes of `buffers` as MLX has them
        self._open: tuple[FlashReader, int] | None = None

    def make_resident(self, reader: FlashReader, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Read every group into memory of its own. Not counted: it is no part of a token."""
        total, done = sum(group.nbytes for group in self.store.groups), 0
        self._forget()
        host = None if self.in_place else aligned_buffer(max(group.nbytes for group in self.store.groups))
        for group in self.store.groups:
            self._allocate(group, host)
            self._read(reader, group)
            self._take(group)
            done += group.nbytes
            if progress:
                progress("resident weights", done, total)
        if not self.in_place:
            self.buffers = {}

    def make_streamed(self) -> None:
        """Give up the resident weights; `load` brings a group when it is needed.

        Where the memory is shared, all layers' arrays are views of one buffer: they hold the layer that was loaded
        last. What is to outlive it, such as biases, must be copied and evaluated at once.
        """
        self._forget()
        for group in self.store.groups:
            layer = group.name.startswith("layer.")
            if layer and group.name != "layer.0":
                self.buffers[group.name] = self.buffers["layer.0"]
                if self.in_place:
                    self._shared[group.name] = self._shared["layer.0"]
            else:
                self._allocate(group, None if self.in_place else aligned_buffer(group.nbytes))
            if self.in_place:
                self._take(group)

    def load(self, reader: FlashReader, name: str) -> None:
        """Read one group for the present token; counted as io, and the copy, where there is one, as mem.

        The caller first evaluates everything that was computed from what this overwrites: the group's former
        contents and, for a layer, those of every other layer.
        """
        group = self.store.group(name)
        with self.clock.time("io"):
            stats = self._read(reader, group)
        self.clock.read_bytes += stats.read_bytes
        self.clock.reads += stats.reads
        if not self.in_place:
            with self.clock.time("mem"):
                self._take(group)

    def _forget(self) -> None:
        self.arrays.clear()
        self.buffers, self._shared = {}, {}

    def _allocate(self, group: Group, host: NDArray[np.uint8] | None) -> None:
        if host is None:
            self._shared[group.name], self.buffers[group.name] = shared_bytes(group.nbytes)
        else:
            self.buffers[group.name] = host[: group.nbytes]

    def _read(self, reader: FlashReader, group: Group) -> Any:
        if self._open is None or self._open[0] is not reader:
            self._open = (reader, reader.open(self.store.resident_path))
        return reader.read(self._open[1], [group.offset], [group.nbytes], self.buffers[group.name], [0], 0)

    def _take(self, group: Group) -> None:
        """The group's arrays from its buffer: views of it, or one copy that all of them are views of."""
        import mlx.core as mx

        dtype = getattr(mx, self.store.dtype)
        whole = self._shared[group.name] if self.in_place else mx.array(self.buffers[group.name])
        for name, slot in group.tensors.items():
            part = whole[slot.offset : slot.offset + slot.nbytes]
            self.arrays[name] = part.view(dtype).reshape(slot.shape)
        mx.eval([self.arrays[name] for name in group.tensors])
