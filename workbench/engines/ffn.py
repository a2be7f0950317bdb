"""One layer's FFN, run from flash: choose neurons, bring those that are missing, compute (paper, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from workbench.ablation import Ablation
from workbench.dram.slots import Slots
from workbench.engines.few import few_tokens
from workbench.engines.layers import FEW_TOKENS, TORCH_DTYPES, as_tensor
from workbench.engines.prefetch import Arrived, ReadAhead, next_margin
from workbench.engines.prompt import streamed
from workbench.engines.stats import StepClock
from workbench.flash.placement import Placement
from workbench.flash.reader import FlashReader, ReadStats
from workbench.flash.store import Store
from workbench.kernels.ffn import sparse_ffn
from workbench.kernels.linear import linear
from workbench.kernels.predict import predict
from workbench.predictor.low_rank import LayerPredictor
from workbench.spec import RunSpec


@dataclass
class Shared:
    """What all layers of an engine have in common. `scratch` holds neurons on their way through, as slots do. `placed`
    is the open file of `placement`: both there once the ablation has asked for it. `ahead`: there with prefetch.
    `window_end`: of a few tokens at once, the one that the window is to end at, counted from 1; 0 for the last.
    `prompt`: how the neurons of the prompt that is being taken are read."""

    store: Store
    run: RunSpec
    clock: StepClock
    ablation: Ablation
    reader: FlashReader
    bundled: int
    split: int
    scratch: np.ndarray[Any, Any]
    slot_bytes: int
    threads: int
    placed: int | None = None
    placement: Placement | None = None
    ahead: ReadAhead | None = None
    ffns: list[FlashFFN] = field(default_factory=list)
    window_end: int = 0
    prompt: str = "union"


class PackedPredictor:
    """A layer's predictor as the kernels take it, in its stored dtype."""

    def __init__(self, layer: LayerPredictor):
        self.a, self.b = layer.packed()
        self.bias, self.threshold = np.ascontiguousarray(layer.bias, np.float32), layer.threshold
        self.dtype, self.scales = layer.stored, (layer.a_scale, layer.b_scale)

    def ids(self, x: np.ndarray[Any, Any], threads: int, margin: float = 0.0) -> np.ndarray[Any, Any]:
        """Sorted int32 ids predicted for one token's input [d_model], `margin` above the threshold."""
        a_scale, b_scale = self.scales
        return predict(
            x, self.a, self.b, self.bias, self.threshold + margin, self.dtype, threads, a_scale=a_scale, b_scale=b_scale
        )

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """Bool [tokens, d_ff], the neurons predicted for each token's input [tokens, d_model].

        The factors are widened for the time of the call, which pays where there are many tokens.
        """
        a_scale, b_scale = (None if scale is None else torch.from_numpy(scale) for scale in self.scales)
        hidden = x @ widened(torch.from_numpy(self.a), a_scale).T
        scores = torch.addmm(torch.from_numpy(self.bias), hidden, widened(torch.from_numpy(self.b), b_scale).T)
        return scores > self.threshold


class Biases(NamedTuple):
    """Of one layer's FFN: `first` float32 [d_ff], of the row that the activation sits on; `up` float32 [d_ff] of a
    gated FFN's up row, or None; `down` float32 [d_model] or None."""

    first: np.ndarray[Any, Any]
    up: np.ndarray[Any, Any] | None
    down: np.ndarray[Any, Any] | None


