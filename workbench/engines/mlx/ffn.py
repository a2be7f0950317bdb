"""One layer's FFN, run from flash, with its arithmetic in MLX (paper, section 3 and appendix C)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.dram.slots import Slots
from workbench.engines.ffn import Biases, FlashFFN, Shared, found_in
from workbench.engines.mlx.device import as_numpy
from workbench.engines.mlx.weights import shared_bytes
from workbench.kernels.metal.kernel import Machine
from workbench.kernels.metal.predictor import predict
from workbench.kernels.metal.slots import insert, move
from workbench.kernels.metal.sparse_ffn import SMALLEST, Record, sparse_ffn
from workbench.predictor.low_rank import LayerPredictor

if TYPE_CHECKING:
    import mlx.core as mx

TIMED = 3
"""Runs of a predictor when it is timed by itself."""


class CpuFFN(FlashFFN):
    """The FFN of the CPU engine, between arrays of MLX: the slots and the kernels are the very same."""

    def run(self, x: mx.array) -> mx.array:
        """float32 [tokens, d_model] to the same."""
        import mlx.core as mx

        mx.eval(x)
        return mx.array(self(torch.from_numpy(np.ascontiguousarray(as_numpy(x)))).numpy())


@dataclass
class Gpu:
    """What the layers of an engine share on a GPU. in_place: the reader writes to the memory that the GPU computes on
    (Metal); else records are copied there. lazy: whether the machine's kernels can be compiled by MLX. scratch: the
    bytes of Shared.scratch as MLX has them: the very same where in_place, else a copy. active: counts of neurons that
    fired, not yet read."""

    machine: Machine
    in_place: bool
    lazy: bool = True
    scratch: mx.array | None = None
    scratch_view: np.ndarray[Any, Any] | None = None
    active: list[mx.array] = field(default_factory=list)
    compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    def call(self, key: Any, function: Callable[..., Any], *arrays: Any) -> Any:
        """function(*arrays), its graph built once for all calls of that key: building it anew takes longer than many a
        kernel runs."""
        import mlx.core as mx

        if not self.lazy:
            return function(*arrays)
        if key not in self.compiled:
            self.compiled[key] = mx.compile(function)
        return self.compiled[key](*arrays)


class Written:
    """A small array that the CPU writes and the GPU reads, without a new one for each token.

    It is written while nothing that reads it is under way: each layer has its own, and each token waits for its lists.
    """

    def __init__(self, count: int, kind: type) -> None:
        import mlx.core as mx

        self.array = mx.array(np.zeros(max(count, SMALLEST), kind))
        mx.eval(self.array)
        self.view: np.ndarray[Any, Any] = np.array(self.array, copy=False)


class Rows:
    """The slots that a kernel is to take, and how many they are."""

    def __init__(self, capacity: int) -> None:
        self.rows, self.count = Written(capacity, np.uint32), Written(1, np.uint32)

    def set(self, rows: np.ndarray[Any, Any]) -> tuple[mx.array, mx.array]:
        """The two arrays, holding `rows`."""
        self.rows.view[: len(rows)] = rows
        self.count.view[0] = len(rows)
        return self.rows.array, self.count.array


class GpuPredictor:
    """A layer's predictor in the GPU's memory."""

    def __init__(self, layer: LayerPredictor, gpu: Gpu):
        machine, (a, b) = gpu.machine, layer.packed()
        self.dtype = layer.stored
        self.a, self.b = machine.array(a, self.dtype), machine.array(b, self.dtype)
        self.bias = machine.array(np.ascontiguousarray(layer.bias, np.float32), "float32")
        self.threshold = machine.array(np.array([layer.threshold], np.float32), "float32")
        self.scales = [
            None if scale is None else machine.array(scale, "float32") for scale in (layer.a_scale, layer.b_scale)
        ]
        self._gpu = gpu
        self.ms: float | None = None
        """What it takes for one token; None until it has been timed."""

    def ids(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """(sorted ids uint32 [d_ff], how many of them count uint32 [1]) for one token's input [d_model]."""
        dtype, machine = self.dtype, self._gpu.machine

        def lists(x: Any, a: Any, b: Any, bias: Any, threshold: Any, *scales: Any) -> Any:
            a_scale, b_scale = scales or (None, None)
            return predict(machine, x, a, b, bias, threshold, dtype=dtype, a_scale=a_scale, b_scale=b_scale)

        scales = [scale for scale in self.scales if scale is not None]
        return self._gpu.call(
            ("predict", dtype, len(scales)), lists, x, self.a, self.b, self.bias, self.threshold, *scales
        )

    def time(self, x: mx.array) -> float:
        """Milliseconds for one token, the median of some runs that are waited for."""
        import mlx.core as mx

        if self.ms is None:
            mx.eval(x, *self.ids(x))
            times = []
            for _ in range(TIMED):
                began = time.perf_counter()
                mx.eval(*self.ids(x))
                times.append(1000 * (time.perf_counter() - began))
            self.ms = float(np.median(times))
        return self.ms

    def mask(self, x: mx.array) -> mx.array:
        """bool [tokens, d_ff], the neurons predicted for each token's input [tokens, d_model]."""
        import mlx.core as mx

        hidden = x @ self._widened(self.a, self.scales[0]).T
        scores = hidden @ self._widened(self.b, self.scales[1]).T + self.bias
        return mx.logical_not(scores <= self.threshold)  # true of NaN, which has to show

    @staticmethod
    def _widened(factor: mx.array, scale: mx.array | None) -> mx.array:
        import mlx.core as mx

        wide = factor.astype(mx.float32)
        return wide if scale is None else wide * scale[:, None]


