"""Where MLX computes: which devices are here, and how much memory they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.engines.budget import check_gpu_memory
from workbench.kernels.metal.mlx_machine import MlxMachine, mlx_core

if TYPE_CHECKING:
    import mlx.core as mx

MEMORY_FIELDS = ("max_recommended_working_set_size", "total_memory", "memory_size")
"""What MLX calls the bytes that a GPU may use: on Metal the first, which is less than the machine has."""


def check_device(backend: str) -> None:
    """DeviceError, with the remedy, when `backend` (mlx-metal, mlx-cuda or mlx-cpu) cannot run here."""
    if backend == "mlx-cpu":
        mlx_core()
    else:
        machine(backend)


def machine(backend: str) -> MlxMachine:
    """What runs the kernels of mlx-metal or mlx-cuda."""
    return MlxMachine("metal" if backend == "mlx-metal" else "cuda")


def stream(backend: str) -> Any:
    """A context in which MLX computes on the backend's device."""
    mx: Any = mlx_core()
    return mx.stream(mx.cpu if backend == "mlx-cpu" else mx.gpu)


def check_memory(needed: int, what: str, info: dict[str, Any]) -> None:
    """BudgetError when a GPU that says `info` of itself (mx.device_info) has less than `needed` bytes."""
    limit = next((int(info[name]) for name in MEMORY_FIELDS if info.get(name)), None)
    if limit is not None:
        check_gpu_memory(needed, limit, what)


def gpu_info() -> dict[str, Any]:
    """What MLX knows of the GPU."""
    mx: Any = mlx_core()
    return dict(mx.device_info(mx.gpu))


def as_numpy(array: mx.array) -> Any:
    """numpy's view of an evaluated array on the CPU's memory, writable and without a copy; bfloat16 as uint16."""
    import mlx.core as mx
    import numpy as np

    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)
