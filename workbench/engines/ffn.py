"""One layer's FFN, run from flash: choose neurons, bring those that are missing, compute (paper, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.ablation import Ablation
from workbench.dram.slots import Slots
from workbench.engines.layers import TORCH_DTYPES
from workbench.engines.stats import StepClock
from workbench.flash.reader import FlashReader
from workbench.flash.store import Store
from workbench.kernels.ffn import sparse_ffn
from workbench.kernels.linear import linear
from workbench.kernels.predict import predict
from workbench.predictor.low_rank import LayerPredictor
from workbench.spec import RunSpec


@dataclass
class Shared:
    """What all layers of an engine have in common. `scratch` holds neurons on their way through, as slots do."""

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


class PackedPredictor:
    """A layer's predictor as the kernels take it, in its stored dtype."""

    def __init__(self, layer: LayerPredictor):
        self.a, self.b = layer.packed()
        self.bias, self.threshold = np.ascontiguousarray(layer.bias, np.float32), layer.threshold
        self.dtype = layer.stored

    def ids(self, x: np.ndarray[Any, Any], threads: int) -> np.ndarray[Any, Any]:
        """Sorted int32 ids predicted for one token's input [d_model]."""
        return predict(x, self.a, self.b, self.bias, self.threshold, self.dtype, threads)


