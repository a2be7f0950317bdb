"""CPU kernels and their numpy references against float64, in every storage dtype and at awkward sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from workbench import _native
from workbench.kernels.bandwidth import read_bandwidth
from workbench.kernels.ffn import sparse_ffn, sparse_ffn_reference
from workbench.kernels.linear import linear, linear_reference
from workbench.kernels.predict import predict, predict_reference, scores, scores_reference
from workbench.kernels.storage import widen
from workbench.spec import ITEMSIZE

DTYPES = list(ITEMSIZE)
SIZES = [1, 7, 8, 9, 31, 64, 100, 515]


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round float values to the storage dtype; 16-bit ones as uint16."""
    if dtype == "float32":
        return np.ascontiguousarray(values, np.float32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def exact(weights: np.ndarray, dtype: str) -> np.ndarray:
    """Stored weights as float64, by way of the definition of each format."""
    if dtype == "float32":
        return weights.astype(np.float64)
    bits = weights.astype(np.int64)
    mantissa_bits, bias = (10, 15) if dtype == "float16" else (7, 127)
    exponent = (bits & 0x7FFF) >> mantissa_bits
    fraction = bits & ((1 << mantissa_bits) - 1)
    normal = np.ldexp(1.0 + fraction / 2.0**mantissa_bits, exponent - bias)
    subnormal = np.ldexp(fraction / 2.0**mantissa_bits, 1 - bias)
    return np.where(exponent == 0, subnormal, normal) * np.where(bits & 0x8000, -1.0, 1.0)


class Layer:
    """Slots of random neurons with padding behind each record."""

    def __init__(
        self,
        d: int,
        capacity: int,
        dtype: str,
        seed: int = 0,
        padding: int = 64,
        *,
        gated: bool = False,
        activation: str = "relu",
        threshold: float = 0.0,
        with_up_bias: bool = True,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.x = rng.standard_normal(d).astype(np.float32)
        self.bias = rng.standard_normal(capacity).astype(np.float32)
        weights = store(rng.standard_normal((capacity, 3 if gated else 2, d)), dtype)
        self.weights = exact(weights, dtype)
        record = weights.reshape(capacity, -1).view(np.uint8)
        self.slot_bytes = record.shape[1] + padding
        slots = np.full((capacity, self.slot_bytes), 0xFF, np.uint8)  # NaN, if it is ever read
        slots[:, : record.shape[1]] = record
        self.matrix = slots.reshape(-1)
        self.gated, self.activation, self.threshold = gated, activation, threshold
        self.up_bias = rng.standard_normal(capacity).astype(np.float32) if gated and with_up_bias else None

    def z(self, rows: np.ndarray) -> np.ndarray:
        """Pre-activations in float64."""
        return self.weights[rows, 1 if self.gated else 0] @ self.x.astype(np.float64) + self.bias[rows]

    def expected(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        z = self.z(rows)
        active = z > self.threshold
        hidden = np.where(active, z**2 if self.activation == "relu2" else z, 0)
        if self.gated:
            up_bias = 0 if self.up_bias is None else self.up_bias[rows]
            hidden = hidden * (self.weights[rows, 0] @ self.x.astype(np.float64) + up_bias)
        return hidden @ self.weights[rows, -1], int(np.count_nonzero(active))

    def poison_inactive(self, rows: np.ndarray) -> None:
        """NaN in every row of the inactive neurons but the one that decides."""
        width = len(self.x) * ITEMSIZE[self.dtype]
        slots = self.matrix.reshape(-1, self.slot_bytes)
        for slot in rows[self.z(rows) <= self.threshold]:
            for part in (0, 2) if self.gated else (1,):
                slots[slot, part * width : (part + 1) * width] = 0xFF

    def run(self, kernel: Callable[..., int], rows: np.ndarray, threads: int = 1) -> tuple[np.ndarray, int]:
        out = np.zeros(len(self.x), np.float32)
        active = kernel(
            self.x, self.matrix, self.slot_bytes, rows, self.bias, self.dtype, out, threads,
            gated=self.gated, activation=self.activation, threshold=self.threshold, up_bias=self.up_bias,
        )  # fmt: skip
        return out, active


def assert_sums_close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * max(1, np.abs(expected).max(initial=0)))


@pytest.mark.parametrize("kernel", [sparse_ffn, sparse_ffn_reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 37])
def test_sparse_ffn(kernel: Callable[..., int], dtype: str, d: int, count: int) -> None:
    layer = Layer(d, 50, dtype, seed=d * 100 + count, padding=4 if d % 2 else 64)
    rows = np.random.default_rng(count).permutation(50)[:count].astype(np.int32)
    out, active = layer.run(kernel, rows)
    expected, expected_active = layer.expected(rows)
    assert active == expected_active
    assert_sums_close(out, expected)


@pytest.mark.parametrize("kernel", [sparse_ffn, sparse_ffn_reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("threshold", [0.0, 0.75, -0.5])
def test_sparse_ffn_of_every_kind(
    kernel: Callable[..., int], dtype: str, gated: bool, activation: str, threshold: float
) -> None:
    for d in (1, 9, 16, 40, 515):
        for count in (0, 1, 4, 7, 37):
            layer = Layer(
                d, 50, dtype, seed=d * 100 + count, padding=4 if d % 2 else 64,
                gated=gated, activation=activation, threshold=threshold, with_up_bias=d != 40,
            )  # fmt: skip
            rows = np.random.default_rng(count).permutation(50)[:count].astype(np.int32)
            layer.poison_inactive(rows)
            expected, expected_active = Layer.expected(layer, rows)
            out, active = layer.run(kernel, rows)
            assert active == expected_active
            assert_sums_close(out, expected)


@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_neuron_adds_the_same_whatever_its_neighbours(gated: bool, dtype: str) -> None:
    layer = Layer(100, 40, dtype, gated=gated, activation="relu2", threshold=0.5)
    rows = np.random.default_rng(3).permutation(40).astype(np.int32)
    together = layer.run(sparse_ffn, rows)
    out, active = np.zeros(100, np.float32), 0
    for row in rows:
        part, hit = layer.run(sparse_ffn, np.array([row], np.int32))
        active += hit
        out += part
    assert active == together[1]
    np.testing.assert_allclose(out, together[0], rtol=1e-4, atol=1e-3 * np.abs(out).max())
    active_rows = rows[layer.z(rows) > 0.5]  # without the others: the same sums in the same order
    np.testing.assert_array_equal(layer.run(sparse_ffn, active_rows)[0], together[0])


def test_at_the_threshold_a_neuron_is_not_active() -> None:
    slots = np.zeros((3, 2, 4), np.float32)
    slots[:, 0, 0], slots[:, 1] = [1, 2, 3], 1
    x, out = np.array([1, 0, 0, 0], np.float32), np.zeros(4, np.float32)
    rows, bias = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    for kernel in (sparse_ffn, sparse_ffn_reference):
        out[:] = 0
        assert kernel(x, slots.view(np.uint8).reshape(-1), 32, rows, bias, "float32", out, threshold=2.0) == 1
        np.testing.assert_array_equal(out, np.full(4, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [-1e6, 1e6], ids=["none", "all"])
def test_sparse_ffn_with_no_and_all_neurons_active(dtype: str, bias: float) -> None:
    layer = Layer(96, 64, dtype)
    layer.bias[:] = bias
    rows = np.arange(64, dtype=np.int32)
    out, active = layer.run(sparse_ffn, rows)
    assert active == (64 if bias > 0 else 0)
    np.testing.assert_allclose(
        out, layer.expected(rows)[0], rtol=1e-4, atol=1e-4 * max(1, abs(bias)) if bias > 0 else 0
    )


def test_sparse_ffn_adds_to_out_and_is_exact_on_small_integers() -> None:
    d = 24
    slots = np.zeros((2, 2, d), np.float32)
    slots[0, 0, 0], slots[0, 1] = 2, np.arange(d)
    slots[1, 0, 0], slots[1, 1] = -2, 1000
    x = np.zeros(d, np.float32)
    x[0] = 3
    out = np.full(d, 5, np.float32)
    rows, bias = np.array([0, 1], np.int32), np.ones(2, np.float32)
    assert sparse_ffn(x, slots.view(np.uint8).reshape(-1), 8 * d, rows, bias, "float32", out, 1) == 1
    np.testing.assert_array_equal(out, 5 + 7 * np.arange(d))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
def test_thread_counts_agree_and_each_is_reproducible(dtype: str, gated: bool) -> None:
    layer = Layer(2048, 300, dtype, gated=gated)  # large enough that threads are really used
    rows = np.random.default_rng(1).permutation(300).astype(np.int32)
    one, active = layer.run(sparse_ffn, rows, 1)
    assert_sums_close(one, layer.expected(rows)[0])
    for threads in (0, 2, 3, 5):
        out, same_active = layer.run(sparse_ffn, rows, threads)
        assert same_active == active
        assert_sums_close(out, one)
        for _ in range(10):
            np.testing.assert_array_equal(layer.run(sparse_ffn, rows, threads)[0], out)


@pytest.mark.parametrize("kernel", [sparse_ffn, sparse_ffn_reference])
@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "gated"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_not_a_number_is_not_lost(kernel: Callable[..., int], gated: bool, activation: str) -> None:
    layer = Layer(16, 8, "float32", gated=gated, activation=activation, threshold=0.5)
    layer.x[3] = np.nan
    out, active = layer.run(kernel, np.array([1], np.int32))
    assert active == 1
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_finite_16_bit_value_is_widened_exactly(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = widen(bits, dtype)
    finite = np.isfinite(wide)
    np.testing.assert_array_equal(wide[finite], exact(bits[finite], dtype).astype(np.float32))
    got = linear(np.ones((1, 1), np.float32), bits.reshape(-1, 1), None, dtype, 1)[0]
    np.testing.assert_array_equal(got[finite], wide[finite])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wide))
    # By eights, so that the vector path sees each of them too.
    x = np.zeros((1, 8), np.float32)
    for lane in range(8):
        x[:] = 0
        x[0, lane] = 1
        pick = np.where(finite, bits, 0).astype(np.uint16).reshape(-1, 8)
        np.testing.assert_array_equal(
            linear(x, pick, None, dtype, 1)[0], np.where(finite, wide, 0).reshape(-1, 8)[:, lane]
        )


@pytest.mark.parametrize("kernel", [linear, linear_reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (1, 64, 33),
        (1, 515, 7),
        (2, 100, 9),
        (3, 9, 5),
        (5, 31, 6),
        (8, 96, 64),
        (17, 40, 3),
        (2, 1100, 4),
        (7, 1539, 5),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(kernel: Callable[..., np.ndarray], dtype: str, shape: tuple[int, int, int], with_bias: bool) -> None:
    t, inputs, outputs = shape
    rng = np.random.default_rng(t * inputs + outputs)
    x = rng.standard_normal((t, inputs)).astype(np.float32)
    weight = store(rng.standard_normal((outputs, inputs)), dtype)
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    expected = x.astype(np.float64) @ exact(weight, dtype).T + (0 if bias is None else bias)
    got = kernel(x, weight, bias, dtype, 2)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_linear_of_nothing(shape: tuple[int, int, int]) -> None:
    t, inputs, outputs = shape
    got = linear(np.ones((t, inputs), np.float32), np.ones((outputs, inputs), np.float32), None, "float32", 2)
    np.testing.assert_array_equal(got, np.zeros((t, outputs)))


def test_linear_on_several_threads_equals_one() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    weight = rng.standard_normal((1001, 512)).astype(np.float32)
    one = linear(x, weight, None, "float32", 1)
    for threads in (2, 3, 7):
        np.testing.assert_allclose(linear(x, weight, None, "float32", threads), one, rtol=1e-5, atol=1e-5)


Scales = dict[str, np.ndarray | None]


def factors(d: int, rank: int, d_ff: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Scales]:
    """Random a and b in `dtype`, both in float64, and their scales as keywords."""
    rng = np.random.default_rng(d * rank + d_ff)
    a, b = rng.standard_normal((rank, d)) / d**0.5, rng.standard_normal((d_ff, rank))
    if dtype != "int8":
        a, b = store(a, dtype), store(b, dtype)
        return a, b, exact(a, dtype), exact(b, dtype), {}
    q = rng.integers(-128, 128, (rank, d), np.int8), rng.integers(-128, 128, (d_ff, rank), np.int8)
    scale = [(rng.random(len(w)) / 64 / w.shape[1] ** 0.5).astype(np.float32) for w in q]
    a, b = (w.astype(np.float64) * s[:, None] for w, s in zip(q, scale, strict=True))
    return *q, a, b, {"a_scale": scale[0], "b_scale": scale[1]}


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize(
    ("d", "rank", "d_ff"),
    [(1, 1, 1), (64, 8, 100), (40, 17, 9), (515, 33, 77), (100, 64, 3), (512, 128, 2048), (1056, 300, 2001)],
)
def test_predict_and_scores(dtype: str, d: int, rank: int, d_ff: int) -> None:
    rng = np.random.default_rng(d)
    x = rng.standard_normal(d).astype(np.float32)
    a, b, exact_a, exact_b, scales = factors(d, rank, d_ff, dtype)
    bias = rng.standard_normal(d_ff).astype(np.float32)
    expected = exact_b @ (exact_a @ x.astype(np.float64)) + bias
    for kernel in (scores, scores_reference):
        for threads in (1, 2, 3):
            got = kernel(x, a, b, bias, dtype, threads, **scales)
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    threshold = float(np.median(expected)) + 1e-3
    clear = np.abs(expected - threshold) > 1e-4
    for kernel in (predict, predict_reference):
        got = kernel(x, a, b, bias, threshold, dtype, 2, **scales)
        assert got.dtype == np.int32
        assert np.all(np.diff(got) > 0)
        fired = np.zeros(d_ff, bool)
        fired[got] = True
        np.testing.assert_array_equal(fired[clear], (expected > threshold)[clear])


@pytest.mark.parametrize("rank", [16, 256])
def test_every_int8_value_is_widened_exactly(rank: int) -> None:
    """Each value in each place of a vector, as the only one that counts; the bias is added after the scale."""
    values = np.arange(-128, 128)
    for column in (*range(16), rank - 1):
        b = np.full((256, rank), 77, np.int8)
        b[:, column] = values
        a = np.zeros((rank, 1), np.int8)
        a[column] = 1
        a_scale, b_scale = np.full(rank, 0.5, np.float32), np.full(256, 4, np.float32)
        one, bias = np.ones(1, np.float32), np.full(256, 0.25, np.float32)
        got = scores(one, a, b, bias, "int8", 1, a_scale=a_scale, b_scale=b_scale)
        np.testing.assert_array_equal(got, 2 * values + 0.25)


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_a_row_scores_the_same_whatever_its_neighbours(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    a, b, _, _, scales = factors(100, 37, 23, dtype)
    bias = np.zeros(23, np.float32)
    together = scores(x, a, b, bias, dtype, 1, **scales)
    for row in range(23):
        one = slice(row, row + 1)
        own = {**scales, "b_scale": scales["b_scale"][one]} if dtype == "int8" else {}  # type: ignore[index]
        assert scores(x, a, b[one], bias[one], dtype, 1, **own)[0] == together[row]


def test_a_score_that_is_not_a_number_is_predicted() -> None:
    a, b = np.ones((1, 4), np.float32), np.array([[1], [np.nan], [-1]], np.float32)
    for kernel in (predict, predict_reference):
        assert kernel(np.ones(4, np.float32), a, b, np.zeros(3, np.float32), 0.0).tolist() == [0, 1]


INT8: dict[str, Any] = {
    "x": np.zeros(8, np.float32),
    "a": np.zeros((2, 8), np.int8),
    "b": np.zeros((5, 2), np.int8),
    "bias": np.zeros(5, np.float32),
    "dtype": "int8",
    "a_scale": np.ones(2, np.float32),
    "b_scale": np.ones(5, np.float32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": np.zeros((2, 8), np.uint8)}, "a: must be int8"),
        ({"b": np.zeros((5, 2), np.float32)}, "b: must be int8"),
        ({"a": np.zeros((2, 7), np.int8)}, r"a: has shape \[2, 7\], not \[any, 8\]"),
        ({"b": np.zeros((5, 4), np.int8)[:, ::2]}, "b: is not C-contiguous"),
        ({"a_scale": None}, "a_scale: is missing"),
        ({"b_scale": None}, "b_scale: is missing"),
        ({"a_scale": np.ones(5, np.float32)}, r"a_scale: has shape \[5\], not \[2\]"),
        ({"b_scale": np.ones(5)}, "b_scale: must be float32"),
        ({"a_scale": 1.0}, "numpy arrays"),
        ({"dtype": "float32"}, "a: must be float32"),
        ({"dtype": "int4"}, "dtype: must be float32, float16, bfloat16 or int8"),
    ],
)
def test_int8_factors_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    np.testing.assert_array_equal(scores(**INT8), np.zeros(5))
    with pytest.raises(ValueError, match=message):
        scores(**{**INT8, **changes})
    with pytest.raises(ValueError, match=message):
        predict(threshold=0.0, **{**INT8, **changes})


def test_scales_are_for_int8_factors_only() -> None:
    wide = {**INT8, "a": INT8["a"].astype(np.float32), "b": INT8["b"].astype(np.float32), "dtype": "float32"}
    for name, other in (("a_scale", "b_scale"), ("b_scale", "a_scale")):
        with pytest.raises(ValueError, match=f"{name}: is for int8 factors only"):
            scores(**{**wide, other: None})
    with pytest.raises(ValueError, match="a_scale, b_scale: int8 factors need both"):
        scores_reference(**{**INT8, "a_scale": None})


def test_predict_none_and_all() -> None:
    x, a, b = np.ones(8, np.float32), np.ones((2, 8), np.float32), np.ones((50, 2), np.float32)
    bias = np.zeros(50, np.float32)
    assert predict(x, a, b, bias, 16.0).tolist() == []  # strictly above
    assert predict(x, a, b, bias, 15.9).tolist() == list(range(50))


ARRAYS: dict[str, Any] = {
    "x": np.zeros(8, np.float32),
    "matrix": np.zeros(4 * 64, np.uint8),
    "slot_bytes": 64,
    "rows": np.arange(4, dtype=np.int32),
    "bias": np.zeros(4, np.float32),
    "dtype": "float32",
    "out": np.zeros(8, np.float32),
    "threads": 1,
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", np.zeros(8), "x: must be float32"),
        ("x", np.zeros((1, 8), np.float32), r"x: has shape \[1, 8\], not \[any\]"),
        ("x", np.zeros(16, np.float32)[::2], "x: is not C-contiguous"),
        ("x", None, "numpy arrays"),
        ("matrix", np.zeros(100, np.uint8), "matrix: has fewer slots"),
        ("slot_bytes", 32, "slot_bytes: is too small"),
        ("slot_bytes", 66, "slot_bytes"),
        ("rows", np.array([4], np.int32), r"rows: names a slot outside \[0, 4\)"),
        ("rows", np.array([-1], np.int32), "rows: names a slot"),
        ("rows", np.arange(4), "rows: must be int32"),
        ("bias", np.zeros(4, np.float16), "bias: must be float32"),
        ("dtype", "int8", "dtype: must be float32, float16 or bfloat16"),
        ("out", np.zeros(7, np.float32), r"out: has shape \[7\], not \[8\]"),
        ("threads", -1, "threads"),
        ("gated", True, "slot_bytes: is too small for three rows"),
        ("activation", "gelu", "activation: must be relu or relu2"),
        ("threshold", float("nan"), "threshold: must be finite"),
        ("threshold", float("inf"), "threshold: must be finite"),
        ("threshold", None, "plain numbers"),
        ("up_bias", np.zeros(4, np.float32), "up_bias: is for a gated FFN"),
    ],
)
def test_arguments_that_do_not_fit_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_ffn(**{**ARRAYS, name: value})


@pytest.mark.parametrize(
    ("up_bias", "message"),
    [
        (np.zeros(3, np.float32), r"up_bias: has shape \[3\], not \[4\]"),
        (np.zeros(4), "up_bias: must be float32"),
        (np.zeros(8, np.float32)[::2], "up_bias: is not C-contiguous"),
        (0.5, "numpy arrays"),
    ],
)
def test_up_biases_that_do_not_fit_are_named(up_bias: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_ffn(
            **{**ARRAYS, "matrix": np.zeros(4 * 96, np.uint8), "slot_bytes": 96, "gated": True, "up_bias": up_bias}
        )


def test_read_only_arrays_are_read_and_never_written() -> None:
    frozen = copy.deepcopy(ARRAYS)
    for name in ("x", "matrix", "rows", "bias"):
        frozen[name].flags.writeable = False
    assert sparse_ffn(**frozen) == 0
    frozen["out"].flags.writeable = False
    with pytest.raises(ValueError, match="out writable"):
        sparse_ffn(**frozen)


def test_weights_that_do_not_fit_are_named() -> None:
    x, weight = np.zeros((1, 8), np.float32), np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match=r"weight: has shape \[4, 8\], not \[any, 7\]"):
        linear(x[:, :7].copy(), weight, None, "float32")
    with pytest.raises(ValueError, match="weight: must be uint16"):
        linear(x, weight, None, "bfloat16")
    with pytest.raises(ValueError, match=r"bias: has shape \[3\], not \[4\]"):
        linear(x, weight, np.zeros(3, np.float32), "float32")
    with pytest.raises(ValueError, match=r"b: has shape \[4, 8\], not \[any, 4\]"):
        predict(x[0], weight, weight, np.zeros(4, np.float32), 0.0)
    np.testing.assert_array_equal(linear(x, weight.astype(np.float16), None, "float16"), np.zeros((1, 4)))


def test_read_sum_reads_every_byte() -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 100, 4096, 1 << 20, (1 << 20) + 13):
        data = rng.integers(0, 256, size, dtype=np.uint8)
        padded = np.concatenate([data, np.zeros(-size % 8, np.uint8)])
        expected = int(padded.view(np.uint64).sum(dtype=np.uint64))
        for threads in (0, 1, 3):
            assert _native.read_sum(data, threads) == expected
    assert read_bandwidth(1 << 20, 2, repeats=1) > 0
