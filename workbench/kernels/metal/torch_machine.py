"""Kernel bodies on an NVIDIA card through torch: the same CUDA text that MLX is given, compiled by NVRTC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.errors import DeviceError, KernelFault
from workbench.kernels.metal.kernel import Kernel, Template
from workbench.kernels.metal.mlx_machine import CUDA_THREADS
from workbench.kernels.metal.source import cuda_unit

_PREAMBLE = (
    "".join(
        f"#undef __CUDA_NO_{part}__\n"
        for part in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
    )
    + "typedef unsigned int uint32_t; typedef unsigned char uint8_t; typedef signed char int8_t;\n"
)
"""NVRTC has no <cstdint>, and torch switches conversions off that the text uses."""


class TorchMachine:
    """Runs kernels on torch's current CUDA device and stream, CUDA graphs included. Arrays are torch tensors there.

    DeviceError where torch has no CUDA device, or cannot compile at run time.
    """

    where = "as CUDA"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError("torch has no CUDA device here; this needs an NVIDIA card and a CUDA build of torch")
        if not hasattr(torch.cuda, "_compile_kernel"):
            raise DeviceError(
                f"torch {torch.__version__} cannot compile kernels at run time; pip install 'torch>=2.11'"
            )
        self.groups = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self.most_threads = CUDA_THREADS
        self._functions: dict[tuple[Any, ...], Any] = {}

    @property
    def compilations(self) -> int:
        """Specialisations compiled so far."""
        return len(self._functions)

    def array(self, values: Any, dtype: str) -> Any:
        """A tensor on the card with a numpy array's values; values of 16-bit floats may come as uint16."""
        import torch

        given = np.ascontiguousarray(values)
        if given.dtype == np.uint16:
            given = given.view(np.int16)
        return torch.from_numpy(given).cuda().view(getattr(torch, dtype))

    def numpy(self, array: Any) -> np.ndarray:
        """The values, copied; 16-bit floats as uint16."""
        import torch

        if array.dtype in (torch.bfloat16, torch.float16):
            return array.view(torch.int16).cpu().numpy().view(np.uint16)
        return array.cpu().numpy()

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
        """The outputs; returns before the card is done."""
        import torch

        kernel.check(len(inputs), template, grid, threadgroup)
        for (name, kind), value in zip(kernel.inputs, inputs, strict=True):
            wanted = getattr(torch, kernel.type_of(kind, template))
            if value.dtype != wanted or not value.is_contiguous():
                raise ValueError(f"{kernel.name}: {name} is not a contiguous array of {wanted}")
        key = (kernel.name, kernel.digest, tuple(template.items()))
        if key not in self._functions:
            self._functions[key] = self._compiled(kernel, template)
        outputs = [
            torch.empty(shape, dtype=getattr(torch, kernel.type_of(kind, template)), device="cuda")
            for (_, kind), shape in zip(kernel.outputs, output_shapes, strict=True)
        ]
        self._functions[key](
            grid=(grid // threadgroup, 1, 1), block=(threadgroup, 1, 1), args=[*inputs, *outputs]
        )  # fmt: skip
        return outputs

    @staticmethod
    def _compiled(kernel: Kernel, template: Template) -> Any:
        import torch

        text = cuda_unit(kernel, [template]).replace("#include <cstdint>\n", _PREAMBLE)
        try:
            return torch.cuda._compile_kernel(text, f"mlx::core::cu::{kernel.name}_0")
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
            raise KernelFault(f"{kernel.name}: does not compile as CUDA: {lines[0]}") from None