class FlashFFN(nn.Module):
    """fc2(relu(fc1(x))) of one layer with its neurons on flash. x: float32 [tokens, d_model]."""

    def __init__(self, shared: Shared, layer: int, up_bias: np.ndarray[Any, Any], down_bias: torch.Tensor | None):
        super().__init__()
        self.shared, self.layer = shared, layer
        self.up_bias, self.down_bias = up_bias, down_bias
        self.predictor: PackedPredictor | None = None
        self.slots: Slots | None = None
        self.resident = 0  # neurons 0 .. resident-1 are in the slots for good (hybrid without a predictor)
        self.all_ids = np.arange(len(up_bias), dtype=np.int32)

    def set_bias(self, up_bias: np.ndarray[Any, Any], down_bias: torch.Tensor | None) -> None:
        self.up_bias, self.down_bias = up_bias, down_bias

    def set_slots(self, capacity: int) -> None:
        """New, empty slots; without a predictor they are filled with the first neurons, to stay."""
        shared = self.shared
        self.slots, self.resident = None, 0
        if capacity:
            self.slots = Slots(shared.store.spec.d_ff, capacity, shared.slot_bytes, self.up_bias)
        if capacity and shared.ablation.predictor == "off":
            self._fetch(self.all_ids[:capacity], self.all_ids[:capacity], self.slots.matrix, sequential=True)  # type: ignore[union-attr]
            self.slots.update(self.all_ids[:capacity], 0)  # type: ignore[union-attr]
            self.resident = capacity

    def clear(self) -> None:
        """Forget the window (not what is resident)."""
        if self.slots is not None and self.shared.ablation.predictor != "off":
            self.slots.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = self._token(rows[0])[None] if len(rows) == 1 else self._prompt(rows)
        if self.down_bias is not None:
            out += self.down_bias.float()
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

    def _choose(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The neurons to compute for one token, sorted."""
        shared, clock = self.shared, self.shared.clock
        if shared.ablation.predictor == "oracle":
            with clock.time("oracle"):
                up = np.ascontiguousarray(shared.store.up_rows(self.layer))
                z = linear(x[None], up, self.up_bias, shared.store.dtype, shared.threads)[0]
                return np.flatnonzero(z > 0).astype(np.int32)
        assert self.predictor is not None
        with clock.time("predictor"):
            return self.predictor.ids(x, shared.threads)

    def _sparse(self, x: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Compute the neurons `ids`, bringing those that the window lacks."""
        shared, slots = self.shared, self.slots
        assert slots is not None
        shared.clock.predicted += len(ids)
        if not shared.ablation.windowing:
            slots.clear()
        window = shared.run.window if shared.ablation.windowing else 0
        # More than the slots hold: in passes, none of them left out.
        for at in range(0, max(1, len(ids)), slots.capacity):
            self._pass(x, ids[at : at + slots.capacity], window, out)
        shared.clock.in_window += slots.num_used

    def _pass(self, x: np.ndarray[Any, Any], ids: np.ndarray[Any, Any], window: int, out: np.ndarray[Any, Any]) -> None:
        shared, slots, clock = self.shared, self.slots, self.shared.clock
        assert slots is not None
        with clock.time("mem"):
            change = slots.update(ids, window)
        try:
            self._fetch(change.load_ids, change.load_slots, slots.matrix, sequential=False)
        except BaseException:
            slots.clear()  # the table names neurons that never arrived
            raise
        clock.loaded += len(change.load_ids)
        clock.window_trims += change.trimmed
        clock.active += sparse_ffn(
            x, slots.matrix, slots.slot_bytes, change.rows, slots.bias, shared.store.dtype, out, shared.threads
        )

    def _dense(self, x: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Every neuron: those that stay resident from the slots, the others through the scratch."""
        shared, clock = self.shared, self.shared.clock
        if self.slots is not None:
            clock.active += sparse_ffn(
                x, self.slots.matrix, shared.slot_bytes, self.all_ids[: self.resident], self.up_bias[: self.resident],
                shared.store.dtype, out, shared.threads,
            )  # fmt: skip
        for ids in self._blocks(self.all_ids[self.resident :]):
            self._fetch(ids, self.all_ids[: len(ids)], shared.scratch, sequential=True)
            clock.loaded += len(ids)
            clock.active += sparse_ffn(
                x, shared.scratch, shared.slot_bytes, self.all_ids[: len(ids)], self.up_bias[ids],
                shared.store.dtype, out, shared.threads,
            )  # fmt: skip
        clock.predicted += len(self.all_ids)
        clock.in_window += self.resident

    # a prompt: many tokens at once

    def _prompt(self, x: torch.Tensor) -> torch.Tensor:
        """The neurons of all tokens together, each read once; each token uses its own neurons only."""
        shared, clock = self.shared, self.shared.clock
        out = torch.zeros_like(x)
        if shared.ablation.predictor == "off":
            chosen, ids = None, self.all_ids
        else:
            chosen = [self._choose(row) for row in np.ascontiguousarray(x.numpy())]
            ids = np.unique(np.concatenate(chosen)).astype(np.int32)
            clock.predicted += sum(len(c) for c in chosen)
            self._refill(chosen)
        resident = ids[: self.resident] if chosen is None else ids[:0]
        if len(resident) and self.slots is not None:
            self._add(x, resident, self.slots.matrix, None, out)
        rest = ids[len(resident) :]
        for block in self._blocks(rest):
            self._fetch(block, self.all_ids[: len(block)], shared.scratch, sequential=chosen is None)
            clock.loaded += len(block)
            self._add(x, block, shared.scratch, chosen, out)
            if chosen is not None:
                self._keep(block)
        return out

    def _add(
        self,
        x: torch.Tensor,
        ids: np.ndarray[Any, Any],
        matrix: np.ndarray[Any, Any],
        chosen: list[np.ndarray[Any, Any]] | None,
        out: torch.Tensor,
    ) -> None:
        """Add the part of `ids`, which are in the first slots of `matrix`, to out [tokens, d_model]."""
        d, dtype = x.shape[1], TORCH_DTYPES[self.shared.store.dtype]
        slots = torch.from_numpy(matrix[: len(ids) * self.shared.slot_bytes]).view(dtype).view(len(ids), -1)
        z = x @ slots[:, :d].float().T + torch.from_numpy(self.up_bias[ids])
        hidden = z.relu_()
        if chosen is not None:
            mask = np.zeros((len(x), len(self.all_ids)), np.bool_)
            for token, own in enumerate(chosen):
                mask[token, own] = True
            hidden *= torch.from_numpy(mask[:, ids])
        self.shared.clock.active += int(torch.count_nonzero(hidden))
        out += hidden @ slots[:, d : 2 * d].float()

    def _refill(self, chosen: list[np.ndarray[Any, Any]]) -> None:
        """Set the window to the last tokens of a prompt; `_keep` copies their neurons as they pass by."""
        slots, shared = self.slots, self.shared
        assert slots is not None
        with shared.clock.time("mem"):
            slots.clear()
            last = chosen[-(shared.run.window + 1) :] if shared.ablation.windowing else []
            if any(len(ids) > slots.capacity for ids in last):
                return
            for ids in last:
                shared.clock.window_trims += slots.update(ids, shared.run.window).trimmed

    def _keep(self, block: np.ndarray[Any, Any]) -> None:
        """Copy those neurons of a block in the scratch that belong to the window."""
        slots, shared = self.slots, self.shared
        assert slots is not None
        with shared.clock.time("mem"):
            used = slots.pointer[: slots.num_used]
            at = np.minimum(np.searchsorted(block, used), len(block) - 1)
            here = block[at] == used
            width = shared.slot_bytes
            target = slots.matrix.reshape(-1, width)
            target[np.flatnonzero(here)] = shared.scratch[: len(block) * width].reshape(-1, width)[at[here]]

    # flash

    def _blocks(self, ids: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        size = len(self.shared.scratch) // self.shared.slot_bytes
        return [ids[at : at + size] for at in range(0, len(ids), size)]

    def _fetch(
        self, ids: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], matrix: np.ndarray[Any, Any], *, sequential: bool
    ) -> None:
        """Bring neurons `ids` into `slots` of `matrix`; counted as io. `sequential`: they are neighbours on flash."""
        if not len(ids):
            return
        shared, clock = self.shared, self.shared.clock
        gap = 0 if sequential else shared.run.coalesce_gap_bytes if shared.ablation.coalesce else -1
        with clock.time("io"):
            handle, offsets, lengths, destinations = self._requests(ids, slots)
            stats = shared.reader.read(handle, offsets, lengths, matrix, destinations, gap)
        clock.read_bytes += stats.read_bytes
        clock.reads += stats.reads

    def _requests(self, ids: np.ndarray[Any, Any], slots: np.ndarray[Any, Any]) -> tuple[int, Any, Any, Any]:
        store, layout, width = self.shared.store, self.shared.store.layout, self.shared.slot_bytes
        where, neurons = slots.astype(np.int64) * width, ids.astype(np.int64)
        if self.shared.ablation.bundling:
            in_place = width == layout.bundle_stride
            lengths = np.full(len(ids), layout.bundle_stride if in_place else layout.record_bytes)
            return (
                self.shared.bundled,
                store.bundled_offset(self.layer) + neurons * layout.bundle_stride,
                lengths,
                where,
            )
        parts = range(layout.parts)
        offsets = [store.split_offset(self.layer, part) + neurons * layout.row_stride for part in parts]
        places = [where + part * layout.row_bytes for part in parts]
        lengths = np.full(layout.parts * len(ids), layout.row_bytes)
        return self.shared.split, np.concatenate(offsets), lengths, np.concatenate(places)