class GpuFFN(FlashFFN):
    """The FFN of one layer, its slots in the GPU's memory.

    For a token, the GPU is waited for once: for the list of predicted neurons. While flash is read, it computes those
    neurons that the window holds. What depends on the number of neurons is data: nothing is compiled or allocated anew.
    """

    def __init__(self, shared: Shared, layer: int, biases: Biases, gpu: Gpu):
        super().__init__(shared, layer, biases)
        self.gpu = gpu
        spec = shared.store.spec
        self.record = Record(spec.d_model, shared.store.dtype, shared.slot_bytes, gated=spec.gated)
        self.matrix: mx.array | None = None  # the slots
        self._limit = gpu.machine.array(np.array([self.threshold], np.float32), "float32")
        self._kept, self._loaded, self._moved = (Rows(0) for _ in range(3))
        self._from = Written(0, np.uint32)
        self._bias, self._up_bias = Written(0, np.float32), Written(0, np.float32)
        self._resident: tuple[Any, ...] = ()
        self._down: tuple[Any, Any] = (None, None)  # the bias as it was given, and as MLX has it

    def run(self, x: mx.array) -> mx.array:
        """float32 [tokens, d_model] to the same."""
        out = self._one(x) if len(x) == 1 else self._many(x)
        if self.biases.down is None:
            return out
        if self._down[0] is not self.biases.down:
            self._down = (self.biases.down, self._array(self.biases.down))
        return out + self._down[1]

    # memory

    def _new_slots(self, capacity: int) -> Slots:
        import mlx.core as mx

        shared, self.matrix, self._resident = self.shared, None, ()
        nbytes = capacity * shared.slot_bytes
        if self.gpu.in_place:
            self.matrix, held = shared_bytes(nbytes)
        else:
            self.matrix, held = mx.zeros([nbytes], mx.uint8), np.zeros(0, np.uint8)
            mx.eval(self.matrix)
        self._kept, self._loaded, self._moved = (Rows(capacity) for _ in range(3))
        self._from = Written(capacity, np.uint32)
        self._bias = Written(capacity, np.float32)
        if self.biases.up is not None:
            self._up_bias = Written(capacity, np.float32)
        by_slot = self._bias.view[:capacity]
        return Slots(shared.store.spec.d_ff, capacity, shared.slot_bytes, self.biases.first, held, by_slot)

    def _fill(self, ids: np.ndarray[Any, Any], slots: Slots) -> None:
        if self.gpu.in_place:
            super()._fill(ids, slots)
        else:
            self._bring(ids, self.all_ids[: len(ids)], None, sequential=True)

    def _bring(
        self, ids: np.ndarray[Any, Any], places: np.ndarray[Any, Any], after: Any, *, sequential: bool = False
    ) -> Any:
        """Neurons from flash to slots by way of the host's scratch; what has to be done before they are read."""
        size = len(self.shared.scratch) // self.shared.slot_bytes
        for at in range(0, len(ids), size):
            part = ids[at : at + size]
            self._fetch(part, self.all_ids[: len(part)], self.shared.scratch, sequential=sequential)
            with self.shared.clock.time("mem"):
                after = self._insert(self._carried(len(part)), places[at : at + size], after)
        return after

    def _carried(self, count: int) -> Any:
        """The first records of the scratch as MLX has them: copied where they are not the same memory."""
        gpu = self.gpu
        assert gpu.scratch is not None
        if not gpu.in_place:
            assert gpu.scratch_view is not None
            nbytes = count * self.shared.slot_bytes
            gpu.scratch_view[:nbytes] = self.shared.scratch[:nbytes]
        return gpu.scratch

    def _insert(self, records: Any, places: np.ndarray[Any, Any], after: Any) -> Any:
        """Copy records to slots, and wait for it: the records may then be overwritten."""
        import mlx.core as mx

        ids, count = self._loaded.set(places)
        width, machine = self.shared.slot_bytes, self.gpu.machine
        most = min(len(ids), records.size // width)  # as many as there may be, however many there are
        done = insert(machine, self.matrix, width, records, ids[:most], count, after)
        mx.eval(done)
        return done

    def _move(self, moves: np.ndarray[Any, Any]) -> Any:
        """Close holes: slots to slots, on the GPU."""
        if not len(moves):
            return None
        target, count = self._moved.set(moves[:, 1])
        self._from.view[: len(moves)] = moves[:, 0]
        return move(self.gpu.machine, self.matrix, self.shared.slot_bytes, self._from.array, target, count)

    def _sum_of(self, x: mx.array, matrix: Any, rows: Any, count: Any, bias: Any, up: Any, order: Any = None) -> Any:
        """[d_model]: the neurons in the first `count` slots of `rows`; biases are by slot."""
        given = {"up_bias": up, "order": order}
        named = [name for name, value in given.items() if value is not None]
        machine, record, activation = self.gpu.machine, self.record, "relu2" if self.squared else "relu"

        def ffn(matrix: Any, rows: Any, count: Any, x: Any, bias: Any, limit: Any, *rest: Any) -> Any:
            return sparse_ffn(
                machine, record, matrix, rows, count, x, bias, limit, activation=activation,
                **dict(zip(named, rest, strict=True)),
            )  # fmt: skip

        out, active = self.gpu.call(
            ("ffn", record, activation, *named), ffn, matrix, rows, count, x, bias, self._limit,
            *(given[name] for name in named),
        )  # fmt: skip
        self.gpu.active.append(active)
        return out

    def _array(self, values: np.ndarray[Any, Any]) -> mx.array:
        return self.gpu.machine.array(np.ascontiguousarray(values, np.float32), "float32")

    def _of(self, ids: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        """(rows, count, bias, up_bias) for the first slots, that hold the neurons `ids`."""
        machine = self.gpu.machine
        rows = machine.array(np.arange(max(len(ids), SMALLEST), dtype=np.uint32), "uint32")
        count = machine.array(np.array([len(ids)], np.uint32), "uint32")
        up = None if self.biases.up is None else self._array(self.biases.up[ids])
        return rows, count, self._array(self.biases.first[ids]), up

    # one token

    def _one(self, x: mx.array) -> mx.array:
        row = x[0]
        if self.shared.ablation.predictor == "off":
            return self._every(row)[None]
        return self._some(row, self._listed(row))[None]

    def _listed(self, row: mx.array) -> np.ndarray[Any, Any]:
        """The neurons to compute for one token, sorted: the one thing that is waited for."""
        import mlx.core as mx

        shared, clock = self.shared, self.shared.clock
        if shared.ablation.predictor == "oracle":
            with clock.wait():
                mx.eval(row)
            return self.firing(np.array(row)[None])[0]
        predictor: Any = self.predictor
        if predictor.ms is None:
            with clock.time("oracle"):  # in no figure: no token of a running pipeline takes it
                predictor.time(row)
        clock.seconds["predictor"] += (predictor.ms or 0.0) / 1000
        ids, count = predictor.ids(row)
        with clock.wait():
            mx.eval(ids, count)
        return np.array(ids)[: int(np.array(count)[0])].astype(np.int32)

    def _some(self, row: mx.array, ids: np.ndarray[Any, Any]) -> mx.array:
        out = None
        for part in self._parts_of(ids):
            if out is not None:
                self._settle(out)  # this turn overwrites slots that the one before reads
            own = self._turn(row, part)
            out = own if out is None else out + own
        assert out is not None
        return out

    def _settle(self, *arrays: mx.array) -> None:
        import mlx.core as mx

        with self.shared.clock.wait():
            mx.eval(*arrays)

    def _turn(self, row: mx.array, ids: np.ndarray[Any, Any]) -> mx.array:
        """As many neurons as the slots hold: those of the window while flash is read, then those that were read."""
        import mlx.core as mx

        slots, clock, in_place = self.slots, self.shared.clock, self.gpu.in_place
        assert slots is not None
        with clock.time("mem"):
            change = slots.update(ids, self._window)
            order = None if in_place else self._move(change.moves)
            kept = self._kept.set(change.rows[~np.isin(ids, change.load_ids, assume_unique=True)])
            if self.biases.up is not None:
                self._up_bias.view[: slots.capacity] = self.biases.up[slots.pointer]
        biases = self._bias.array, None if self.biases.up is None else self._up_bias.array
        out = self._sum_of(row, self.matrix, *kept, *biases, order)
        mx.async_eval(out)
        loaded = len(change.load_ids)
        if loaded:
            if in_place:
                self._fetch(change.load_ids, change.load_slots, slots.matrix, sequential=False)
            else:
                order = self._bring(change.load_ids, change.load_slots, order)
            out = out + self._sum_of(row, self.matrix, *self._loaded.set(change.load_slots), *biases, order)
        clock.loaded += loaded
        clock.window_trims += change.trimmed
        return out

    def _every(self, row: mx.array) -> mx.array:
        """Every neuron: those that stay resident from the slots, the others through the scratch."""
        import mlx.core as mx

        clock, out = self.shared.clock, mx.zeros_like(row)
        if self.slots is not None:
            if not self._resident:
                self._resident = self._of(self.resident_ids)
            out = out + self._sum_of(row, self.matrix, *self._resident)
            mx.async_eval(out)
        for ids in self._blocks(self.other_ids):
            out = out + self._sum_of(row, self._block(ids), *self._of(ids))
            self._settle(out)  # the next block overwrites what this one reads
            clock.loaded += len(ids)
        clock.predicted += len(self.all_ids)
        clock.in_window += len(self.resident_ids)
        return out

    def _block(self, ids: np.ndarray[Any, Any], *, sequential: bool = True) -> mx.array:
        """Neurons, no more than the scratch holds, in its first places, as MLX has them."""
        self._fetch(ids, self.all_ids[: len(ids)], self.shared.scratch, sequential=sequential)
        with self.shared.clock.time("mem"):
            return self._carried(len(ids))

    # a prompt: many tokens at once

    def _many(self, x: mx.array) -> mx.array:
        """The neurons of all tokens together, each read once; each token uses its own neurons only. Drafted
        tokens that are verified come this way too: their union is read, whatever of it the window has."""
        import mlx.core as mx

        clock, out = self.shared.clock, mx.zeros_like(x)
        mask = self._masks(x)
        if mask is None:
            ids, resident = self.other_ids, self.resident_ids
            clock.predicted += len(x) * len(self.all_ids)
        else:
            chosen, on_flash = np.any(mask, axis=0), self._on_flash()
            ids, resident = on_flash[chosen[on_flash]], self.all_ids[:0]
            clock.predicted += int(np.count_nonzero(mask))
            self._refill(torch.from_numpy(mask))
        if len(resident) and self.matrix is not None:
            out = out + self._part(x, resident, self.matrix, None)
        for block in self._blocks(ids):
            held = self._block(block, sequential=mask is None)
            clock.loaded += len(block)
            out = out + self._part(x, block, held, None if mask is None else mask[:, block])
            self._settle(out)  # the next block overwrites what this one reads
            if mask is not None:
                self._keep_from(block, held)
        return out

    def _masks(self, x: mx.array) -> np.ndarray[Any, Any] | None:
        """The neurons to compute for each of many tokens, bool [tokens, d_ff]; None for all."""
        import mlx.core as mx

        shared, clock = self.shared, self.shared.clock
        if shared.ablation.predictor == "off":
            return None
        if shared.ablation.predictor == "oracle":
            self._settle(x)
            found = self._choose_all(torch.from_numpy(np.array(x)))
            assert found is not None
            return found.numpy()
        predictor: Any = self.predictor
        mask = predictor.mask(x)
        with clock.wait():
            mx.eval(mask)
        return np.array(mask)

    def _part(self, x: mx.array, ids: np.ndarray[Any, Any], matrix: mx.array, mask: Any) -> mx.array:
        """The part of `ids`, which are in the first slots of `matrix`, of the output [tokens, d_model]."""
        import mlx.core as mx

        d, width = x.shape[1], self.shared.slot_bytes
        stored = matrix[: len(ids) * width].view(getattr(mx, self.shared.store.dtype)).reshape(len(ids), -1)
        rows = [stored[:, i * d : (i + 1) * d].astype(mx.float32) for i in range(3 if self.gated else 2)]
        z = x @ rows[-2].T + self._array(self.biases.first[ids])
        chosen: Any = mx.logical_not(z <= self.threshold)  # true of NaN, which has to show
        if mask is not None:
            chosen = mx.logical_and(chosen, mx.array(mask))
        self.gpu.active.append(chosen.astype(mx.uint32).sum().reshape(1))
        # where() and not a product: a neuron that is left out counts for nothing, finite or not
        hidden = mx.where(chosen, z, 0.0)
        if self.squared:
            hidden = hidden * hidden
        if self.gated:
            up = x @ rows[0].T
            hidden = hidden * (up if self.biases.up is None else up + self._array(self.biases.up[ids]))
        return hidden @ rows[-1]

    def _keep_from(self, block: np.ndarray[Any, Any], held: mx.array) -> None:
        """Copy those neurons of a block that belong to the window into their slots."""
        import mlx.core as mx

        if self.gpu.in_place:
            self._keep(block)
            return
        slots, width = self.slots, self.shared.slot_bytes
        assert slots is not None
        with self.shared.clock.time("mem"):
            at, here = found_in(block, slots.pointer[: slots.num_used])
            if len(at):
                whole, places = held[: len(block) * width].reshape(-1, width), np.flatnonzero(here)
                self._insert(mx.take(whole, mx.array(at.astype(np.uint32)), axis=0).reshape(-1), places, None)
