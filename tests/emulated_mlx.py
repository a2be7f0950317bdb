"""The kernels of the MLX engines under emulation: arrays are MLX's, on the CPU, and the bodies run through the shim."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulated import EmulatedArrays


class EmulatedMlx(EmulatedArrays):
    """In place of MlxMachine."""

    def array(self, values: Any, dtype: str) -> Any:
        import mlx.core as mx

        given = np.ascontiguousarray(values)
        if dtype in ("float16", "bfloat16"):
            return mx.array(given.view(np.uint16)).view(getattr(mx, dtype))
        return mx.array(given)

    def numpy(self, array: Any) -> np.ndarray:
        import mlx.core as mx

        mx.eval(array)
        held = np.array(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array, copy=False)
        return held
