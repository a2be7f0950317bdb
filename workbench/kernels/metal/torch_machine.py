"""Kernel bodies on an NVIDIA card through torch: the same CUDA text that MLX is given, compiled by NVRTC."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
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


_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
"""cuLaunchKernel of CUDA's driver: function, blocks (3), threads (3), shared bytes, stream, parameters, extra."""


@dataclass
class _Launch:
    """What does not change from one launch to the next. values: the arrays' addresses, which parameters points to."""

    compiled: Any
    function: Any
    input_types: list[Any]
    output_types: list[Any]
    values: Any
    parameters: Any


class TorchMachine:
    """Runs kernels on the CUDA device that is torch's current one now, in its current stream, CUDA graphs included.
    Arrays are torch tensors there.

    One thread at a time. DeviceError where torch has no CUDA device, or cannot compile at run time.
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
        self._torch = torch
        self._device = torch.device("cuda", torch.cuda.current_device())
        self.groups = 2 * torch.cuda.get_device_properties(self._device).multi_processor_count
        self.most_threads = CUDA_THREADS
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._launches: dict[tuple[Any, ...], _Launch] = {}
        self._driver: Any = None

    @property
    def compilations(self) -> int:
        """Specialisations compiled so far."""
        return len(self._functions)

    def array(self, values: Any, dtype: str) -> Any:
        """A tensor on the card with a numpy array's values; values of 16-bit floats may come as uint16."""
        torch, given = self._torch, np.ascontiguousarray(values)
        if given.dtype == np.uint16:
            given = given.view(np.int16)
        return torch.from_numpy(given).to(self._device).view(getattr(torch, dtype))

    def numpy(self, array: Any) -> np.ndarray:
        """The values, copied; 16-bit floats as uint16."""
        torch = self._torch
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
        torch = self._torch
        key = (kernel.name, kernel.digest, grid, threadgroup, *template.items())
        launch = self._launches.get(key)
        if launch is None:
            kernel.check(len(inputs), template, grid, threadgroup)
            launch = self._launches[key] = self._launch(kernel, template)
        values, at = launch.values, 0
        for value, wanted in zip(inputs, launch.input_types, strict=True):
            there = value.is_cuda or value.is_pinned()  # the card reads pinned memory of the host where it lies
            if value.dtype != wanted or not there or not value.is_contiguous():
                name = kernel.inputs[at][0]
                raise ValueError(f"{kernel.name}: {name} is not a contiguous array of {wanted} on the card")
            values[at] = value.data_ptr()
            at += 1
        outputs = []
        for shape, kind in zip(output_shapes, launch.output_types, strict=True):
            made = torch.empty(shape, dtype=kind, device=self._device)
            outputs.append(made)
            values[at] = made.data_ptr()
            at += 1
        failed = self._driver(
            launch.function, grid // threadgroup, 1, 1, threadgroup, 1, 1, 0,
            torch._C._cuda_getCurrentRawStream(self._device.index), launch.parameters, None,
        )  # fmt: skip
        if failed:
            raise KernelFault(f"{kernel.name}: CUDA did not launch it (error {failed}); see the driver's log")
        return outputs

    def _launch(self, kernel: Kernel, template: Template) -> _Launch:
        torch = self._torch
        key = (kernel.name, kernel.digest, *template.items())
        if key not in self._functions:
            self._functions[key] = self._compiled(kernel, template)
        compiled = self._functions[key]
        if self._driver is None:
            # torch's own call of a compiled kernel looks its library up and builds its parameters anew each time, which
            # takes longer than many a kernel runs.
            library = torch.cuda._utils._get_gpu_runtime_library()
            self._driver = ctypes.cast(library.cuLaunchKernel, _LAUNCH)
        ins, outs = (
            [getattr(torch, kernel.type_of(kind, template)) for _, kind in arrays]
            for arrays in (kernel.inputs, kernel.outputs)
        )
        values = (ctypes.c_void_p * (len(ins) + len(outs)))()
        size = ctypes.sizeof(ctypes.c_void_p)
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(values) + i * size for i in range(len(values))))
        return _Launch(compiled, compiled.func, ins, outs, values, parameters)

    @staticmethod
    def _compiled(kernel: Kernel, template: Template) -> Any:
        import torch

        text = cuda_unit(kernel, [template]).replace("#include <cstdint>\n", _PREAMBLE)
        try:
            return torch.cuda._compile_kernel(text, f"mlx::core::cu::{kernel.name}_0")
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines()
            raise KernelFault(f"{kernel.name}: does not compile as CUDA: {lines[0]}") from None
