"""The kernels of torch-cuda under emulation: arrays are torch's, on the CPU, and the bodies run through the shim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from emulated import EmulatedArrays

from workbench.kernels.metal.kernel import Kernel, Template


class EmulatedTorch(EmulatedArrays):
    """In place of TorchMachine, as strict as it about types."""

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
        self, kernel: Kernel, inputs: Sequence[torch.Tensor], *, template: Template, **launch: Any
    ) -> list[torch.Tensor]:
        for (name, kind), value in zip(kernel.inputs, inputs, strict=True):
            assert value.dtype == getattr(torch, kernel.type_of(kind, template)), (kernel.name, name, value.dtype)
            assert value.is_contiguous(), (kernel.name, name)
        return super().run(kernel, inputs, template=template, **launch)
