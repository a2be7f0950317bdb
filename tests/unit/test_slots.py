"""The neuron window and its slots: the paper's rules, and the native table against its reference, slot for slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.dram.slots import Change, ReferenceSlots, Slots

SLOT_BYTES = 24
AnySlots = Slots | ReferenceSlots


@pytest.fixture(params=[Slots, ReferenceSlots])
def kind(request: pytest.FixtureRequest) -> type[AnySlots]:
    return request.param


def make(kind: type[AnySlots], d_ff: int, capacity: int) -> AnySlots:
    return kind(d_ff, capacity, SLOT_BYTES, np.arange(d_ff, dtype=np.float32) / np.float32(7))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def fill(slots: AnySlots, change: Change) -> None:
    """Load what was asked for: a neuron's record is its id, over and over."""
    rows = slots.matrix.reshape(slots.capacity, SLOT_BYTES).view(np.int32)
    rows[change.load_slots] = change.load_ids[:, None]


def check(slots: AnySlots, predicted: np.ndarray, change: Change) -> None:
    """What must hold after each token, whatever came before."""
    used = slots.num_used
    assert np.all(slots.pointer[:used] >= 0)
    assert np.all(slots.pointer[used:] == -1)
    assert len(set(slots.pointer[:used].tolist())) == used
    rows = slots.matrix.reshape(slots.capacity, SLOT_BYTES).view(np.int32)
    np.testing.assert_array_equal(rows[:used], np.repeat(slots.pointer[:used, None], SLOT_BYTES // 4, axis=1))
    np.testing.assert_array_equal(slots.bias[:used], slots.pointer[:used].astype(np.float32) / 7)
    np.testing.assert_array_equal(slots.pointer[change.rows], predicted)


def step(slots: AnySlots, predicted: np.ndarray, window: int) -> Change:
    change = slots.update(predicted, window)
    fill(slots, change)
    check(slots, predicted, change)
    return change


def test_neurons_stay_for_k_tokens_and_then_leave(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 10)
    assert step(slots, ids(1, 2), 2).load_ids.tolist() == [1, 2]
    assert step(slots, ids(3), 2).load_ids.tolist() == [3]
    change = step(slots, ids(1), 2)  # 1 is used again, so it stays two tokens longer
    assert change.load_ids.tolist() == []
    assert slots.ids().tolist() == [1, 2, 3]
    change = step(slots, ids(4), 2)
    assert (change.load_ids.tolist(), change.evicted) == ([4], 1)
    assert slots.ids().tolist() == [1, 3, 4]
    assert step(slots, ids(), 2).evicted == 1
    assert slots.ids().tolist() == [1, 4]
    assert step(slots, ids(), 2).evicted == 1
    assert step(slots, ids(), 2).evicted == 1
    assert slots.num_used == 0


def test_window_of_zero_keeps_this_token_alone(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 10)
    step(slots, ids(1, 2, 3), 0)
    change = step(slots, ids(2, 5), 0)
    assert (change.load_ids.tolist(), change.evicted, change.trimmed) == ([2, 5], 3, 0)
    assert slots.ids().tolist() == [2, 5]


def test_new_neurons_fill_holes_before_anything_moves(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 10)
    step(slots, ids(0, 1, 2, 3), 1)
    step(slots, ids(4, 5), 1)
    change = step(slots, ids(8, 9), 1)  # 0..3 leave; 8 and 9 come; 4 and 5 close the other holes
    assert (change.evicted, change.moved) == (4, 2)
    assert change.moves.tolist() == [[4, 2], [5, 3]]
    assert change.load_slots.tolist() == [0, 1]
    assert slots.pointer[:4].tolist() == [8, 9, 4, 5]


def test_oldest_token_leaves_first_when_there_is_no_room(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 5)
    step(slots, ids(0, 1), 10)
    step(slots, ids(2, 3), 10)
    change = step(slots, ids(4, 5), 10)
    assert (change.evicted, change.trimmed) == (1, 1)  # no more of it than has to
    assert slots.ids().tolist() == [1, 2, 3, 4, 5]
    change = step(slots, ids(6, 7), 10)
    assert (change.evicted, change.trimmed) == (2, 2)
    assert slots.ids().tolist() == [3, 4, 5, 6, 7]
    change = step(slots, ids(10, 11, 12, 13, 14), 10)
    assert (change.evicted, change.trimmed) == (5, 3)
    assert slots.ids().tolist() == [10, 11, 12, 13, 14]


def test_a_full_set_of_slots_can_be_replaced_whole(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 4)
    step(slots, ids(0, 1, 2, 3), 4)
    assert step(slots, ids(0, 1, 2, 3), 4).load_ids.tolist() == []
    assert step(slots, ids(4, 5, 6, 7), 4).load_ids.tolist() == [4, 5, 6, 7]


def test_admitted_tokens_count_as_tokens_of_the_window(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 10)
    for token in (ids(0), ids(1), ids(2)):
        change = slots.admit(token)
        fill(slots, change)
        assert change.evicted == 0
    step(slots, ids(3), 2)
    assert slots.ids().tolist() == [1, 2, 3]


def test_what_text_taken_back_left_goes_first_even_where_nothing_ages(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 6)
    step(slots, ids(0, 1), 4)
    step(slots, ids(2, 3), 4)
    slots.rewind(1)
    change = slots.admit(ids(3, 4))
    fill(slots, change)
    assert (change.load_ids.tolist(), change.evicted, change.trimmed) == ([3, 4], 2, 0)
    assert slots.ids().tolist() == [0, 1, 3, 4]


def test_clear_forgets(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 10)
    step(slots, ids(0, 5), 4)
    slots.clear()
    assert slots.num_used == 0
    assert slots.ids().tolist() == []
    change = step(slots, ids(5), 4)
    assert (change.load_ids.tolist(), change.evicted) == ([5], 0)


@pytest.mark.parametrize(
    "predicted",
    [ids(3, 2), ids(2, 2), ids(-1), ids(20), ids(0, 1, 2, 3, 4)],
    ids=["order", "twice", "low", "high", "many"],
)
def test_bad_predictions_change_nothing(kind: type[AnySlots], predicted: np.ndarray) -> None:
    slots = make(kind, 20, 4)
    step(slots, ids(0, 7), 1)
    with pytest.raises(ValueError, match="predicted"):
        slots.update(predicted, 1)
    with pytest.raises(ValueError, match="window"):
        slots.update(ids(1), -1)
    assert slots.ids().tolist() == [0, 7]
    assert step(slots, ids(8), 1).evicted == 0
    assert step(slots, ids(8), 1).evicted == 2


def test_wrong_types_are_refused() -> None:
    slots = make(Slots, 20, 4)
    wrongs: list[Any] = [np.array([1], np.int64), np.zeros((1, 1), np.int32), ids(0, 1, 2, 3)[::2]]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="contiguous int32"):
            slots.update(wrong, 1)
    with pytest.raises(ValueError, match="bias"):
        Slots(20, 4, SLOT_BYTES, np.zeros(19, np.float32))
    with pytest.raises(ValueError, match="capacity"):
        Slots(20, 0, SLOT_BYTES, np.zeros(20, np.float32))


@pytest.mark.parametrize("seed", range(30))
def test_random_sequences_equal_the_reference(seed: int) -> None:
    """Any sequence of tokens, windows that change on the way, and clears; capacities from tight to ample."""
    rng = np.random.default_rng(seed)
    d_ff = int(rng.integers(1, 200))
    capacity = int(rng.integers(1, d_ff + 1))
    native, reference = make(Slots, d_ff, capacity), make(ReferenceSlots, d_ff, capacity)
    window = 4
    favourites = rng.permutation(d_ff)
    for _ in range(120):
        action = rng.random()
        if action < 0.02:
            native.clear()
            reference.clear()
        if action > 0.9:
            window = int(rng.integers(0, 7))
        count = int(rng.integers(0, capacity + 1)) if action < 0.3 else int(rng.integers(0, capacity // 3 + 1))
        pool = favourites[: max(count, d_ff // 2)] if rng.random() < 0.7 else favourites
        predicted = np.sort(rng.choice(pool, count, replace=False)).astype(np.int32)
        missing = native.missing(predicted, window)
        np.testing.assert_array_equal(missing, reference.missing(predicted, window))
        if action > 0.95:
            changes = native.admit(predicted), reference.admit(predicted)
        else:
            changes = native.update(predicted, window), reference.update(predicted, window)
        for mine, theirs in zip(*changes, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        if action <= 0.95:
            np.testing.assert_array_equal(missing, changes[0].load_ids)
        fill(native, changes[0])
        fill(reference, changes[1])
        check(native, predicted, changes[0])
        np.testing.assert_array_equal(native.pointer, reference.pointer)
        np.testing.assert_array_equal(native.ids(), reference.ids())
        assert native.num_used == reference.num_used


@pytest.mark.parametrize("seed", range(3))
def test_moves_can_be_made_by_the_caller(seed: int) -> None:
    """Without a matrix the table keeps the books, and its moves make another copy of the slots the same."""
    rng = np.random.default_rng(seed)
    bias = np.arange(40, dtype=np.float32) / np.float32(7)
    whole, books = Slots(40, 16, SLOT_BYTES, bias), Slots(40, 16, SLOT_BYTES, bias, np.zeros(0, np.uint8))
    copy, moved = np.zeros((16, SLOT_BYTES // 4), np.int32), 0
    for _ in range(60):
        predicted = np.sort(rng.choice(40, rng.integers(0, 9), replace=False)).astype(np.int32)
        window = int(rng.integers(0, 4))
        change = step(whole, predicted, window)
        told = books.update(predicted, window)
        assert told.moves.shape == (told.moved, 2)
        assert np.array_equal(told.moves, change.moves)
        copy[told.moves[:, 1]] = copy[told.moves[:, 0]]
        copy[told.load_slots] = told.load_ids[:, None]
        moved += told.moved
        rows = whole.matrix.reshape(16, SLOT_BYTES).view(np.int32)
        np.testing.assert_array_equal(copy[: books.num_used], rows[: whole.num_used])
    assert moved > 0
    with pytest.raises(ValueError, match="capacity \\* slot_bytes"):
        Slots(40, 16, SLOT_BYTES, bias, np.zeros(8, np.uint8))


def test_matrix_takes_direct_reads() -> None:
    assert make(Slots, 20, 4).matrix.ctypes.data % 4096 == 0
