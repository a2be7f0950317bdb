"""One layer's FFN, run from flash, with its slots and its arithmetic on a card (paper, section 3 and table 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from workbench.dram.slots import Slots
from workbench.engines.few import passes, take_in
from workbench.engines.ffn import Biases, FlashFFN, Shared, found_in, widened
from workbench.engines.layers import FEW_TOKENS
from workbench.engines.torch_cuda.card import Card, Half, read_lists, send_lists
from workbench.engines.torch_cuda.graphs import TokenGraphs
from workbench.kernels.metal.predictor import predict
from workbench.kernels.metal.slots import insert, move
from workbench.kernels.metal.sparse_ffn import Record, sparse_ffn
from workbench.predictor.low_rank import LayerPredictor

Array = np.ndarray[Any, Any]


class CardPredictor:
    """A layer's predictor in the card's memory."""

    def __init__(self, layer: LayerPredictor, card: Card):
        a, b = layer.packed()
        self._card, self._dtype = card, layer.stored
        self._a, self._b = card.machine.array(a, self._dtype), card.machine.array(b, self._dtype)
        self._bias, self._threshold = card.array(layer.bias), card.array(np.array([layer.threshold], np.float32))
        self._scales = [None if scale is None else card.array(scale) for scale in (layer.a_scale, layer.b_scale)]

    def ids(self, x: torch.Tensor, margin: float | torch.Tensor = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(sorted ids uint32 [d_ff], how many of them count uint32 [1]) for one token's input [d_model], `margin` above
        the threshold."""
        given = isinstance(margin, torch.Tensor) or margin
        threshold = self._threshold + margin if given else self._threshold
        a_scale, b_scale = self._scales
        return predict(
            self._card.machine, x, self._a, self._b, self._bias, threshold,
            dtype=self._dtype, a_scale=a_scale, b_scale=b_scale,
        )  # fmt: skip

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """bool [tokens, d_ff], the neurons predicted for each token's input [tokens, d_model]."""
        hidden = x @ widened(self._a, self._scales[0]).T
        scores = torch.addmm(self._bias, hidden, widened(self._b, self._scales[1]).T)
        return ~(scores <= self._threshold)  # true of NaN, which has to show


class _Recorded(NamedTuple):
    """What a layer's part between two graphs reads and writes: its input and output [d_model], its lists."""

    graphs: TokenGraphs
    row: torch.Tensor
    out: torch.Tensor
    places: list[tuple[int, int]]


