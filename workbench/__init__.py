"""A research workbench for running language models larger than memory.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from workbench.ablation import PAPER_ROWS as PAPER_ROWS
    from workbench.ablation import Ablation as Ablation
    from workbench.engines import load as load
    from workbench.experiments.convert import convert as convert
    from workbench.experiments.data import data_card as data_card
    from workbench.flash.store import Store as Store
    from workbench.flash.store import verify as verify
    from workbench.predictor.config import PredictorSpec as PredictorSpec
    from workbench.predictor.low_rank import Predictors as Predictors
    from workbench.predictor.train import train_predictors as train_predictors
    from workbench.report import write_report as write_report
    from workbench.report.tables import stored_tables as stored_tables
    from workbench.report.tables import tables as tables
    from workbench.spec import RunSpec as RunSpec
    from workbench.widgets.bar import progress_bar as progress_bar
    from workbench.widgets.errors import notebook_setup as notebook_setup
    from workbench.widgets.panel import panel as panel
    from workbench.widgets.training import training_panel as training_panel

_WHERE = {
    "Ablation": "workbench.ablation",
    "PAPER_ROWS": "workbench.ablation",
    "load": "workbench.engines",
    "notebook_setup": "workbench.widgets.errors",
    "panel": "workbench.widgets.panel",
    "progress_bar": "workbench.widgets.bar",
    "convert": "workbench.experiments.convert",
    "data_card": "workbench.experiments.data",
    "Store": "workbench.flash.store",
    "verify": "workbench.flash.store",
    "PredictorSpec": "workbench.predictor.config",
    "Predictors": "workbench.predictor.low_rank",
    "train_predictors": "workbench.predictor.train",
    "training_panel": "workbench.widgets.training",
    "write_report": "workbench.report",
    "stored_tables": "workbench.report.tables",
    "tables": "workbench.report.tables",
    "RunSpec": "workbench.spec",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
