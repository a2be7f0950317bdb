"""Engines: the token loop over a flash store. `load` picks one by its backend's name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import DeviceError

if TYPE_CHECKING:
    from workbench.ablation import Ablation
    from workbench.engines.torch_cpu import TorchCpuEngine
    from workbench.predictor.low_rank import Predictors
    from workbench.spec import RunSpec

BACKENDS = ("torch-cpu",)


def load(
    store: str | Path,
    *,
    ablation: Ablation | None = None,
    predictors: Predictors | str | Path | None = None,
    backend: str = "torch-cpu",
    dram: str | None = None,
    run: RunSpec | None = None,
) -> TorchCpuEngine:
    """Open a flash store as an engine.

    `dram` is short for a `RunSpec` with that budget. Raises `DeviceError` for a backend that is not
    there, `StoreError`, `PredictorError`, `BudgetError` or `AblationError` for what cannot run.
    """
    if backend not in BACKENDS:
        raise DeviceError(f"backend {backend!r} is not available; choose one of {', '.join(BACKENDS)}")
    import dataclasses

    from workbench.ablation import Ablation
    from workbench.engines.torch_cpu import TorchCpuEngine
    from workbench.flash.store import Store
    from workbench.predictor.low_rank import Predictors
    from workbench.spec import RunSpec

    run = run or RunSpec()
    if dram is not None:
        run = dataclasses.replace(run, dram=dram)
    if isinstance(predictors, str | Path):
        predictors = Predictors.load(predictors)
    return TorchCpuEngine(Store.open(store), ablation or Ablation(), predictors, run)
