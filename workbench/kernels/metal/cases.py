"""What `workbench kernels verify` tries: ragged, single, no and all rows, every type, every activation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.kernels.metal import gemv, predictor, slots
from workbench.kernels.metal.kernel import Machine
from workbench.kernels.metal.rows import narrow, pack_rows, unpack_rows
from workbench.kernels.metal.sparse_ffn import Record, Tiles, sparse_ffn, sparse_ffn_reference
from workbench.kernels.metal.verify import Case, relative_error

FLOATS = ("float32", "float16", "bfloat16")
MARGIN = 1e-3
"""No drawn value is nearer to its threshold than this, so that rounding decides nothing."""


def _away(z: np.ndarray, threshold: float) -> np.ndarray:
    """What to add to z so that none of it is within MARGIN of the threshold."""
    return np.where(np.abs(z - threshold) < MARGIN, 4 * MARGIN, 0.0)


@dataclass(frozen=True)
class FfnCase:
    """The FFN of `num_rows` of `capacity` slots. pad: bytes of a slot beyond its record."""

    operation: str
    dtype: str
    d: int
    capacity: int
    num_rows: int
    activation: str = "relu"
    gated: bool = False
    bits: int = 0
    threshold: float = 0.0
    up_bias: bool = False
    pad: int = 0
    cut: Tiles | None = None
    exact: bool = False

    @property
    def shape(self) -> str:
        """The case in words."""
        words = [f"{self.num_rows} of {self.capacity} x {self.d}"]
        words += [f"{self.bits} bit"] if self.bits else []
        words += ["gated"] if self.gated else []
        return " ".join([*words, self.activation, *([f"> {self.threshold:g}"] if self.threshold else [])])

    def run(self, machine: Machine, rng: np.random.Generator) -> float:
        """As Case."""
        parts, n = (3 if self.gated else 2), self.capacity
        weights = rng.standard_normal((n * parts, self.d)) / np.sqrt(self.d)
        packed = pack_rows(weights, self.dtype, self.bits)
        used = parts * packed.shape[1]
        record = Record(self.d, self.dtype, used + self.pad, self.gated, self.bits)
        held = rng.integers(0, 256, (n, record.slot_bytes), np.uint8)
        held[:, :used] = packed.reshape(n, used)
        flat = held.reshape(-1)
        rows = rng.permutation(n).astype(np.uint32)
        x = rng.standard_normal(self.d).astype(np.float32)
        bias, up_bias = (0.1 * rng.standard_normal((2, n))).astype(np.float32)
        deciding = packed.reshape(n, parts, -1)[:, 1 if self.gated else 0]
        z = unpack_rows(deciding, self.d, self.dtype, self.bits) @ x.astype(np.float64) + bias
        bias = (bias + _away(z, self.threshold)).astype(np.float32)
        given: dict[str, Any] = {"activation": self.activation}
        threshold = np.float32(self.threshold)
        y, active = sparse_ffn(
            machine, record, machine.array(flat, "uint8"), machine.array(rows, "uint32"),
            machine.array(np.array([self.num_rows], np.uint32), "uint32"), machine.array(x, "float32"),
            machine.array(bias, "float32"), machine.array(np.array([threshold]), "float32"), cut=self.cut,
            up_bias=machine.array(up_bias, "float32") if self.up_bias else None, **given,
        )  # fmt: skip
        expected, count = sparse_ffn_reference(
            record, flat, rows, self.num_rows, x, bias, float(threshold), up_bias=up_bias if self.up_bias else None,
            **given,
        )  # fmt: skip
        if int(machine.numpy(active)[0]) != count:
            return float("inf")
        return relative_error(machine.numpy(y), expected)


@dataclass(frozen=True)
class GemvCase:
    """A matrix [rows, columns] times `tokens` vectors; bias: its type, or '' for none."""

    dtype: str
    rows: int
    columns: int
    tokens: int = 1
    bias: str = ""
    operation: str = "gemv"
    exact: bool = False

    @property
    def shape(self) -> str:
        """The case in words."""
        return f"{self.rows} x {self.columns}, {self.tokens} token{'s' * (self.tokens > 1)}" + (
            f", bias {self.bias}" if self.bias else ""
        )

    def run(self, machine: Machine, rng: np.random.Generator) -> float:
        """As Case."""
        w, scale = _matrix(rng, self.rows, self.columns, self.dtype)
        shape = (self.columns,) if self.tokens == 1 else (self.tokens, self.columns)
        x = rng.standard_normal(shape).astype(np.float32)
        bias = narrow(rng.standard_normal(self.rows), self.bias) if self.bias else None
        named: dict[str, Any] = {"dtype": self.dtype, "bias_dtype": self.bias or "float32"}
        y = gemv.gemv(
            machine, machine.array(w, self.dtype), machine.array(x, "float32"),
            bias=None if bias is None else machine.array(bias, self.bias),
            scale=None if scale is None else machine.array(scale, "float32"), **named,
        )  # fmt: skip
        return relative_error(machine.numpy(y), gemv.gemv_reference(w, x, bias=bias, scale=scale, **named))


@dataclass(frozen=True)
class PredictorCase:
    """The list of predicted neurons; share: of neurons above the threshold."""

    dtype: str
    neurons: int
    rank: int
    d: int
    share: float
    operation: str = "predictor"
    exact: bool = True

    @property
    def shape(self) -> str:
        """The case in words."""
        return f"{self.neurons} neurons, rank {self.rank}, d {self.d}, {self.share:.0%} predicted"

    def run(self, machine: Machine, rng: np.random.Generator) -> float:
        """As Case; lists have to be equal."""
        a, a_scale = _matrix(rng, self.rank, self.d, self.dtype)
        b, b_scale = _matrix(rng, self.neurons, self.rank, self.dtype)
        x = rng.standard_normal(self.d).astype(np.float32)
        bias = rng.standard_normal(self.neurons).astype(np.float32)
        scales: dict[str, Any] = {"a_scale": a_scale, "b_scale": b_scale}
        scores = predictor.scores_reference(x, a, b, bias, dtype=self.dtype, **scales)
        threshold = np.float32(np.quantile(scores, 1 - self.share) + (0.1 if self.share == 0 else -0.1))
        bias = (bias + _away(scores, float(threshold))).astype(np.float32)
        bias[rng.integers(self.neurons)] = np.nan  # not a number: predicted
        scores = predictor.scores_reference(x, a, b, bias, dtype=self.dtype, **scales)
        indices, count = predictor.predict(
            machine, machine.array(x, "float32"), machine.array(a, self.dtype), machine.array(b, self.dtype),
            machine.array(bias, "float32"), machine.array(np.array([threshold]), "float32"), dtype=self.dtype,
            **{name: None if s is None else machine.array(s, "float32") for name, s in scales.items()},
        )  # fmt: skip
        expected = np.flatnonzero(~(scores <= threshold))
        found = machine.numpy(indices)[: int(machine.numpy(count)[0])]
        return 0.0 if np.array_equal(found, expected) else float("inf")


@dataclass(frozen=True)
class SlotCase:
    """`count` of at most `most` records of slot_bytes inserted or moved."""

    operation: str
    slot_bytes: int
    capacity: int
    most: int
    count: int
    dtype: str = "uint8"
    exact: bool = True

    @property
    def shape(self) -> str:
        """The case in words."""
        return f"{self.count} of {self.most} records of {self.slot_bytes} bytes"

    def run(self, machine: Machine, rng: np.random.Generator) -> float:
        """As Case; every byte of every slot has to be equal."""
        before = rng.integers(0, 256, self.capacity * self.slot_bytes, np.uint8)
        expected = before.copy()
        held = machine.array(before.copy(), "uint8")
        count = machine.array(np.array([self.count], np.uint32), "uint32")
        order = rng.permutation(self.capacity).astype(np.uint32)
        if self.operation == "slot_insert":
            ids, staging = order[: self.most], rng.integers(0, 256, self.most * self.slot_bytes, np.uint8)
            done = slots.insert(
                machine, held, self.slot_bytes, machine.array(staging, "uint8"), machine.array(ids, "uint32"), count
            )
            slots.insert_reference(expected, self.slot_bytes, staging, ids, self.count)
        else:
            source, target = order[: self.most], order[self.most : 2 * self.most]
            done = slots.move(
                machine, held, self.slot_bytes, machine.array(source, "uint32"), machine.array(target, "uint32"), count
            )
            slots.move_reference(expected, self.slot_bytes, source, target, self.count)
        if int(machine.numpy(done)[0]) != self.count:
            return float("inf")
        return 0.0 if np.array_equal(machine.numpy(held), expected) else float("inf")


def _matrix(rng: np.random.Generator, rows: int, columns: int, dtype: str) -> tuple[Any, Any]:
    """(weights [rows, columns] as stored, scale [rows] or None)."""
    if dtype == "int8":
        w = rng.integers(-127, 128, (rows, columns), np.int8)
        return w, ((0.5 + rng.random(rows)) / (127 * np.sqrt(columns))).astype(np.float32)
    return narrow(rng.standard_normal((rows, columns)) / np.sqrt(columns), dtype).reshape(rows, columns), None


SMALL = Tiles(threads=64, groups=3, rows=16, rows_at_once=2, unroll=2, batch=4)
"""Few threads and threadgroups, so that a block is taken several times and owns several columns."""


def ffn_cases() -> list[Case]:
    """Plain rows."""
    base = FfnCase("sparse_ffn", "float32", 96, 100, 83, cut=SMALL)
    shapes = [  # num_rows: ragged, one, none, all
        replace(base, capacity=n, num_rows=used) for n, used in ((100, 83), (40, 1), (40, 0), (64, 64))
    ]  # fmt: skip
    found = [replace(case, dtype=dtype, pad=32) for dtype in FLOATS for case in shapes]
    for dtype in FLOATS:
        found.append(replace(base, dtype=dtype, activation="relu2", threshold=0.3, pad=32))
        found.append(replace(base, dtype=dtype, gated=True, up_bias=True, activation="relu2", pad=32))
        found.append(replace(base, dtype=dtype, gated=True, threshold=0.2, pad=32))
        found.append(replace(base, dtype=dtype, d=77))  # no multiple of 16 bytes: one element at a time
    found.append(replace(base, num_rows=100, cut=replace(SMALL, groups=40)))
    found.append(replace(base, dtype="bfloat16", d=1024, capacity=70, num_rows=67, gated=True, cut=None))
    return list(found)


def quantized_cases() -> list[Case]:
    """Rows of 8 and 4 bits."""
    base = FfnCase("sparse_ffn_quantized", "float32", 192, 60, 53, cut=replace(SMALL, threads=32, rows=8))
    found = [replace(base, dtype=dtype, bits=bits, gated=gated)
             for dtype in FLOATS for bits in (8, 4) for gated in (False, True)]  # fmt: skip
    for used in (1, 0, 60):
        found.append(replace(base, dtype="float16", bits=4, num_rows=used, threshold=0.2, pad=48))
    return list(found)


def gemv_cases() -> list[Case]:
    """Ragged and whole matrices, one token and several."""
    found: list[Case] = []
    for dtype in (*FLOATS, "int8"):
        found += [GemvCase(dtype, 37, 160, bias="float32"), GemvCase(dtype, 51, 77), GemvCase(dtype, 1, 1056)]
    found.append(GemvCase("bfloat16", 19, 96, tokens=3, bias="bfloat16"))
    found.append(GemvCase("float16", 16, 64, tokens=8, bias="float16"))
    return found


def predictor_cases() -> list[Case]:
    """Few, no and all neurons predicted; more neurons than one threadgroup lists at once."""
    found: list[Case] = []
    for dtype in (*FLOATS, "int8"):
        found += [PredictorCase(dtype, 203, 32, 64, share) for share in (0.1, 0.0, 1.0)]
    found += [PredictorCase("float16", 1000, 12, 40, 0.3), PredictorCase("bfloat16", 16500, 8, 16, 0.1)]
    return found


def slot_cases() -> list[Case]:
    """Records of any size, no, some and all of the staged ones."""
    sizes = ((96, 11), (1040, 17), (4, 9), (77, 5), (96, 0))
    return [SlotCase(name, size, 40, 17, count) for name in ("slot_insert", "slot_move") for size, count in sizes]


def large_cases() -> list[Case]:
    """The sizes of 7B models, with each machine's own tiles: for GPUs, where they take no time."""
    base = FfnCase("sparse_ffn", "bfloat16", 4096, 4096, 4001)
    found = [replace(base, dtype=dtype) for dtype in FLOATS]
    found.append(replace(base, capacity=2048, num_rows=2048, gated=True, activation="relu2", threshold=0.1))
    found.append(replace(base, operation="sparse_ffn_quantized", bits=4, capacity=2048, num_rows=1999))
    return [
        *found,
        GemvCase("bfloat16", 4096, 4096, bias="bfloat16"),
        GemvCase("float16", 16384, 4096),
        PredictorCase("bfloat16", 16384, 1024, 4096, 0.1),
        PredictorCase("int8", 16384, 128, 4096, 0.05),
        SlotCase("slot_insert", 16384, 2048, 512, 400),
        SlotCase("slot_move", 16384, 2048, 512, 400),
    ]


CASES = {
    "sparse_ffn": ffn_cases,
    "sparse_ffn_quantized": quantized_cases,
    "gemv": gemv_cases,
    "predictor": predictor_cases,
    "slots": slot_cases,
}