class FlashFFN(nn.Module):
    """The FFN of one layer with its neurons on flash. x: float32 [tokens, d_model].

    out = sum over active neurons of f(z) * down, z the pre-activation; in a gated FFN also times (up.x + its bias).
    """

    def __init__(self, shared: Shared, layer: int, biases: Biases):
        super().__init__()
        self.shared, self.layer, self.biases = shared, layer, biases
        spec = shared.store.spec
        self.gated, self.squared, self.threshold = spec.gated, spec.activation == "relu2", spec.threshold(layer)
        self.predictor: PackedPredictor | None = None
        self.slots: Slots | None = None
        self.all_ids = np.arange(spec.d_ff, dtype=np.int32)
        self.resident_ids = self.all_ids[:0]  # in the slots for good, neuron i in slot i (hybrid without a predictor)
        self.other_ids = self.all_ids  # the others, in the order in which they lie on flash
        self.norm: Callable[[torch.Tensor], torch.Tensor] = lambda h: h  # what makes its input of the residual stream
        self.residual: torch.Tensor | None = None  # that stream [..., d_model], of the present token
        self.margin = 0.0  # how sure a neuron must be to be read ahead
        self._arrived: Arrived | None = None
        self._unused = np.zeros(0, bool)  # of what arrived
        self._last_part = True  # of the present token's neurons, where the slots do not hold them all
        self._looked = 0.0  # the token for which the next layer's neurons were guessed, by when it began

    def set_slots(self, capacity: int) -> None:
        """New, empty slots; without a predictor they are filled with the first neurons, to stay."""
        shared = self.shared
        on_flash = self._on_flash()
        self.slots, self.resident_ids, self.other_ids = None, self.all_ids[:0], on_flash
        if capacity:
            self.slots = self._new_slots(capacity)
        if self.slots is not None and shared.ablation.predictor == "off":
            ids = np.sort(on_flash[:capacity])
            self._fill(ids, self.slots)
            self.slots.update(ids, 0)
            self.resident_ids, self.other_ids = ids, on_flash[capacity:]

    def _new_slots(self, capacity: int) -> Slots:
        return Slots(self.shared.store.spec.d_ff, capacity, self.shared.slot_bytes, self.biases.first)

    def _fill(self, ids: np.ndarray[Any, Any], slots: Slots) -> None:
        """Bring neurons into the first slots."""
        self._fetch(ids, self.all_ids[: len(ids)], slots.matrix, sequential=True)

    def _on_flash(self) -> np.ndarray[Any, Any]:
        """All neurons, in the order in which they lie in the file that is read."""
        placement = self.shared.placement
        return placement.order[self.layer] if self.shared.ablation.placement and placement else self.all_ids

    def clear(self) -> None:
        """Forget the window (not what is resident)."""
        if self.slots is not None and self.shared.ablation.predictor != "off":
            self.slots.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.shared.prompt == "dense" and self.shared.ablation.predictor != "off":
            out = self._prompt(rows)
        else:
            out = self._token(rows[0])[None] if len(rows) == 1 else self._several(rows)
        if self.biases.down is not None:
            out += torch.from_numpy(self.biases.down)
        return out.view(x.shape)

    # one token

    def _token(self, row: torch.Tensor) -> torch.Tensor:
        x = np.ascontiguousarray(row.numpy())
        out = np.zeros_like(x)
        if self.shared.ablation.predictor == "off":
            self._dense(x, out)
        else:
            self._sparse(x, self._choose(x), out)
        return torch.from_numpy(out)

    def _choose(self, x: np.ndarray[Any, Any], margin: float = 0.0) -> np.ndarray[Any, Any]:
        """The neurons to compute for one token, sorted; with a margin, only those that the predictor is surer of."""
        shared, clock = self.shared, self.shared.clock
        if shared.ablation.predictor == "oracle":
            return self.firing(x[None])[0]
        assert self.predictor is not None
        with clock.time("predictor"):
            return self.predictor.ids(x, shared.threads, margin)

    def firing(self, x: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The neurons that fire, sorted int32, for each of some tokens' inputs float32 [t, d_model] (oracle)."""
        shared = self.shared
        with shared.clock.time("oracle"):
            rows = np.ascontiguousarray(shared.store.activated_rows(self.layer))
            z = linear(x, rows, self.biases.first, shared.store.dtype, shared.threads)
            return [np.flatnonzero(own > self.threshold).astype(np.int32) for own in z]

    def _sparse(self, x: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Compute the neurons `ids`, bringing those that the window lacks."""
        for part in self._parts_of(ids):
            self._pass(x, part, out)

    def _parts_of(self, ids: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        """One token's neurons, as many at once as the slots hold, none of them left out: each part is brought and
        computed before the next is asked for."""
        shared, slots = self.shared, self.slots
        assert slots is not None
        shared.clock.predicted += len(ids)
        if not shared.ablation.windowing:
            slots.clear()
        self._take_ahead()
        for at in range(0, max(1, len(ids)), slots.capacity):
            self._last_part = at + slots.capacity >= len(ids)
            yield ids[at : at + slots.capacity]
        self._settle_ahead()
        shared.clock.in_window += slots.num_used

    @property
    def _window(self) -> int:
        return self.shared.run.window if self.shared.ablation.windowing else 0

    def _pass(self, x: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        slots, clock = self.slots, self.shared.clock
        assert slots is not None
        with clock.time("mem"):
            change = slots.update(ids, self._window)
            at, here = self._landed(change.load_ids)
            if len(at):
                self._copy_landed(at, change.load_slots[here])
        self._fetch(change.load_ids[~here], change.load_slots[~here], slots.matrix, sequential=False)
        self._look_ahead()
        clock.loaded += len(change.load_ids)
        clock.window_trims += change.trimmed
        clock.active += self._compute(x, slots.matrix, change.rows, slots.bias, slots.pointer, out)

    # reading ahead

    def _take_ahead(self) -> None:
        """Wait for what was read ahead for this layer."""
        clock, ahead = self.shared.clock, self.shared.ahead
        with clock.time("io"):
            self._arrived = None if ahead is None else ahead.take()
        if self._arrived is None:
            return
        stats = self._arrived.stats
        clock.seconds["hidden_io"] += self._arrived.hidden_s
        clock.read_bytes += stats.read_bytes
        clock.reads += stats.reads
        clock.prefetched += len(self._arrived.ids)
        self._unused = np.ones(len(self._arrived.ids), bool)

    def _landed(self, ids: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Which of the sorted `ids` were read ahead: their places in the buffer, and a bool mask of `ids`."""
        if self._arrived is None:
            return self.all_ids[:0], np.zeros(len(ids), bool)
        at, here = found_in(self._arrived.ids, ids)
        self._unused[at] = False
        return at, here

    def _copy_landed(self, at: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> None:
        """From places of the buffer of what was read ahead to slots."""
        assert self._arrived is not None
        assert self.slots is not None
        width = self.shared.slot_bytes
        held = self._arrived.buffer[: len(self._arrived.buffer) // width * width].reshape(-1, width)
        self.slots.matrix.reshape(-1, width)[places] = held[at]

    def _settle_ahead(self) -> None:
        """Count what was read for nothing: of a read's bytes, the share of the neurons that were not needed."""
        if self._arrived is not None:
            clock, unused = self.shared.clock, int(np.count_nonzero(self._unused))
            clock.wasted += unused
            self.margin = next_margin(self.margin, self._arrived, unused)
            clock.wasted_bytes += self._arrived.stats.read_bytes * unused // len(self._unused)
            self._arrived = None

    @property
    def _following(self) -> FlashFFN | None:
        """The next layer's FFN."""
        ffns = self.shared.ffns
        return ffns[self.layer + 1] if self.layer + 1 < len(ffns) else None

    def _look_ahead(self) -> None:
        """Begin to read what the next layer is likely to need, once a token: when nothing is taken from the buffer any
        more."""
        ahead, following = self.shared.ahead, self._following
        if (
            not self._last_part
            or ahead is None
            or following is None
            or self.residual is None
            or self._looked == self.shared.clock.began
        ):
            return
        self._looked = self.shared.clock.began
        ids = self._guessed(following)
        with self.shared.clock.time("mem"):
            assert following.slots is not None
            ids = following.slots.missing(ids, self._window)
        ahead.start(ids, following.read_ahead)

    def _guessed(self, following: FlashFFN) -> np.ndarray[Any, Any]:
        """The neurons that the next layer would compute if nothing were added to the residual stream before it,
        sorted."""
        assert self.residual is not None
        x = following.norm(self.residual).numpy().reshape(-1)
        return following._choose(np.ascontiguousarray(x), following.margin)

    def read_ahead(self, ids: np.ndarray[Any, Any], buffer: np.ndarray[Any, Any]) -> ReadStats:
        """Bring neurons into the first places of a buffer. Any thread may call it while no setting is changed."""
        return self._read(ids, self.all_ids[: len(ids)], buffer, sequential=False)

    def _compute(
        self,
        x: np.ndarray[Any, Any],
        matrix: np.ndarray[Any, Any],
        rows: np.ndarray[Any, Any],
        bias: np.ndarray[Any, Any],
        ids: np.ndarray[Any, Any],
        out: np.ndarray[Any, Any],
    ) -> int:
        """Add the neurons in the slots `rows` of `matrix` to out; how many were active. bias, ids: by slot."""
        shared = self.shared
        return sparse_ffn(
            x, matrix, shared.slot_bytes, rows, bias, shared.store.dtype, out, shared.threads,
            gated=self.gated, activation="relu2" if self.squared else "relu", threshold=self.threshold,
            up_bias=None if self.biases.up is None else self.biases.up[ids],
        )  # fmt: skip

    def _dense(self, x: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Every neuron: those that stay resident from the slots, the others through the scratch."""
        clock = self.shared.clock
        if self.slots is not None:
            ids, places = self.resident_ids, self.all_ids[: len(self.resident_ids)]
            clock.active += self._compute(x, self.slots.matrix, places, self.biases.first[ids], ids, out)
        for ids in self._blocks(self.other_ids):
            places = self.all_ids[: len(ids)]
            self._fetch(ids, places, self.shared.scratch, sequential=True)
            clock.loaded += len(ids)
            clock.active += self._compute(x, self.shared.scratch, places, self.biases.first[ids], ids, out)
        clock.predicted += len(self.all_ids)
        clock.in_window += len(self.resident_ids)

    def _several(self, rows: torch.Tensor) -> torch.Tensor:
        return few_tokens(self, rows) if len(rows) <= FEW_TOKENS else self._prompt(rows)

    # a prompt: many tokens at once

    def _prompt(self, x: torch.Tensor) -> torch.Tensor:
        """The neurons of all tokens together, each read once; each token uses its own neurons only, or all of them
        where all are read (`RunSpec.prompt_neurons`)."""
        shared, clock = self.shared, self.shared.clock
        out = torch.zeros_like(x)
        # where all are read, the last tokens' are still chosen: they are what the window has
        mask = kept = self._choose_all(x[-(self._window + 1) :] if shared.prompt == "dense" else x)
        ids, resident = self.other_ids, self.resident_ids
        if kept is not None:
            chosen, on_flash = kept.any(0).numpy(), self._on_flash()
            mask = None if streamed(self, kept) else kept
            ids, resident = on_flash if mask is None else on_flash[chosen[on_flash]], self.all_ids[:0]
            self._refill(kept)
        clock.predicted += len(x) * len(self.all_ids) if mask is None else int(torch.count_nonzero(mask))
        if len(resident) and self.slots is not None:
            self._add(x, resident, self.slots.matrix, None, out)
        for block in self._blocks(ids):
            self._fetch(block, self.all_ids[: len(block)], shared.scratch, sequential=mask is None)
            clock.loaded += len(block)
            self._add(x, block, shared.scratch, mask, out)
            if kept is not None:
                self._keep(block)
        return out

    def _choose_all(self, x: torch.Tensor) -> torch.Tensor | None:
        """The neurons to compute for each of many tokens, bool [tokens, d_ff]; None for all."""
        shared, clock = self.shared, self.shared.clock
        if shared.ablation.predictor == "off":
            return None
        if shared.ablation.predictor == "oracle":
            with clock.time("oracle"):
                rows = as_tensor(shared.store.activated_rows(self.layer), shared.store.dtype).float()
                return torch.addmm(torch.from_numpy(self.biases.first), x, rows.T) > self.threshold
        assert self.predictor is not None
        with clock.time("predictor"):
            return self.predictor.mask(x)

    def _add(
        self,
        x: torch.Tensor,
        ids: np.ndarray[Any, Any],
        matrix: np.ndarray[Any, Any],
        mask: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Add the part of `ids`, which are in the first slots of `matrix`, to out [tokens, d_model]."""
        first, up = (None if part is None else torch.from_numpy(part[ids]) for part in self.biases[:2])
        assert first is not None
        own = None if mask is None else mask[:, torch.from_numpy(ids)]
        held = torch.from_numpy(matrix[: len(ids) * self.shared.slot_bytes])
        self.shared.clock.active += int(self._add_part(x, held, first, up, own, out))

    def _add_part(
        self,
        x: torch.Tensor,
        held: torch.Tensor,
        first: torch.Tensor,
        up_bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Add the part of the neurons whose records are in `held`, uint8 [n * slot_bytes], to out [tokens, d_model];
        returns how many were active. first, up_bias: float32 [n]. mask: bool [tokens, n], or None for all."""
        d, dtype = x.shape[1], TORCH_DTYPES[self.shared.store.dtype]
        slots = held.view(dtype).view(len(first), -1)
        rows = [slots[:, i * d : (i + 1) * d].float() for i in range(3 if self.gated else 2)]
        z = torch.addmm(first, x, rows[-2].T)
        chosen = ~(z <= self.threshold)  # true of NaN, which has to show
        if mask is not None:
            chosen &= mask
        # where() and not a product: a neuron that is left out counts for nothing, finite or not
        hidden = torch.where(chosen, z, 0.0)
        if self.squared:
            hidden = hidden.square_()
        if self.gated:
            up = x @ rows[0].T
            if up_bias is not None:
                up += up_bias
            hidden *= up
        out.addmm_(hidden, rows[-1])
        return torch.count_nonzero(chosen)

    def _refill(self, mask: torch.Tensor) -> None:
        """Set the window to the last tokens of a prompt; `_keep` copies their neurons as they pass by."""
        slots, shared = self.slots, self.shared
        assert slots is not None
        with shared.clock.time("mem"):
            slots.clear()
            seen = mask[: shared.window_end or len(mask)]
            kept = seen[-(shared.run.window + 1) :].numpy() if shared.ablation.windowing else []
            last = [np.flatnonzero(row).astype(np.int32) for row in kept]
            if any(len(ids) > slots.capacity for ids in last):
                return
            for ids in last:
                shared.clock.window_trims += slots.update(ids, shared.run.window).trimmed

    def _keep(self, block: np.ndarray[Any, Any]) -> None:
        """Copy those neurons of a block in the scratch that belong to the window."""
        slots, shared = self.slots, self.shared
        assert slots is not None
        with shared.clock.time("mem"):
            at, here = found_in(block, slots.pointer[: slots.num_used])
            width = shared.slot_bytes
            target = slots.matrix.reshape(-1, width)
            target[np.flatnonzero(here)] = shared.scratch[: len(block) * width].reshape(-1, width)[at]

    # flash

    def _blocks(self, ids: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Neurons, given as they lie on flash, as many at once as the scratch holds; each block is sorted by id."""
        size = len(self.shared.scratch) // self.shared.slot_bytes
        return [np.sort(ids[at : at + size]) for at in range(0, len(ids), size)]

    def _fetch(
        self, ids: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], matrix: np.ndarray[Any, Any], *, sequential: bool
    ) -> None:
        """Bring neurons `ids` into `slots` of `matrix`; counted as io. `sequential`: they are neighbours on flash."""
        if not len(ids):
            return
        clock = self.shared.clock
        with clock.time("io"):
            stats = self._read(ids, slots, matrix, sequential=sequential)
        clock.read_bytes += stats.read_bytes
        clock.reads += stats.reads

    def _read(
        self, ids: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], matrix: np.ndarray[Any, Any], *, sequential: bool
    ) -> ReadStats:
        shared = self.shared
        gap = 0 if sequential else shared.run.coalesce_gap_bytes if shared.ablation.coalesce else -1
        handle, offsets, lengths, destinations = self._requests(ids, slots)
        return shared.reader.read(handle, offsets, lengths, matrix, destinations, gap)

    def _requests(self, ids: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> tuple[int, Any, Any, Any]:
        store, layout, width = self.shared.store, self.shared.store.layout, self.shared.slot_bytes
        where, neurons = slots.astype(np.int64) * width, ids.astype(np.int64)
        if self.shared.ablation.bundling:
            in_place = width == layout.bundle_stride
            lengths = np.full(len(ids), layout.bundle_stride if in_place else layout.record_bytes)
            handle, at = self.shared.bundled, neurons
            if self.shared.ablation.placement:
                assert self.shared.placed is not None
                assert self.shared.placement is not None
                handle, at = self.shared.placed, self.shared.placement.positions[self.layer][neurons]
                rank = np.argsort(at)  # a reader that does not merge takes them as they are given
                at, where = at[rank], where[rank]
            return handle, store.bundled_offset(self.layer) + at * layout.bundle_stride, lengths, where
        parts = range(layout.parts)
        offsets = [store.split_offset(self.layer, part) + neurons * layout.row_stride for part in parts]
        order = layout.record_order()
        places = [where + order.index(part) * layout.row_bytes for part in parts]
        lengths = np.full(layout.parts * len(ids), layout.row_bytes)
        return self.shared.split, np.concatenate(offsets), lengths, np.concatenate(places)


def found_in(
    known: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Which of `ids` are in the sorted `known`, which is not empty: their places there, and a bool mask of `ids`."""
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    here = known[at] == ids
    return at[here], here


def widened(factor: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """A predictor's factor as float32 [rows, columns]; `scale` by row, of 8-bit factors."""
    wide = factor.float()
    return wide if scale is None else wide * scale[:, None]
