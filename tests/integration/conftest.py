"""The demo model, dense and as stores: made once a test session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from workbench import assets
from workbench.experiments.convert import convert
from workbench.experiments.demo import held_out, shipped_predictors
from workbench.experiments.text import window_of
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return convert(assets.path("data/demo-model"), tmp_path_factory.mktemp("demo") / "store", dtype="float32")


@pytest.fixture(scope="session")
def demo_text(demo_store: Store) -> np.ndarray:
    """320 token ids of generated text that neither the predictors nor the demo model saw."""
    return window_of(held_out(assets.path("data/text")), demo_store, 320)


@pytest.fixture(scope="session")
def demo_dense() -> Any:
    return dense_model(assets.path("data/demo-model"))


@pytest.fixture(scope="session")
def demo_predictors() -> Predictors:
    return shipped_predictors()


@pytest.fixture(scope="session")
def relu_135m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a real gated ReLU model: SmolLM2-135M, re-trained without SiLU. Do not change it."""
    given = os.environ.get("WORKBENCH_RELU_MODEL")
    if given is not None:
        return Path(given)
    recipe = Path(__file__).parents[3] / "shared/models/smollm2-135m-relu/build.py"
    if not recipe.exists():
        pytest.skip("no recipe for the 135M model beside the checkout; set WORKBENCH_RELU_MODEL to its directory")
    made = tmp_path_factory.mktemp("relu-135m") / "model"
    build = subprocess.run([sys.executable, recipe, made], capture_output=True, text=True)
    if build.returncode:
        pytest.skip(f"the 135M model could not be built ({build.stderr.strip().splitlines()[-1]})")
    return made


def dense_model(path: Path) -> Any:
    """transformers' own model in float32: the reference of every engine."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def demo_logits(demo_dense: Any, demo_text: np.ndarray) -> torch.Tensor:
    """The dense model's logits of demo_text, [320, vocab]."""
    with torch.no_grad():
        return demo_dense(torch.from_numpy(demo_text)[None]).logits[0]
