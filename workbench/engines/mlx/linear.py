"""Matrix products of the decoder: weights as they are stored, arithmetic in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from workbench.engines.layers import FEW_TOKENS, as_tensor
from workbench.engines.mlx.device import as_numpy
from workbench.engines.mlx.families import Linear
from workbench.kernels.linear import linear as native_linear
from workbench.kernels.metal.gemv import MOST_TOKENS, gemv
from workbench.kernels.metal.kernel import Machine

if TYPE_CHECKING:
    import mlx.core as mx


def on_gpu(machine: Machine, dtype: str) -> Linear:
    """A few tokens through the kernel that reads the weights once; more through MLX, the weights widened for the time
    of the product."""

    def linear(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        if len(x) <= MOST_TOKENS:
            return gemv(machine, weight, x, dtype=dtype, bias=bias, bias_dtype=dtype)
        return _product(x, weight, bias)

    return linear


def on_cpu(dtype: str, threads: Callable[[], int]) -> Linear:
    """Through the kernels of torch-cpu: MLX's own products on Linux are many times slower, widen 16-bit weights as a
    whole, and are less exact. Each call evaluates x, so it cannot be compiled."""

    def linear(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        import mlx.core as mx

        mx.eval(x)
        rows = np.ascontiguousarray(as_numpy(x))
        wide: Any = None if bias is None else np.array(bias.astype(mx.float32))
        if len(x) <= FEW_TOKENS:
            return mx.array(native_linear(rows, _stored(weight), wide, dtype, threads()))
        weights = as_tensor(_stored(weight), dtype).float()
        return mx.array(
            F.linear(torch.from_numpy(rows), weights, None if wide is None else torch.from_numpy(wide)).numpy()
        )

    return linear


def _stored(weight: mx.array) -> np.ndarray[Any, Any]:
    """As the kernels take it: 16-bit as uint16."""
    held = as_numpy(weight)
    return held.view(np.uint16) if held.dtype == np.float16 else held


def _product(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    import mlx.core as mx

    out = x @ weight.astype(mx.float32).T
    return out if bias is None else out + bias.astype(mx.float32)
