"""Engines: the token loop over a flash store. `load` picks one by its backend's name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from workbench.errors import DeviceError

if TYPE_CHECKING:
    from workbench.ablation import Ablation
    from workbench.engines.pipeline import FlashEngine
    from workbench.flash.store import Store
    from workbench.predictor.low_rank import Predictors
    from workbench.spec import RunSpec

READ_BYTES = 256 << 20
Backend = Literal["torch-cpu", "torch-cuda", "mlx-metal", "mlx-cuda", "mlx-cpu"]
BACKENDS: tuple[str, ...] = get_args(Backend)


def check_backend(backend: str) -> None:
    """DeviceError, saying what to do, for a name that is none and for a backend that this machine cannot run."""
    if backend not in BACKENDS:
        raise DeviceError(f"backend {backend!r} is not available; choose one of {', '.join(BACKENDS)}")
    try:
        if backend == "torch-cuda":
            from workbench.engines.torch_cuda.card import check_device as check_card

            check_card()
        elif backend.startswith("mlx"):
            from workbench.engines.mlx.device import check_device

            check_device(backend)
    except DeviceError as error:
        raise DeviceError(f"backend {backend!r}: {error}") from None


def device_of(backend: str) -> str:
    """What a backend computes on, as records name it: 'cpu', or the name of the GPU."""
    if backend in ("torch-cpu", "mlx-cpu"):
        return "cpu"
    if backend == "torch-cuda":
        import torch

        return torch.cuda.get_device_name()
    from workbench.engines.mlx.device import gpu_info

    return str(gpu_info().get("device_name", backend.removeprefix("mlx-")))


def memory_bandwidth(backend: str, threads: int = 0) -> float:
    """Bytes/s that the memory which a backend computes on gives: what a plain read reaches on the CPU with `threads`
    threads (0: one a core), what a copy moves on torch-cuda's card. The MLX GPU backends have the CPU's figure."""
    if backend == "torch-cuda":
        from workbench.engines.torch_cuda.card import copy_bandwidth

        return copy_bandwidth()
    from workbench.kernels.bandwidth import read_bandwidth

    return read_bandwidth(READ_BYTES, threads)


def open_engine(
    store: Store, ablation: Ablation, predictors: Predictors | None, run: RunSpec, backend: str = "torch-cpu"
) -> FlashEngine:
    """An opened store as an engine. Raises as `load` does."""
    check_backend(backend)
    if backend == "torch-cpu":
        from workbench.engines.torch_cpu import TorchCpuEngine

        return TorchCpuEngine(store, ablation, predictors, run)
    if backend == "torch-cuda":
        from workbench.engines.torch_cuda.engine import TorchCudaEngine

        return TorchCudaEngine(store, ablation, predictors, run)
    from workbench.engines.mlx.engine import MlxEngine

    return MlxEngine(store, ablation, predictors, run, backend)


def load(
    store: str | Path,
    *,
    ablation: Ablation | None = None,
    predictors: Predictors | str | Path | None = None,
    backend: str = "torch-cpu",
    dram: str | None = None,
    run: RunSpec | None = None,
) -> FlashEngine:
    """Open a flash store as an engine.

    `dram` is short for a `RunSpec` with that budget. Raises `DeviceError` for a backend that is not
    there, `StoreError`, `PredictorError`, `BudgetError` or `AblationError` for what cannot run.
    """
    check_backend(backend)
    import dataclasses

    from workbench.ablation import Ablation
    from workbench.flash.store import Store
    from workbench.predictor.low_rank import Predictors
    from workbench.spec import RunSpec

    run = run or RunSpec()
    if dram is not None:
        run = dataclasses.replace(run, dram=dram)
    if isinstance(predictors, str | Path):
        predictors = Predictors.load(predictors)
    return open_engine(Store.open(store), ablation or Ablation(), predictors, run, backend)
