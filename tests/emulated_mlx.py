"""The kernels of the MLX engines under emulation: arrays are MLX's, on the CPU, and the bodies run through the shim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.kernels.metal.emulator import Emulator
from workbench.kernels.metal.kernel import Kernel, Template


class EmulatedMlx:
    """As MlxMachine, but every kernel runs at once, emulated; in-place kernels change the array itself."""

    where = "emulated"
    groups = 3
    most_threads = 256

    def __init__(self, seed: int = 0) -> None:
        self._emulator = Emulator(seed)
        self.launches: list[str] = []
        self._specialisations: set[tuple[Any, ...]] = set()

    @property
    def compilations(self) -> int:
        return len(self._specialisations)

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

    def run(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        *,
        template: Template,
        grid: int,
        threadgroup: int,
        output_shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        self.launches.append(kernel.name)
        self._specialisations.add((kernel.name, tuple(template.items())))
        given = [self.numpy(value) for value in inputs]
        found = self._emulator.run(
            kernel, given, template=template, grid=grid, threadgroup=threadgroup, output_shapes=output_shapes
        )
        return [
            self.array(values, kernel.type_of(kind, template))
            for values, (_, kind) in zip(found, kernel.outputs, strict=True)
        ]
