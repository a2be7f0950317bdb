"""Kernels under emulation for engines whose arrays are not numpy's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.kernels.metal.emulator import Emulator
from workbench.kernels.metal.kernel import Kernel, Template


class EmulatedArrays:
    """A machine over arrays on the CPU: kernels run at once, emulated; those in place change the array itself."""

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

    @abstractmethod
    def array(self, values: Any, dtype: str) -> Any:
        """An array with these values."""

    @abstractmethod
    def numpy(self, array: Any) -> np.ndarray:
        """The same memory as numpy has it, 16-bit floats as uint16."""

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
