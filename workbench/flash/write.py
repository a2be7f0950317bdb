"""Blocks of weights, checked, cast, and put where the layout wants them. Memory: one FFN matrix and a few blocks."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

from workbench.errors import CheckpointError
from workbench.flash.layout import Group, RecordLayout
from workbench.flash.source import WeightSource
from workbench.spec import ModelSpec

BLOCK_BYTES = 4 << 20
Written = Callable[[int], None]
"""Called with the bytes just written."""


def write_at(fd: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of `content` at a byte offset; the system may take it in pieces."""
    view, done = memoryview(content).cast("B"), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def cast(block: torch.Tensor, dtype: str, name: str, where: str) -> np.ndarray:
    """A block [rows, ...] as bytes [rows, row bytes] in the storage dtype.

    CheckpointError, naming tensor and file (`where`), on NaN or infinity, and where a finite value overflows.
    """
    block = block.contiguous()
    if not torch.isfinite(block).all():
        raise CheckpointError(f"{where}: tensor {name} holds NaN or infinity; download the checkpoint again")
    stored = block.to(getattr(torch, dtype))
    if stored.dtype != block.dtype and not torch.isfinite(stored).all():
        largest = block.abs().max().item()
        raise CheckpointError(
            f"{where}: tensor {name} holds {largest:.6g}, too large for {dtype}; store as bfloat16 or float32"
        )
    return stored.reshape(stored.shape[0], -1).view(torch.uint8).numpy()


def write_group(fd: int, weights: WeightSource, group: Group, dtype: str, written: Written) -> None:
    """Write a resident group at its offset in the file `fd`, fillers as zeros."""
    position = group.offset
    for name, slot in group.tensors.items():
        start = group.offset + slot.offset
        _zeros(fd, position, start)
        rows = max(1, BLOCK_BYTES * slot.shape[0] // slot.nbytes)
        position = start
        for first in range(0, slot.shape[0], rows):
            values = weights.read(name, first, min(first + rows, slot.shape[0]))
            block = cast(values, dtype, name, weights.where(name))
            write_at(fd, block.reshape(-1).data, position)
            position += block.nbytes
            written(block.nbytes)
    _zeros(fd, position, group.offset + group.nbytes)
    written(group.nbytes - sum(slot.nbytes for slot in group.tensors.values()))


def _zeros(fd: int, start: int, stop: int) -> None:
    write_at(fd, bytes(stop - start), start)


class LayerWriter:
    """Writes a layer's FFN into both layouts in one pass over its neurons."""

    def __init__(self, spec: ModelSpec, layout: RecordLayout, dtype: str, bundled_fd: int, split_fd: int) -> None:
        self._spec, self._layout, self._dtype = spec, layout, dtype
        self._bundled_fd, self._split_fd = bundled_fd, split_fd
        self._rows = max(1, BLOCK_BYTES // layout.bundle_stride)

    def write(self, weights: WeightSource, layer: int, bundled: int, split: list[int], written: Written) -> None:
        """Write layer `layer` at byte `bundled` of ffn.bundled and bytes `split`, one a part, of ffn.split."""
        names = weights.ffn(layer)
        # Down is stored by neuron, that is by column: the whole matrix is held while it is transposed by blocks.
        down = weights.read(names[1])
        for first in range(0, self._spec.d_ff, self._rows):
            last = min(first + self._rows, self._spec.d_ff)
            values = (
                down[:, first:last].T if part == 1 else weights.read(name, first, last)
                for part, name in enumerate(names)
            )
            parts = [cast(v, self._dtype, n, weights.where(n)) for v, n in zip(values, names, strict=True)]
            written(self._write_block(parts, first, last, bundled, split))

    def _write_block(self, parts: list[np.ndarray], first: int, last: int, bundled: int, split: list[int]) -> int:
        layout, end = self._layout, self._spec.d_ff
        record = np.concatenate([parts[part] for part in layout.record_order()], axis=1)
        bodies = [(self._bundled_fd, bundled, record, layout.bundle_stride, layout.bundled_region(end))]
        bodies += [
            (self._split_fd, split[part], rows, layout.row_stride, layout.split_region(end))
            for part, rows in enumerate(parts)
        ]
        total = 0
        for fd, region, rows, stride, region_bytes in bodies:
            stop = region_bytes if last == end else last * stride
            block = np.zeros(stop - first * stride, np.uint8)
            block[: len(rows) * stride].reshape(len(rows), stride)[:, : rows.shape[1]] = rows
            write_at(fd, block.data, region + first * stride)
            total += block.nbytes
        return total
