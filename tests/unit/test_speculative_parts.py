"""Speculative decoding without a model: the window that is taken back, kernels of several tokens, shares of a round."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from test_kernels import DTYPES, Layer, assert_sums_close
from test_slots import AnySlots, check, fill, ids, make, step
from torch.nn import functional as F

from workbench.ablation import Ablation
from workbench.dram.slots import ReferenceSlots, Slots
from workbench.engines.attention import RowByRow
from workbench.engines.few import together
from workbench.engines.speculative import Acceptance
from workbench.engines.stats import StepClock, TokenStats
from workbench.errors import SpecError
from workbench.kernels.ffn import sparse_ffn, sparse_ffn_tokens, sparse_ffn_tokens_reference
from workbench.kernels.linear import linear
from workbench.spec import RunSpec


@pytest.fixture(params=[Slots, ReferenceSlots])
def kind(request: pytest.FixtureRequest) -> type[AnySlots]:
    return request.param


# the window


def test_tokens_that_are_taken_back_leave_the_window_as_if_they_had_not_been(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 10)
    step(slots, ids(0), 2)
    step(slots, ids(1, 2), 2)
    step(slots, ids(2, 3), 2)
    step(slots, ids(4), 2)  # rejected, and so is the next
    step(slots, ids(1, 5), 4)  # wider, so that the window that is kept is still whole
    slots.rewind(2)
    change = step(slots, ids(3, 6), 2)
    # 4 and 5 never were; 1 has the age of the second token, not of the fifth
    assert slots.ids().tolist() == [1, 2, 3, 6]
    assert (change.load_ids.tolist(), change.evicted) == ([6], 2)
    step(slots, ids(6), 2)
    assert slots.ids().tolist() == [2, 3, 6]


def test_a_rejected_neuron_stays_until_the_next_token_and_then_leaves_first(kind: type[AnySlots]) -> None:
    slots = make(kind, 20, 4)
    step(slots, ids(0, 1), 9)
    step(slots, ids(2), 9)
    slots.rewind(1)
    assert slots.ids().tolist() == [0, 1, 2]
    change = step(slots, ids(3, 4), 9)  # room for all that the window has, because 2 has gone
    assert (change.trimmed, slots.ids().tolist()) == (0, [0, 1, 3, 4])
    slots.rewind(0)
    with pytest.raises(ValueError, match="count"):
        slots.rewind(3)
    with pytest.raises(ValueError, match="count"):
        slots.rewind(-1)


@pytest.mark.parametrize("seed", range(6))
def test_rewinding_slot_for_slot_as_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    d_ff, capacity = 60, int(rng.integers(20, 50))
    pair: list[AnySlots] = [make(Slots, d_ff, capacity), make(ReferenceSlots, d_ff, capacity)]
    since = 0
    for _ in range(400):
        action = rng.random()
        if action < 0.15:
            count = int(rng.integers(0, since + 1))
            since = 0
            for slots in pair:
                slots.rewind(count)
        elif action < 0.17:
            since = 0
            for slots in pair:
                slots.clear()
        else:
            predicted = np.sort(rng.choice(d_ff, rng.integers(0, 15), replace=False)).astype(np.int32)
            window, since = int(rng.integers(0, 8)), min(8, since + 1)
            changes = [slots.admit(predicted) if action < 0.3 else slots.update(predicted, window) for slots in pair]
            for slots, change in zip(pair, changes, strict=True):
                fill(slots, change)
                check(slots, predicted, change)
            mine, wanted = changes
            for name in mine._fields:
                np.testing.assert_array_equal(getattr(mine, name), getattr(wanted, name), err_msg=name)
        assert pair[0].ids().tolist() == pair[1].ids().tolist()
        np.testing.assert_array_equal(pair[0].pointer, pair[1].pointer)


def test_tokens_go_together_as_long_as_the_slots_hold_them() -> None:
    tokens = [ids(0, 1), ids(1, 2), ids(2, 3), ids(0, 1, 2, 3, 4), ids(), ids(9)]
    assert together(tokens, 4) == [(0, 3), (3, 4), (4, 6)]
    assert together(tokens, 5) == [(0, 5), (5, 6)]
    assert together(tokens, 100) == [(0, 6)]
    assert together([ids()], 1) == [(0, 1)]


@pytest.mark.parametrize(("drafted", "accepted", "end"), [(0, 0, 5), (8, 8, 5), (8, 4, 3), (8, 0, 1), (10, 7, 4)])
def test_the_window_ends_at_the_token_that_is_expected_to_be_the_last(drafted: int, accepted: int, end: int) -> None:
    acceptance = Acceptance()
    acceptance.drafted, acceptance.accepted = drafted, accepted
    assert acceptance.window_end(5) == end  # alpha * (lambda + 1), rounded
    assert acceptance.window_end(1) == 1


# several tokens, each to the bit what it is alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_ffn_of_several_tokens(dtype: str, gated: bool, threads: int) -> None:
    for d, t, capacity in ((9, 2, 40), (100, 5, 60), (515, 3, 400), (1100, 4, 300)):
        layer = Layer(d, capacity, dtype, seed=d, padding=64, gated=gated, activation="relu2" if d == 100 else "relu")
        rng = np.random.default_rng(d + t)
        x = rng.standard_normal((t, d)).astype(np.float32)
        counts = [0, *rng.integers(1, capacity, t - 1)]
        used = [np.sort(rng.choice(capacity, n, replace=False)).astype(np.int32) for n in counts]
        place = rng.permutation(capacity).astype(np.int32)  # of each neuron
        rows = [place[own] for own in used]
        kind: dict[str, Any] = {"gated": gated, "activation": layer.activation, "up_bias": layer.up_bias}
        args = (layer.matrix, layer.slot_bytes)
        alone, wanted_active = np.ones((t, d), np.float32), 0
        for k in range(t):
            wanted_active += sparse_ffn(x[k], *args, rows[k], layer.bias, dtype, alone[k], threads, **kind)
        out = np.ones((t, d), np.float32)
        active = sparse_ffn_tokens(x, *args, used, rows, layer.bias, dtype, out, threads, **kind)
        assert active == wanted_active
        np.testing.assert_array_equal(out, alone)
        reference = np.ones((t, d), np.float32)
        assert active == sparse_ffn_tokens_reference(
            x, *args, used, rows, layer.bias, dtype, reference, threads, **kind
        )
        assert_sums_close(out, reference)


def test_lists_that_do_not_fit_are_refused() -> None:
    layer = Layer(16, 10, "float32")
    x, out = np.zeros((2, 16), np.float32), np.zeros((2, 16), np.float32)

    def run(used: list[np.ndarray], rows: list[np.ndarray]) -> None:
        sparse_ffn_tokens(x, layer.matrix, layer.slot_bytes, used, rows, layer.bias, "float32", out, 1)

    with pytest.raises(ValueError, match="sorted"):
        run([ids(3, 2), ids(1)], [ids(0, 1), ids(1)])
    with pytest.raises(ValueError, match="rows"):
        run([ids(1), ids(1)], [ids(1), ids(10)])
    with pytest.raises(ValueError, match="ids"):
        run([ids(1), ids(1)], [ids(1), ids(1, 2)])
    with pytest.raises(ValueError, match="starts"):
        run([ids(1)], [ids(1)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_of_several_tokens(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for d in (7, 64, 515, 1100):
        weight = rng.standard_normal((33, d)).astype(np.float32)
        if dtype != "float32":
            weight = (weight.view(np.uint32) >> 16).astype(np.uint16)
        bias = rng.standard_normal(33).astype(np.float32)
        for t in (2, 5, 16, 19):
            x = rng.standard_normal((t, d)).astype(np.float32)
            alone = [linear(row[None], weight, bias, dtype, 2)[0] for row in x]
            np.testing.assert_array_equal(linear(x, weight, bias, dtype, 2), alone)


@pytest.mark.parametrize("mask", [None, "causal", "bias"])
def test_attention_of_several_tokens(mask: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, n, 16, generator=generator) for n in (5, 12, 12))
    after = torch.ones(5, 12, dtype=torch.bool).tril(7)
    shift = torch.randn(5, 12, generator=generator)
    given = {None: None, "causal": after, "bias": shift.masked_fill(~after, -torch.inf)}[mask]
    alone = []
    for i in range(5):
        own = shift[i : i + 1, : 8 + i] if mask == "bias" else None
        keys, values = k[:, :, : 8 + i], v[:, :, : 8 + i]
        alone.append(F.scaled_dot_product_attention(q[:, :, i : i + 1], keys, values, own))
    with RowByRow():
        together = F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=mask is None)
    assert torch.equal(together, torch.cat(alone, 2))


# stats


def test_the_tokens_of_a_round_share_its_cost() -> None:
    clock = StepClock()
    clock.read_bytes, clock.loaded, clock.in_window, clock.drafted, clock.accepted = 1001, 7, 500, 4, 2
    clock.seconds["io"] = 0.003
    whole = clock.finish(41)
    parts = whole.shared(3)
    assert [part.position for part in parts] == [39, 40, 41]
    assert [part.read_bytes for part in parts] == [334, 334, 333]
    assert [part.in_window for part in parts] == [500] * 3  # what is there, not what it cost
    for field in dataclasses.fields(TokenStats):
        if field.name not in ("position", "in_window"):
            total = sum(getattr(part, field.name) for part in parts)
            assert total == pytest.approx(getattr(whole, field.name)), field.name
    assert whole.shared(1) == [whole]


def test_settings_of_drafting() -> None:
    assert Ablation(speculative=True).describe().endswith("speculative=on")
    assert RunSpec().draft == ""
    for fields in ({"draft_tokens": 0}, {"draft_tokens": 16}, {"draft": 3}):
        with pytest.raises(SpecError, match=next(iter(fields))):
            RunSpec(**fields)  # type: ignore[arg-type]
