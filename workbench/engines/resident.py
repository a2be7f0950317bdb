"""The part of the model that is not FFN: in DRAM for good (hybrid), or read again for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from workbench.engines.layers import TORCH_DTYPES
from workbench.engines.stats import StepClock
from workbench.flash.layout import Group
from workbench.flash.reader import FlashReader, aligned_buffer
from workbench.flash.store import Store


class ResidentWeights:
    """Binds the model's parameters to buffers that groups of the store are read into.

    Hybrid: each group has a buffer and is read once. Otherwise all decoder layers share one buffer, since their groups
    are laid out alike, and every group is read when it is about to run.
    """

    def __init__(self, store: Store, model: nn.Module, clock: StepClock):
        self.store, self.model, self.clock = store, model, clock
        self.buffers: dict[str, Any] = {}
        self.extra: dict[str, torch.Tensor] = {}  # tensors that no module holds, by name: the FFN biases

    def make_resident(self, reader: FlashReader, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Read every group into a buffer of its own."""
        total = sum(group.nbytes for group in self.store.groups)
        self.buffers, done = {}, 0
        self._bind((group, self._new_buffer(group.nbytes)) for group in self.store.groups)
        for group in self.store.groups:
            self._fill(reader, group)
            done += group.nbytes
            if progress:
                progress("resident weights", done, total)

    def make_streamed(self) -> None:
        """Give up the resident weights; `load` brings a group when it is needed."""
        self.buffers = {}
        shared = self._new_buffer(self.store.group("layer.0").nbytes)
        self._bind(
            (group, shared if group.name.startswith("layer.") else self._new_buffer(group.nbytes))
            for group in self.store.groups
        )

    def load(self, reader: FlashReader, name: str) -> None:
        """Read one group for the present token; counted as io."""
        with self.clock.time("io"):
            stats = self._fill(reader, self.store.group(name))
        self.clock.read_bytes += stats.read_bytes
        self.clock.reads += stats.reads

    def _new_buffer(self, nbytes: int) -> Any:
        """uint8 [nbytes], where the model computes."""
        return aligned_buffer(nbytes)

    def _fill(self, reader: FlashReader, group: Group) -> Any:
        handle = self._handle(reader)
        return reader.read(handle, [group.offset], [group.nbytes], self.buffers[group.name], [0], 0)

    def _handle(self, reader: FlashReader) -> int:
        if getattr(self, "_open", None) is None or self._open[0] is not reader:
            self._open = (reader, reader.open(self.store.resident_path))
        return self._open[1]

    def _bind(self, buffers: Iterable[tuple[Group, Any]]) -> None:
        dtype = TORCH_DTYPES[self.store.dtype]
        for group, buffer in buffers:
            self.buffers[group.name] = buffer
            held = torch.as_tensor(buffer)
            for name, slot in group.tensors.items():
                view = held[slot.offset : slot.offset + slot.nbytes].view(dtype).view(slot.shape)
                if not _assign(self.model, name, view):
                    self.extra[name] = view
        if "lm_head.weight" not in {name for group in self.store.groups for name in group.tensors}:
            head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()  # type: ignore[operator]
            head._parameters["weight"] = embedding._parameters["weight"]


def _assign(model: nn.Module, name: str, value: torch.Tensor) -> bool:
    """Put `value` where the parameter `name` is; False when the model has no such parameter."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    if leaf not in module._parameters:
        return False
    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    return True
