"""Where every byte of a flash store lies: record strides, regions, and the resident file's groups.

Pure arithmetic on the model spec; docs/store-format.md states the same rules in words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.spec import ITEMSIZE, ModelSpec
from workbench.tensorfile import CODES

ALIGNMENT = 4096
STRIDE_UNIT = 64
PART_NAMES = ("up", "down", "gate")
"""Names of the parts by index: part 0 of a neuron is its up row, 1 its down column, 2 its gate row."""
PAD_PREFIX = "__pad__."
GroupShapes = Sequence[tuple[str, Mapping[str, tuple[int, ...]]]]


def round_up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def record_stride(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Bytes from one record to the next, for records of `nbytes`.

    The least multiple of 64 such that no record, however many follow each other from an aligned start, touches more
    alignment units than ceil(nbytes / alignment): one more unit would be read from flash in vain.
    """
    units = -(-nbytes // alignment)
    stride = round_up(nbytes, STRIDE_UNIT)
    # Records start at multiples of gcd(stride, alignment) within a unit; the latest start has the least room.
    while alignment - math.gcd(stride, alignment) + nbytes > units * alignment:
        stride += STRIDE_UNIT
    return stride


@dataclass(frozen=True)
class RecordLayout:
    """How a neuron's weights lie on flash; all in bytes.

    `parts` rows of `row_bytes` (d_model values) make a record of `record_bytes`. Records follow each other every
    `bundle_stride` bytes in ffn.bundled; single rows every `row_stride` bytes in ffn.split.
    """

    parts: int
    row_bytes: int
    record_bytes: int
    bundle_stride: int
    row_stride: int
    alignment: int = ALIGNMENT

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str) -> RecordLayout:
        """The layout of a model stored as `dtype`."""
        row = spec.d_model * ITEMSIZE[dtype]
        return cls(spec.parts, row, spec.parts * row, record_stride(spec.parts * row), record_stride(row))

    def bundled_region(self, d_ff: int) -> int:
        """Bytes of one layer's region of ffn.bundled."""
        return round_up(d_ff * self.bundle_stride, self.alignment)

    def split_region(self, d_ff: int) -> int:
        """Bytes of one part's region (one of `parts` of a layer) of ffn.split."""
        return round_up(d_ff * self.row_stride, self.alignment)

    def record_order(self) -> tuple[int, ...]:
        """Parts in the order they have within a record: up, (gate,) down."""
        return (0, 1) if self.parts == 2 else (0, 2, 1)


@dataclass(frozen=True)
class TensorSlot:
    """A tensor of a resident group: its dtype ('float32'), shape, and byte offset from the group's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Group:
    """Tensors that are read together: `nbytes` (a multiple of 4096) at byte `offset` of resident.safetensors."""

    name: str
    offset: int
    nbytes: int
    tensors: dict[str, TensorSlot]


def plan_resident(groups: GroupShapes, dtype: str) -> tuple[bytes, tuple[Group, ...]]:
    """The resident file's first bytes (length and header, padded with spaces to 4096) and its groups.

    Within a group every tensor starts at a multiple of 64; uint8 tensors named `__pad__.N` fill what is left, since
    the safetensors format allows no holes.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: list[tuple[str, int, int, dict[str, TensorSlot]]] = []
    position = pads = 0
    for name, shapes in groups:
        start, tensors = position, {}
        for tensor, shape in shapes.items():
            position, pads = _fill(header, position, STRIDE_UNIT, pads)
            slot = TensorSlot(dtype, tuple(shape), position - start)
            tensors[tensor] = slot
            header[tensor] = _entry(CODES[dtype], slot.shape, position, slot.nbytes)
            position += slot.nbytes
        # A group without tensors (a head that is all tied) still has one unit, so that every group can be read alike.
        position, pads = _fill(header, position, ALIGNMENT, pads, least=0 if shapes else ALIGNMENT)
        starts.append((name, start, position - start, tensors))
    text = json.dumps(header, separators=(",", ":")).encode()
    length = round_up(8 + len(text), ALIGNMENT) - 8
    prefix = length.to_bytes(8, "little") + text.ljust(length)
    return prefix, tuple(Group(n, len(prefix) + start, size, tensors) for n, start, size, tensors in starts)


def _entry(code: str, shape: tuple[int, ...], start: int, nbytes: int) -> dict[str, object]:
    return {"dtype": code, "shape": list(shape), "data_offsets": [start, start + nbytes]}


def _fill(header: dict[str, object], position: int, unit: int, pads: int, least: int = 0) -> tuple[int, int]:
    """Add a filler tensor of at least `least` up to a multiple of `unit`; (new position, fillers so far)."""
    gap = round_up(position + least, unit) - position
    if not gap:
        return position, pads
    header[f"{PAD_PREFIX}{pads}"] = _entry("U8", (gap,), position, gap)
    return position + gap, pads + 1
