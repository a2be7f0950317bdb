"""Kernel bodies on a GPU, through MLX: as Metal on Apple's, as CUDA on NVIDIA's."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from workbench.errors import DeviceError
from workbench.kernels.metal.kernel import Kernel, Template
from workbench.kernels.metal.source import as_cuda, cuda_header

OLDEST_MLX = (0, 30)
SMALL_ARRAY = 8
"""Metal arrays of fewer elements are passed in the constant address space: another specialisation."""
METAL_THREADS, CUDA_THREADS = 256, 512
METAL_GROUPS = 96
CUDA_GROUPS = 264
"""Two threadgroups a multiprocessor of an H100 or H200; MLX does not tell how many a card has."""


def mlx_core() -> Any:
    """The module mlx.core. DeviceError when MLX is missing, damaged or too old."""
    try:
        import mlx.core as mx
    except ImportError as error:
        if getattr(error, "name", None) in ("mlx", "mlx.core"):
            raise DeviceError("MLX is not installed; pip install 'flash-workbench[mlx]'") from None
        raise DeviceError(f"MLX does not load ({error}); install it anew: pip install 'flash-workbench[mlx]'") from None
    version = importlib.metadata.version("mlx")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_MLX:
        oldest = ".".join(map(str, OLDEST_MLX))
        raise DeviceError(f"MLX {version} is too old for these kernels; pip install 'mlx>={oldest}'")
    return mx


def available() -> list[Literal["metal", "cuda"]]:
    """The GPU backends that MLX has here; none where MLX is missing or only computes on the CPU."""
    try:
        mx = mlx_core()
    except DeviceError:
        return []
    return [name for name in ("metal", "cuda") if _has(mx, name)]


def _has(mx: Any, name: str) -> bool:
    module = getattr(mx, name, None)
    return module is not None and bool(module.is_available())


@dataclass
class _Launch:
    """What does not change from one launch to the next. compiled: for each way of passing the inputs."""

    call: Any
    template: list[tuple[str, Any]]
    types: list[Any]
    output_types: list[Any]
    compiled: set[tuple[bool, ...]]


class MlxMachine:
    """Runs kernels on the GPU. Arrays are mx.array, and lazy: the work is done when they are evaluated.

    compilations: how many specialisations of kernels were asked for so far: of a text, template arguments and types.
    DeviceError when MLX or the GPU is missing.
    """

    def __init__(self, device: Literal["metal", "cuda"]) -> None:
        self._mx = mx = mlx_core()
        if device not in ("metal", "cuda"):
            raise ValueError(f"device={device!r} is not metal or cuda")
        if not _has(mx, device):
            remedy = (
                "this needs a Mac with Apple silicon and MLX from PyPI" if device == "metal"
                else "this needs an NVIDIA card and pip install 'flash-workbench[mlx-cuda]'"
            )  # fmt: skip
            raise DeviceError(f"MLX has no {'Metal' if device == 'metal' else 'CUDA'} device here; {remedy}")
        self.device = device
        self.where = "on Metal" if device == "metal" else "as CUDA"
        self.groups = METAL_GROUPS if device == "metal" else CUDA_GROUPS
        self.most_threads = METAL_THREADS if device == "metal" else CUDA_THREADS
        self._kernels: dict[tuple[str, str], Any] = {}
        self._launches: dict[tuple[Any, ...], _Launch] = {}
        self._specialisations: dict[tuple[Any, ...], set[tuple[bool, ...]]] = {}
        self._types = {
            "float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16, "uint32": mx.uint32,
            "uint8": mx.uint8, "int8": mx.int8,
        }  # fmt: skip

    @property
    def name(self) -> str:
        """The card's name, as MLX tells it."""
        mx = self._mx
        info = mx.device_info(mx.gpu) if hasattr(mx, "device_info") else mx.metal.device_info()
        return str(info.get("device_name") or info.get("architecture") or self.device)

    @property
    def compilations(self) -> int:
        """Distinct specialisations launched so far."""
        return sum(map(len, self._specialisations.values()))

    def array(self, values: Any, dtype: str) -> Any:
        """An mx.array with a numpy array's values; values of 16-bit floats may come as uint16."""
        mx, given = self._mx, np.ascontiguousarray(values)
        if dtype in ("float16", "bfloat16") and given.dtype in (np.uint16, np.float16):
            return mx.array(given.view(np.uint16)).view(self._types[dtype])
        made = mx.array(given)
        if made.dtype != self._types[dtype]:
            raise ValueError(f"an array of {given.dtype} does not hold {dtype}")
        return made

    def numpy(self, array: Any) -> np.ndarray:
        """The values, evaluated and copied; bfloat16 as uint16."""
        mx = self._mx
        return np.array(array.view(mx.uint16) if array.dtype in (mx.bfloat16, mx.float16) else array)

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
        """The outputs, not yet evaluated."""
        key = (kernel.name, kernel.digest, grid, threadgroup, *template.items())
        launch = self._launches.get(key)
        if launch is None:
            kernel.check(len(inputs), template, grid, threadgroup)
            launch = self._launches[key] = self._launch(kernel, template)
        types = [value.dtype for value in inputs]
        if types != launch.types or not all(value.ndim for value in inputs):
            raise ValueError(f"{kernel.name}: {self._wrong(kernel, launch, inputs)}")
        small = () if self.device == "cuda" else tuple(value.size < SMALL_ARRAY for value in inputs)
        launch.compiled.add(small)
        return launch.call(
            inputs=list(inputs), template=launch.template, grid=(grid, 1, 1), threadgroup=(threadgroup, 1, 1),
            output_shapes=output_shapes, output_dtypes=launch.output_types, stream=self._mx.gpu,
        )  # fmt: skip

    def _launch(self, kernel: Kernel, template: Template) -> _Launch:
        types = [self._types[kernel.type_of(kind, template)] for _, kind in (*kernel.inputs, *kernel.outputs)]
        return _Launch(
            self._made(kernel),
            [(name, self._types[v] if isinstance(v, str) else v) for name, v in template.items()],
            types[: len(kernel.inputs)],
            types[len(kernel.inputs) :],
            self._specialisations.setdefault((kernel.name, kernel.digest, *template.items()), set()),
        )

    def _wrong(self, kernel: Kernel, launch: _Launch, inputs: Sequence[Any]) -> str:
        """Which input is not of its type, in words."""
        for (name, _), wanted, value in zip(kernel.inputs, launch.types, inputs, strict=True):
            if value.dtype != wanted or value.ndim == 0:
                return f"{name} is not an array of {wanted} with a dimension"
        raise AssertionError("every input fits")

    def _made(self, kernel: Kernel) -> Any:
        key = (kernel.name, kernel.digest)
        if key not in self._kernels:
            fast = self._mx.fast
            # MLX keeps compiled kernels by name, on CUDA also from run to run: the name has to tell texts apart.
            names = {
                "input_names": [name for name, _ in kernel.inputs],
                "output_names": [name for name, _ in kernel.outputs],
            }
            if self.device == "metal":
                self._kernels[key] = fast.metal_kernel(
                    name=f"{kernel.name}_{kernel.digest}", source=kernel.body, header=kernel.header, **names
                )
            else:
                header = cuda_header(kernel)
                self._kernels[key] = fast.cuda_kernel(
                    name=f"{kernel.name}_{kernel.digest}_{text_digest(header)}", source=as_cuda(kernel.body),
                    header=header, **names,
                )  # fmt: skip
        return self._kernels[key]


def text_digest(text: str) -> str:
    """Tells one text from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
