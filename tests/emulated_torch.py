"""The kernels of torch-cuda under emulation: arrays are torch's, on the CPU, and the bodies run through the shim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workbench.kernels.metal.emulator import Emulator
from workbench.kernels.metal.kernel import Kernel, Template


class EmulatedTorch:
    """As TorchMachine, but every kernel runs at once, emulated; in-place kernels change the tensor itself."""

    where = "emulated"
    groups = 3
    most_threads = 256

    def __init__(self, seed: int = 0) -> None:
        self._emulator = Emulator(seed)
        self._specialisations: set[tuple[Any, ...]] = set()

    @property
    def compilations(self) -> int:
        return len(self._specialisations)

    def array(self, values: Any, dtype: str) -> torch.Tensor:
        given = np.array(values)
        if given.dtype == np.uint16:
            given = given.view(np.int16)
        return torch.from_numpy(given).view(getattr(torch, dtype))

    def numpy(self, array: torch.Tensor) -> np.ndarray:
        if array.dtype in (torch.bfloat16, torch.float16):
            return array.detach().view(torch.int16).numpy().view(np.uint16)
        return array.detach().numpy()

    def run(
        self,
        kernel: Kernel,
        inputs: Sequence[torch.Tensor],
        *,
        template: Template,
        grid: int,
        threadgroup: int,
        output_shapes: Sequence[tuple[int, ...]],
    ) -> list[torch.Tensor]:
        self._specialisations.add((kernel.name, tuple(template.items())))
        for (name, kind), value in zip(kernel.inputs, inputs, strict=True):
            assert value.dtype == getattr(torch, kernel.type_of(kind, template)), (kernel.name, name, value.dtype)
            assert value.is_contiguous(), (kernel.name, name)
        given = [self.numpy(value) for value in inputs]
        found = self._emulator.run(
            kernel, given, template=template, grid=grid, threadgroup=threadgroup, output_shapes=output_shapes
        )
        return [
            self.array(values, kernel.type_of(kind, template))
            for values, (_, kind) in zip(found, kernel.outputs, strict=True)
        ]
