"""A few tokens at once through one layer's FFN: what verifies drafted tokens (paper, section 5.2).

The neurons that the window has are not read again, and those that it lacks are read once for all tokens. Each token's
result is, to the bit, what it is when the tokens come one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.dram.slots import Change
from workbench.kernels.ffn import sparse_ffn_tokens

if TYPE_CHECKING:
    from workbench.engines.ffn import FlashFFN

Array = np.ndarray[Any, Any]


def few_tokens(ffn: FlashFFN, x: torch.Tensor) -> torch.Tensor:
    """float32 [t, d_model] to the same, without the down bias.

    Afterwards the window ends at the token of number `Shared.window_end`, counted from 1 (0: at the last one): those
    behind it are, for the window, tokens that never were.
    """
    rows = np.ascontiguousarray(x.numpy())
    out = np.zeros_like(rows)
    ffn.residual = None  # of several tokens: nothing is read ahead for these
    if ffn.shared.ablation.predictor == "off":
        _dense(ffn, rows, out)
    else:

        def group(first: int, ids: list[Array], windows: list[int]) -> None:
            own = slice(first, first + len(ids))
            _group(ffn, rows[own], out[own], ids, windows)

        passes(ffn, _choose(ffn, rows), group)
    return torch.from_numpy(out)


def _choose(ffn: FlashFFN, x: Array) -> list[Array]:
    """The neurons to compute for each token, sorted."""
    shared, clock = ffn.shared, ffn.shared.clock
    if shared.ablation.predictor == "oracle":
        return ffn.firing(x)
    assert ffn.predictor is not None
    with clock.time("predictor"):
        return [ffn.predictor.ids(own, shared.threads) for own in x]


def passes(ffn: FlashFFN, ids: list[Array], group: Callable[[int, list[Array], list[int]], None]) -> None:
    """Tokens, each with the sorted ids of its neurons, in groups that the slots hold: group(first, ids, windows) brings
    and computes those of the tokens from `first` on, updating the slots for each with its window."""
    shared, slots, clock = ffn.shared, ffn.slots, ffn.shared.clock
    assert slots is not None
    clock.predicted += sum(map(len, ids))
    windowing = shared.ablation.windowing
    if not windowing:
        slots.clear()
    k, end = shared.run.window if windowing else 0, shared.window_end or len(ids)
    behind = 0  # updates of tokens that the window is not to remember
    for first, last in together(ids, slots.capacity):
        own = range(first, last)
        # No token of the group may leave before the last has come, nor, once the window's last token is past, any
        # that the window then has.
        windows = [max(k + max(0, i + 1 - end), i - first) for i in own]
        behind += sum(max(1, -(-len(ids[i]) // slots.capacity)) for i in own if i >= end)
        if len(ids[first]) > slots.capacity:  # a token that the slots do not hold: in passes, as when it comes alone
            for at in range(0, len(ids[first]), slots.capacity):
                part = ids[first][at : at + slots.capacity]
                group(first, [part], windows)
        else:
            group(first, ids[first:last], windows)
    clock.in_window += slots.num_used
    if behind:
        with clock.time("mem"):
            slots.rewind(behind)


def together(ids: list[Array], capacity: int) -> list[tuple[int, int]]:
    """Tokens [first, last) that the slots hold at the same time, as many as can be; a token that they do not hold is
    by itself."""
    groups: list[tuple[int, int]] = []
    first, count = 0, 0
    held = np.zeros(1 + max((int(own[-1]) for own in ids if len(own)), default=0), bool)
    for i, own in enumerate(ids):
        new = own[~held[own]]
        if i > first and count + len(new) > capacity:
            groups.append((first, i))
            held[:] = False
            first, count, new = i, 0, own
        held[new] = True
        count += len(new)
    return [*groups, (first, len(ids))]


def take_in(ffn: FlashFFN, ids: list[Array], windows: list[int]) -> tuple[list[Change], Array, Array]:
    """Update the slots for each of some tokens: the changes, the neurons to bring, sorted, and the slot of every neuron
    that has one, int32 [d_ff]."""
    slots = ffn.slots
    assert slots is not None
    changes = [slots.update(own, window) for own, window in zip(ids, windows, strict=True)]
    load = np.sort(np.concatenate([change.load_ids for change in changes]))
    # A slot may have been moved since it was given: where a neuron is now, is said by `pointer` alone.
    slot_of = np.empty(len(ffn.all_ids), np.int32)
    slot_of[slots.pointer[: slots.num_used]] = ffn.all_ids[: slots.num_used]
    return changes, load, slot_of


def _group(ffn: FlashFFN, x: Array, out: Array, ids: list[Array], windows: list[int]) -> None:
    """Tokens whose neurons the slots hold together: make room for each, read what lacks once, compute."""
    slots, clock = ffn.slots, ffn.shared.clock
    assert slots is not None
    with clock.time("mem"):
        changes, load, slot_of = take_in(ffn, ids, windows)
    ffn._fetch(load, slot_of[load], slots.matrix, sequential=False)
    clock.loaded += len(load)
    clock.window_trims += sum(change.trimmed for change in changes)
    clock.active += _compute(ffn, x, slots.matrix, ids, [slot_of[own] for own in ids], slots.bias, slots.pointer, out)


def _dense(ffn: FlashFFN, x: Array, out: Array) -> None:
    """Every neuron: those that stay resident from the slots, the others, read once for all tokens, from the scratch."""
    shared, clock, t = ffn.shared, ffn.shared.clock, len(x)
    if ffn.slots is not None:
        ids, places = ffn.resident_ids, ffn.all_ids[: len(ffn.resident_ids)]
        clock.active += _compute(ffn, x, ffn.slots.matrix, [ids] * t, [places] * t, ffn.biases.first[ids], ids, out)
    for ids in ffn._blocks(ffn.other_ids):
        places = ffn.all_ids[: len(ids)]
        ffn._fetch(ids, places, shared.scratch, sequential=True)
        clock.loaded += len(ids)
        clock.active += _compute(ffn, x, shared.scratch, [ids] * t, [places] * t, ffn.biases.first[ids], ids, out)
    clock.predicted += t * len(ffn.all_ids)
    clock.in_window += len(ffn.resident_ids)


def _compute(
    ffn: FlashFFN, x: Array, matrix: Array, ids: list[Array], rows: list[Array], bias: Array, pointer: Array, out: Array
) -> int:
    """Add each token's neurons, `ids` in the slots `rows` of `matrix`, to its row of out. bias, pointer: by slot."""
    shared = ffn.shared
    return sparse_ffn_tokens(
        x, matrix, shared.slot_bytes, ids, rows, bias, shared.store.dtype, out, shared.threads,
        gated=ffn.gated, activation="relu2" if ffn.squared else "relu", threshold=ffn.threshold,
        up_bias=None if ffn.biases.up is None else ffn.biases.up[pointer],
    )  # fmt: skip
