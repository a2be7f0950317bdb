"""The generator of benchmarks/: a dense model that transformers runs too, with a true predictor and honest reuse."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import workbench as wb
from workbench.ablation import PAPER_ROWS
from workbench.experiments.ablate import ablate
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.report import read_ablation, read_predictors
from workbench.spec import RunSpec

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "opt_geometry.py"


def load_script() -> Any:
    """benchmarks/opt_geometry.py as a module."""
    spec = importlib.util.spec_from_file_location("opt_geometry", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store, dict[str, float], str]:
    """Checkpoint and store of a tiny geometry, the shares that the generator measured, and what it printed."""
    generator = load_script()
    root, shown = tmp_path_factory.mktemp("synth"), io.StringIO()
    tiny = generator.Geometry(layers=2, d_model=128, d_ff=512, heads=4, vocab=256, positions=512)
    shares = generator.make(root / "tiny", tiny, seed=0, show=shown)
    return root / "tiny", wb.convert(root / "tiny", root / "store"), shares, shown.getvalue()


def test_reuse_is_as_asked_and_shown_by_layer(made: tuple[Path, Store, dict[str, float], str]) -> None:
    path, _, shares, shown = made
    assert [line.split()[:2] for line in shown.splitlines()] == [["layer", "0"], ["layer", "1"]]
    assert all("new" in line and "kept" in line for line in shown.splitlines())
    # a tiny model scatters around the shares that it was solved for
    assert shares["active_share"] == pytest.approx(0.03, rel=0.35)
    assert shares["predicted_share"] == pytest.approx(0.10, rel=0.25)
    assert shares["kept_share"] == pytest.approx(0.24, rel=0.25)
    assert 0.01 < shares["new_share"] < 0.05
    assert shares["false_negative"] < 0.01
    card = read_predictors(path.with_name("tiny-predictors"))
    assert len(card.layers) == 2
    assert "factors of the generator" in card.about["origin"]


def test_oracle_gives_the_dense_logits(made: tuple[Path, Store, dict[str, float], str]) -> None:
    path, store, _, _ = made
    ids = np.random.default_rng(3).integers(3, 256, 64)
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = dense(torch.from_numpy(ids)[None]).logits[0]
    with wb.load(store.path, ablation=wb.Ablation(predictor="oracle"), dram="4MiB") as engine:
        assert (engine.logits(ids) - wanted).abs().max() <= 1e-4
    # the true factors miss next to nothing, so they give nearly the same
    with wb.load(store.path, predictors=path.with_name("tiny-predictors"), dram="4MiB") as engine:
        assert (engine.logits(ids) - wanted).abs().max() <= 1e-2


def test_ablation_on_it_is_marked_synthetic_and_reports_the_same_reuse(
    made: tuple[Path, Store, dict[str, float], str],
) -> None:
    path, store, shares, _ = made
    text = np.random.default_rng(5).integers(3, 256, 200)
    record = ablate(
        store, Predictors.load(path.with_name("tiny-predictors")), text, prompt=128, tokens=64,
        rows={"all": PAPER_ROWS["+ bundling (all)"]}, run=RunSpec(dram="4MiB", context=256),
    )  # fmt: skip
    row = read_ablation(record).rows[0]
    assert record["run"]["synthetic"] is True
    assert row.window_trims == 0
    assert row.in_window is not None
    assert row.loaded is not None
    assert row.in_window / store.spec.ffn_neurons == pytest.approx(shares["kept_share"], rel=0.25)
    assert row.loaded / store.spec.ffn_neurons == pytest.approx(shares["new_share"], rel=0.4)