class CardFFN(FlashFFN):
    """The FFN of one layer, its slots in the card's memory.

    For a token, the card is waited for once: for the lists of predicted neurons. While flash is read, it computes those
    that the window holds; what was read it takes from pinned memory of the host straight to slots, in one launch. What
    depends on the number of neurons is data: nothing is compiled anew.
    """

    def __init__(self, shared: Shared, layer: int, biases: Biases, card: Card):
        super().__init__(shared, layer, biases)
        self.card = card
        spec = shared.store.spec
        self._record = Record(spec.d_model, shared.store.dtype, shared.slot_bytes, gated=spec.gated)
        self._matrix: torch.Tensor | None = None  # the slots
        self._limit = card.array(np.array([self.threshold], np.float32))
        self._on_card: tuple[Any, ...] = (None, None, None, None)  # biases as they were given, and as the card has them
        self._guess = self.all_ids[:0]
        self._dense_biases: Any = None  # of all neurons, as they are read: the biases that they are of, and them
        self._copied: Any = None  # when what was read ahead has been taken from its buffer
        self.recorded: _Recorded | None = None

    # memory

    def _new_slots(self, capacity: int) -> Slots:
        shared, self._matrix = self.shared, None
        self._matrix = torch.zeros(capacity * shared.slot_bytes, dtype=torch.uint8, device=self.card.device)
        return Slots(shared.store.spec.d_ff, capacity, shared.slot_bytes, self.biases.first, np.zeros(0, np.uint8))

    def _fill(self, ids: Array, slots: Slots) -> None:
        self._bring(ids, self.card.numbers(len(ids)), sequential=True)

    def _bring(self, ids: Array, places: torch.Tensor, *, sequential: bool = False) -> None:
        """Neurons from flash to slots, which the card takes from the host's memory by itself. places: uint32 [at least
        len(ids)], on the card."""
        card, width = self.card, self.shared.slot_bytes
        size = len(card.halves[0].bytes) // width
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            with self.shared.clock.time("mem"):
                half = card.half()
            self._fetch(part, self.all_ids[: len(part)], half.bytes, sequential=sequential)
            with self._mem(hidden=at + size < len(ids)):
                insert(card.machine, self._matrix, width, half.host, places[at : at + len(part)], card.count(len(part)))
                half.free = card.mark()

    def _biases_there(self) -> tuple[Any, Any, Any]:
        """first [d_ff], up [d_ff] or None, down [d_model] or None, float32, on the card."""
        if self._on_card[0] is not self.biases:
            given = (self.biases.first, self.biases.up, self.biases.down)
            self._on_card = (self.biases, *(None if part is None else self.card.array(part) for part in given))
        return self._on_card[1:]

    def _sum_of(
        self, x: torch.Tensor, matrix: Any, rows: torch.Tensor, count: torch.Tensor, bias: torch.Tensor, up: Any
    ) -> torch.Tensor:
        """[d_model]: the neurons in the first `count` slots of `rows`; biases are by slot."""
        out, active = sparse_ffn(
            self.card.machine, self._record, matrix, rows, count, x, bias, self._limit,
            activation="relu2" if self.squared else "relu", up_bias=up,
        )  # fmt: skip
        self.card.active.append(active.view(torch.int32))
        return out

    def _blocks(self, ids: Array) -> list[Array]:
        size = len(self.card.halves[0].bytes) // self.shared.slot_bytes
        return [np.sort(ids[at : at + size]) for at in range(0, len(ids), size)]

    # tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if self.card.graphs is not None and self.card.graphs.recording:
            return self._as_graph(rows[0], self.card.graphs).view(x.shape)
        if self.shared.ablation.predictor == "off":
            out = self._dense_rows(rows) if len(rows) <= FEW_TOKENS else self._prompt(rows)
        elif len(rows) == 1:
            out = self._some(rows[0], self._listed(rows[0]))[None]
        else:
            out = self._few(rows) if len(rows) <= FEW_TOKENS else self._prompt(rows)
        down = self._biases_there()[2]
        return (out if down is None else out + down).view(x.shape)

    def _true(self, rows: torch.Tensor) -> list[Array]:
        """The neurons that fire, for each of some tokens (oracle)."""
        with self.shared.clock.wait():
            host = rows.cpu().numpy()
        return self.firing(host)

    def _listed(self, row: torch.Tensor) -> Array:
        """The neurons to compute for one token, sorted, and the next layer's as they look from here: the one thing that
        is waited for."""
        following, guess = self._ahead_of()
        if self.shared.ablation.predictor == "oracle":
            own = self._true(row[None])[0]
            if following is not None and guess is not None:
                self._guess = following._true(guess[None])[0]
            return own
        predictor: Any = self.predictor
        with self.card.span("predictor"):
            lists = [predictor.ids(row)]
            if following is not None and guess is not None:
                ahead: Any = following.predictor
                lists.append(ahead.ids(guess, following.margin))
        found = self.card.fetch(lists, self.shared.clock)
        self._guess = found[-1]
        return found[0]

    def _ahead_of(self) -> tuple[CardFFN | None, torch.Tensor | None]:
        """With prefetch, the next layer's FFN and its input [d_model] if nothing were added to the residual stream."""
        following = self._following if self.shared.ahead is not None else None
        if not isinstance(following, CardFFN) or self.residual is None:
            return None, None
        return following, following.norm(self.residual).reshape(-1).contiguous()

    # a token as graphs

    def _as_graph(self, row: torch.Tensor, graphs: TokenGraphs) -> torch.Tensor:
        """The FFN where a token is recorded: its lists belong to the graph before it, its biases to the one after."""
        predictor: Any = self.predictor
        following, guess = self._ahead_of()
        lists, ahead = [predictor.ids(row)], cast(Any, following and following.predictor)
        if following is not None and guess is not None:
            lists.append(ahead.ids(guess, graphs.margins[following.layer]))
        out = torch.zeros_like(row)
        self.recorded = _Recorded(graphs, row, out, send_lists(lists, graphs.lists))

        def run() -> None:
            with self.card.span("predictor"):  # by themselves, for what they take
                predictor.ids(row)
                if following is not None and guess is not None:
                    ahead.ids(guess, graphs.margins[following.layer])
            self.between_graphs()

        graphs.cut(run)
        down = self._biases_there()[2]
        return out if down is None else out + down

    def between_graphs(self) -> None:
        """What follows the graph that lists this layer's neurons and comes before the next."""
        recorded = self.recorded
        assert recorded is not None
        with self.shared.clock.wait():
            self.card.wait()
        found = read_lists(recorded.graphs.lists, recorded.places)
        self._guess = found[-1]
        recorded.out.copy_(self._some(recorded.row, found[0]))

    def _guessed(self, following: FlashFFN) -> Array:
        if self._copied is not None:  # the buffer is about to be written again
            self._copied.synchronize()
            self._copied = None
        return self._guess

    def _some(self, row: torch.Tensor, ids: Array) -> torch.Tensor:
        out = None
        for part in self._parts_of(ids):
            if out is not None:
                self._settle()  # this turn overwrites slots that the one before reads
            own = self._turn(row, part)
            out = own if out is None else out + own
        assert out is not None
        return out

    def _settle(self) -> None:
        with self.shared.clock.wait():
            self.card.wait()

    def _turn(self, row: torch.Tensor, ids: Array) -> torch.Tensor:
        """As many neurons as the slots hold: those of the window while flash is read, then those that were read."""
        slots, clock, card = self.slots, self.shared.clock, self.card
        assert slots is not None
        with clock.time("mem"):
            change = slots.update(ids, self._window)
            at, here = self._landed(change.load_ids)
            there = np.ones(len(ids), bool)
            there[np.searchsorted(ids, change.load_ids)] = False
            kept = change.rows[there]
            places = np.concatenate([change.load_slots[here], change.load_slots[~here]])
            kept_rows, loaded, held_at, sources, targets, bias, *up = card.send(
                [
                    kept,
                    places,
                    at.astype(np.int32),
                    *change.moves.T,
                    slots.bias[: slots.num_used],
                    *self._up_by_slot(slots),
                ]
            )
        hidden = not here.all()  # by the read that follows
        self._move(sources, targets, len(change.moves), hidden)
        biases = bias, up[0] if up else None
        out = self._sum_of(row, self._matrix, kept_rows, card.count(len(kept)), *biases)
        if len(at):
            self._put_landed(held_at, loaded[: len(at)], hidden)
        self._bring(change.load_ids[~here], loaded[len(at) :])
        self._look_ahead()
        if len(places):
            out = out + self._sum_of(row, self._matrix, loaded, card.count(len(places)), *biases)
        clock.loaded += len(places)
        clock.window_trims += change.trimmed
        return out

    def _up_by_slot(self, slots: Slots) -> list[Array]:
        return [] if self.biases.up is None else [self.biases.up[slots.pointer[: slots.num_used]]]

    def _mem(self, hidden: bool) -> AbstractContextManager[None]:
        """Counts what the card is asked for within it: its time, or the host's alone where a read hides that."""
        clock = self.shared.clock
        return clock.time("mem") if hidden else self.card.timed("mem", clock)

    def _move(self, sources: torch.Tensor, targets: torch.Tensor, count: int, hidden: bool) -> None:
        """Close holes: slots to slots."""
        if count:
            with self._mem(hidden):
                move(self.card.machine, self._matrix, self.shared.slot_bytes, sources, targets, self.card.count(count))

    def _put_landed(self, held_at: torch.Tensor, places: torch.Tensor, hidden: bool) -> None:
        """What was read ahead, to its slots: all of it in one copy, then those neurons that are needed."""
        card, width, arrived = self.card, self.shared.slot_bytes, self._arrived
        assert arrived is not None
        assert self._matrix is not None
        nbytes = len(arrived.ids) * width
        with self._mem(hidden):
            there = torch.from_numpy(arrived.buffer[:nbytes]).to(card.device, non_blocking=True).view(-1, width)
            rows = self._matrix.view(-1, width)
            rows[places.view(torch.int32).long()] = there[held_at.view(torch.int32).long()]
            self._copied = card.mark()

    # a few tokens, which verify drafts

    def _few(self, rows: torch.Tensor) -> torch.Tensor:
        """Each token's own neurons: those that the window has are not read again, the others once for all tokens. The
        order of sums is not that of tokens that come one by one."""
        shared = self.shared
        if shared.ablation.predictor == "oracle":
            ids = self._true(rows)
        else:
            predictor: Any = self.predictor
            with self.card.span("predictor"):
                lists = [predictor.ids(row) for row in rows]
            ids = self.card.fetch(lists, shared.clock)
        out = torch.zeros_like(rows)
        passes(self, ids, lambda first, own, windows: self._together(rows, out, first, own, windows))
        return out

    def _together(
        self, rows: torch.Tensor, out: torch.Tensor, first: int, ids: list[Array], windows: list[int]
    ) -> None:
        """Tokens, from `first` on, whose neurons the slots hold at the same time."""
        slots, clock, card = self.slots, self.shared.clock, self.card
        assert slots is not None
        self._settle()  # slots and lists of the group before
        with clock.time("mem"):
            changes, load, slot_of = take_in(self, ids, windows)
            places, bias, *rest = card.send(
                [slot_of[load], slots.bias[: slots.num_used], *(slot_of[own] for own in ids),
                 *(part for change in changes for part in change.moves.T), *self._up_by_slot(slots)]
            )  # fmt: skip
        for i, change in enumerate(changes):
            sources, targets = rest[len(ids) + 2 * i :][:2]
            self._move(sources, targets, len(change.moves), bool(len(load)))
        self._bring(load, places)
        biases = bias, None if self.biases.up is None else rest[-1]
        for i, own in enumerate(ids):
            out[first + i] += self._sum_of(rows[first + i], self._matrix, rest[i], card.count(len(own)), *biases)
        clock.loaded += len(load)
        clock.window_trims += sum(change.trimmed for change in changes)

    # every neuron

    def set_slots(self, capacity: int) -> None:
        self._dense_biases = None
        super().set_slots(capacity)

    def _dense_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Every neuron of a few tokens: those that stay resident from the slots, the others through the staging."""
        clock, card, out = self.shared.clock, self.card, torch.zeros_like(rows)
        for matrix, count, bias, up in self._parts():
            for i, row in enumerate(rows):
                out[i] += self._sum_of(row, matrix, card.numbers(count), card.count(count), bias, up)
        clock.predicted += len(rows) * len(self.all_ids)
        clock.in_window += len(self.resident_ids)
        return out

    def _parts(self) -> Iterator[tuple[torch.Tensor, int, torch.Tensor, Any]]:
        """All neurons, in parts: (memory, how many are in its first places, their biases). What reads a part has to be
        asked for before the next part is."""
        blocks = self._blocks(self.other_ids)
        if self._dense_biases is None or self._dense_biases[0] is not self.biases:
            given = [self.biases.first] + ([] if self.biases.up is None else [self.biases.up])
            self._dense_biases = (
                self.biases,
                [[self.card.array(part[ids]) for part in given] for ids in (self.resident_ids, *blocks)],
            )
        (bias, *up), *others = self._dense_biases[1]
        if self._matrix is not None and self.slots is not None:
            yield self._matrix, len(self.resident_ids), bias, up[0] if up else None
        for ids, (bias, *up) in zip(blocks, others, strict=True):
            yield self._block(ids, sequential=True).device, len(ids), bias, up[0] if up else None

    def _block(self, ids: Array, *, sequential: bool) -> Half:
        """Neurons, no more than a half of the staging holds, in its first places, in the stream of the arithmetic."""
        card, clock = self.card, self.shared.clock
        with clock.time("mem"):
            half = card.half()
        self._fetch(ids, self.all_ids[: len(ids)], half.bytes, sequential=sequential)
        clock.loaded += len(ids)
        nbytes = len(ids) * self.shared.slot_bytes
        with clock.time("mem"):  # the copy itself is hidden by the next read
            half.device[:nbytes].copy_(half.host[:nbytes], non_blocking=True)
            half.free = card.mark()
        return half

    # a prompt: many tokens at once

    def _prompt(self, x: torch.Tensor) -> torch.Tensor:
        clock, card, out = self.shared.clock, self.card, torch.zeros_like(x)
        width = self.shared.slot_bytes
        if self.shared.ablation.predictor == "off":
            for matrix, count, bias, up in self._parts():
                card.active.append(self._add_part(x, matrix[: count * width], bias, up, None, out).int()[None])
            clock.predicted += len(x) * len(self.all_ids)
            return out
        mask = self._masks(x)
        host = mask.cpu()
        chosen, on_flash = host.any(0).numpy(), self._on_flash()
        clock.predicted += int(torch.count_nonzero(host))
        self._refill(host)
        first, up, _ = self._biases_there()
        for ids in self._blocks(on_flash[chosen[on_flash]]):
            held = self._block(ids, sequential=False).device
            at = torch.from_numpy(ids).to(card.device).long()
            biases = first[at], None if up is None else up[at]
            card.active.append(self._add_part(x, held[: len(ids) * width], *biases, mask[:, at], out).int()[None])
            self._keep_there(ids, held)
        return out

    def _masks(self, x: torch.Tensor) -> torch.Tensor:
        """bool [tokens, d_ff] on the card: the neurons to compute for each of many tokens."""
        shared = self.shared
        if shared.ablation.predictor == "oracle":
            with shared.clock.wait():
                host = x.cpu()
            found = self._choose_all(host)
            assert found is not None
            return found.to(self.card.device)
        predictor: Any = self.predictor
        with self.card.span("predictor"):
            return predictor.mask(x)

    def _keep_there(self, block: Array, held: torch.Tensor) -> None:
        """Copy those neurons of a block that belong to the window into their slots."""
        slots, width, matrix = self.slots, self.shared.slot_bytes, self._matrix
        assert slots is not None
        assert matrix is not None
        with self.shared.clock.time("mem"):  # the copy itself is hidden by the next read
            at, here = found_in(block, slots.pointer[: slots.num_used])
            if len(at):
                source, target = (torch.from_numpy(part).to(self.card.device) for part in (at, np.flatnonzero(here)))
                matrix.view(-1, width)[target] = held.view(-1, width)[source]
