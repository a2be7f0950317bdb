"""The feed-forward network over the neurons in the slots (paper, section 3.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench import _native
from workbench.kernels.storage import widen
from workbench.spec import ITEMSIZE


def sparse_ffn(
    x: NDArray[np.float32],
    matrix: NDArray[np.uint8],
    slot_bytes: int,
    rows: NDArray[np.int32],
    bias: NDArray[np.float32],
    dtype: str,
    out: NDArray[np.float32],
    threads: int = 0,
    *,
    gated: bool = False,
    activation: str = "relu",
    threshold: float = 0.0,
    up_bias: NDArray[np.float32] | None = None,
) -> int:
    """out += the FFN of the neurons in `rows`; returns how many of them were active.

    With z = up . x + bias, or gate . x + bias when gated, a neuron is active where z > threshold or z is NaN. Its value
    h is z ('relu') or z * z ('relu2'). An active neuron adds h * down, or h * (up . x + up_bias) * down when gated.

    x, out: float32 [d]. matrix: uint8 [at least capacity * slot_bytes], a slot being [up row | down row], or
    [up row | gate row | down row] when gated, of d values of `dtype` each. rows: int32 [n], slots to use. bias: float32
    [capacity], by slot, of the row that decides. up_bias: float32 [capacity], by slot, or None for zeros; gated only.
    threshold: finite. threads: 0 for one a core. Of an inactive neuron only the row that decides is read. The result
    depends on the arguments alone, `threads` included. ValueError when they do not fit each other.
    """
    try:
        return _native.sparse_ffn(
            x, matrix, slot_bytes, rows, bias, dtype, out, threads, gated, activation, threshold, up_bias
        )
    except TypeError:
        raise ValueError("sparse_ffn: needs numpy arrays on the CPU, out writable, and plain numbers") from None


def sparse_ffn_reference(
    x: NDArray[np.float32],
    matrix: NDArray[np.uint8],
    slot_bytes: int,
    rows: NDArray[np.int32],
    bias: NDArray[np.float32],
    dtype: str,
    out: NDArray[np.float32],
    threads: int = 0,
    *,
    gated: bool = False,
    activation: str = "relu",
    threshold: float = 0.0,
    up_bias: NDArray[np.float32] | None = None,
) -> int:
    """As `sparse_ffn`, in numpy."""
    parts = 3 if gated else 2
    slots = matrix[: len(bias) * slot_bytes].reshape(len(bias), slot_bytes)
    records = np.ascontiguousarray(slots[rows, : parts * len(x) * ITEMSIZE[dtype]])
    stored = np.float32 if dtype == "float32" else np.uint16
    weights = widen(records.view(stored), dtype).reshape(len(rows), parts, len(x))
    z = weights[:, 1 if gated else 0] @ x + bias[rows]
    active = ~(z <= threshold)
    weights, rows, h = weights[active], rows[active], z[active]
    if activation == "relu2":
        h = h * h
    if gated:
        h = h * (weights[:, 0] @ x + (0 if up_bias is None else up_bias[rows]))
    out += h @ weights[:, -1]
    return len(rows)


def sparse_ffn_tokens(
    x: NDArray[np.float32],
    matrix: NDArray[np.uint8],
    slot_bytes: int,
    ids: list[NDArray[np.int32]],
    rows: list[NDArray[np.int32]],
    bias: NDArray[np.float32],
    dtype: str,
    out: NDArray[np.float32],
    threads: int = 0,
    *,
    gated: bool = False,
    activation: str = "relu",
    threshold: float = 0.0,
    up_bias: NDArray[np.float32] | None = None,
) -> int:
    """`sparse_ffn` of several tokens, each to the bit what it is alone; returns how many neurons were active in all.

    x, out: float32 [t, d]. ids, rows: for each token int32 [n], its neurons, sorted, and the slots they are in. Blocks
    of neurons are taken over all tokens, so that one which several use is fetched from memory about once. Other
    arguments as for `sparse_ffn`. ValueError when they do not fit each other.
    """
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(own) for own in rows], out=starts[1:])
    try:
        return _native.sparse_ffn_tokens(
            x, matrix, slot_bytes, _joined(ids), _joined(rows), starts, bias, dtype, out, threads, gated, activation,
            threshold, up_bias,
        )  # fmt: skip
    except TypeError:
        raise ValueError("sparse_ffn_tokens: needs numpy arrays on the CPU, out writable, and plain numbers") from None


def sparse_ffn_tokens_reference(
    x: NDArray[np.float32],
    matrix: NDArray[np.uint8],
    slot_bytes: int,
    ids: list[NDArray[np.int32]],
    rows: list[NDArray[np.int32]],
    bias: NDArray[np.float32],
    dtype: str,
    out: NDArray[np.float32],
    threads: int = 0,
    **kind: Any,
) -> int:
    """As `sparse_ffn_tokens`: the reference of one token, for each."""
    return sum(
        sparse_ffn_reference(own, matrix, slot_bytes, used, bias, dtype, to, threads, **kind)
        for own, used, to in zip(x, rows, out, strict=True)
    )


def _joined(lists: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(lists) if lists else np.zeros(0, np.int32)
