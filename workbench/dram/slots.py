"""The neurons of one layer that are in DRAM: the paper's matrix, pointer, bias, num_used, last_k_active.

The neuron window and the slots are one thing here, since a neuron leaves its slot when it leaves the window.
`ReferenceSlots` does the same in plain Python.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench import _native


class Change(NamedTuple):
    """What one token changed.

    rows: int32 [n], the slot of each predicted neuron; valid once the slots named in load_slots have been filled.
    load_ids, load_slots: int32 [m], neurons to bring and where. evicted: neurons that left. moves: int32 [moved, 2],
    (from, to), slots that were copied to close a hole, before anything is loaded. trimmed: tokens of which neurons left
    inside the window, for want of slots.
    """

    rows: NDArray[np.int32]
    load_ids: NDArray[np.int32]
    load_slots: NDArray[np.int32]
    evicted: int
    moves: NDArray[np.int32]
    trimmed: int

    @property
    def moved(self) -> int:
        """Slots that were copied."""
        return len(self.moves)


class Slots:
    """Preallocated slots of one layer; used ones are [0, num_used). Not for several threads at once.

    d_ff: neurons of the layer. capacity: slots. slot_bytes: bytes of a neuron's rows. bias: float32 [d_ff], up biases.
    matrix: uint8 [capacity * slot_bytes], on a page boundary, for the caller to fill. pointer: int32 [capacity], the
    neuron in each slot, or -1. bias (as an attribute): float32 [capacity], by slot. matrix may be given; an empty one
    says that the slots are where only the caller reaches them, who then makes the moves of each Change. So may the
    array of biases by slot.
    """

    def __init__(
        self,
        d_ff: int,
        capacity: int,
        slot_bytes: int,
        bias: NDArray[np.float32],
        matrix: NDArray[np.uint8] | None = None,
        slot_bias: NDArray[np.float32] | None = None,
    ) -> None:
        if capacity < 1 or slot_bytes < 1:
            raise ValueError(f"capacity={capacity} and slot_bytes={slot_bytes} must be at least 1")
        _check_bias(bias, d_ff)
        self.d_ff = d_ff
        self.capacity = capacity
        self.slot_bytes = slot_bytes
        self.matrix = _native.aligned_buffer(capacity * slot_bytes) if matrix is None else matrix
        self.pointer = np.full(capacity, -1, np.int32)
        self.bias = np.zeros(capacity, np.float32) if slot_bias is None else slot_bias
        self._table = _native.SlotTable(
            d_ff, capacity, slot_bytes, self.matrix, self.pointer, self.bias, np.array(bias, np.float32)
        )

    @property
    def num_used(self) -> int:
        """Slots in use; they are the first ones."""
        return self._table.num_used

    def update(self, predicted: NDArray[np.int32], window: int) -> Change:
        """Make room for one token's neurons and say which to load.

        predicted: int32 [n], sorted and unique. window: the paper's k; neurons predicted at any of the k tokens before
        this one are in DRAM, older ones leave before anything is looked up. When capacity would be exceeded, the
        oldest tokens' neurons leave first, no more of them than have to. O(changed + n).

        ValueError, with nothing changed, when n > capacity or the ids are not as said.
        """
        if window < 0:
            raise ValueError(f"window={window} is negative")
        return self._update(predicted, window)

    def admit(self, ids: NDArray[np.int32]) -> Change:
        """As `update` for a token whose neurons the caller copies from elsewhere; nothing leaves for its age."""
        return self._update(ids, -1)

    def missing(self, ids: NDArray[np.int32], window: int) -> NDArray[np.int32]:
        """Those of `ids`, in their order, that an `update` of the next token with this window would load."""
        if window < 0:
            raise ValueError(f"window={window} is negative")
        return self._table.missing(ids, window)

    def rewind(self, count: int) -> None:
        """As if the newest `count` tokens had not been, where text is taken back.

        The tokens before them keep their age in the window. Neurons that none of these predicted stay in their slots
        until the next `update`, before which they leave first. O(neurons in the window). ValueError for more tokens
        than there were.
        """
        self._table.rewind(count)

    def _update(self, predicted: NDArray[np.int32], window: int) -> Change:
        try:
            return Change(*self._table.update(predicted, window))
        except TypeError:
            raise ValueError("predicted: needs a contiguous int32 array of one dimension") from None

    def clear(self) -> None:
        """Forget every neuron."""
        self._table.clear()

    def ids(self) -> NDArray[np.int32]:
        """int32, sorted: the neurons that are in DRAM."""
        return np.sort(self.pointer[: self.num_used])


class ReferenceSlots:
    """`Slots` in plain Python, for tests: the same neurons in DRAM and the same changes, slot for slot."""

    def __init__(self, d_ff: int, capacity: int, slot_bytes: int, bias: NDArray[np.float32]) -> None:
        _check_bias(bias, d_ff)
        self.d_ff = d_ff
        self.capacity = capacity
        self.slot_bytes = slot_bytes
        self.matrix = np.zeros(capacity * slot_bytes, np.uint8)
        self.pointer = np.full(capacity, -1, np.int32)
        self.bias = np.zeros(capacity, np.float32)
        self.num_used = 0
        self._all_bias = np.array(bias, np.float32)
        self._clock = 0
        self._last_k_active: list[tuple[int, set[int]]] = []

    def update(self, predicted: NDArray[np.int32], window: int) -> Change:
        """As `Slots.update`."""
        if window < 0:
            raise ValueError(f"window={window} is negative")
        return self._update(predicted, window)

    def admit(self, ids: NDArray[np.int32]) -> Change:
        """As `Slots.admit`."""
        return self._update(ids, self._clock + 1)

    def missing(self, ids: NDArray[np.int32], window: int) -> NDArray[np.int32]:
        """As `Slots.missing`."""
        kept = [ids for stamp, ids in self._last_k_active if stamp > self._clock - window]
        held = set(self.ids().tolist()) & set().union(*kept)
        return np.array([i for i in ids.tolist() if i not in held], np.int32)

    def rewind(self, count: int) -> None:
        """As `Slots.rewind`."""
        if not 0 <= count <= self._clock:
            raise ValueError("count: there were not so many tokens")
        self._clock -= count
        self._last_k_active = [(stamp, ids) for stamp, ids in self._last_k_active if stamp <= self._clock]

    def _update(self, predicted: NDArray[np.int32], window: int) -> Change:
        wanted = predicted.tolist()
        if wanted != sorted(set(wanted)) or (wanted and (wanted[0] < 0 or wanted[-1] >= self.d_ff)):
            raise ValueError("predicted neurons are not sorted, unique and in [0, d_ff)")
        if len(wanted) > self.capacity:
            raise ValueError("more neurons are predicted for one token than there are slots")
        self._clock += 1
        before = set(self.ids().tolist())
        kept = [(stamp, ids) for stamp, ids in self._last_k_active if stamp >= self._clock - window]
        held = set().union(*(ids for _, ids in kept))
        resident = held | set(wanted)
        trimmed = 0
        while (excess := len(resident) - self.capacity) > 0:
            (stamp, oldest), *others = kept
            own = sorted(oldest - set(wanted).union(*(ids for _, ids in others)))
            rest = {i for i in oldest if i > own[excess - 1]} if len(own) >= excess else set()
            kept = [(stamp, rest), *others] if rest else others
            trimmed += bool(own)
            resident -= set(own[:excess])
        self._last_k_active = [*kept, (self._clock, set(wanted))]
        load = [i for i in wanted if i not in held]
        leaving = sorted((before - held) | (held - resident))
        load_slots, moves = self._place(leaving, load)
        slot_of = {int(i): slot for slot, i in enumerate(self.pointer[: self.num_used])}
        rows = np.array([slot_of[i] for i in wanted], np.int32)
        return Change(rows, np.array(load, np.int32), np.array(load_slots, np.int32), len(leaving), moves, trimmed)

    def _place(self, leaving: list[int], load: list[int]) -> tuple[list[int], NDArray[np.int32]]:
        where = {int(i): slot for slot, i in enumerate(self.pointer[: self.num_used])}
        holes = sorted(where[i] for i in leaving)
        self.pointer[holes] = -1
        appended = range(self.num_used, self.num_used + max(0, len(load) - len(holes)))
        load_slots = [*holes[: len(load)], *appended]
        for slot, neuron in zip(load_slots, load, strict=True):
            self._put(slot, neuron)
        used = self.num_used + len(load) - len(holes)
        open_holes = [slot for slot in holes[len(load) :] if slot < used]
        tail = [slot for slot in range(used, self.num_used) if self.pointer[slot] >= 0]
        rows = self.matrix.reshape(self.capacity, self.slot_bytes)
        moves = np.array([*zip(tail, open_holes, strict=True)], np.int32).reshape(-1, 2)
        for slot, hole in moves.tolist():
            rows[hole] = rows[slot]
            self._put(hole, int(self.pointer[slot]))
        self.num_used = used
        self.pointer[used:] = -1
        return load_slots, moves

    def _put(self, slot: int, neuron: int) -> None:
        self.pointer[slot] = neuron
        self.bias[slot] = self._all_bias[neuron]

    def clear(self) -> None:
        """Forget every neuron."""
        self.pointer[:] = -1
        self.num_used = 0
        self._last_k_active.clear()

    def ids(self) -> NDArray[np.int32]:
        """int32, sorted: the neurons that are in DRAM."""
        return np.sort(self.pointer[: self.num_used])


def _check_bias(bias: NDArray[np.float32], d_ff: int) -> None:
    if d_ff < 1 or bias.shape != (d_ff,):
        raise ValueError(f"bias: needs shape [{d_ff}], got {list(bias.shape)}")
