"""A setting changed between two tokens: the same logits and the same reads as a fresh engine with that history."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_opt

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.engines.budget import compute_threads
from workbench.engines.layers import StoredLinear
from workbench.engines.setting import Setting
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import AblationError, BudgetError, PredictorError, ReaderError
from workbench.experiments.convert import convert
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

RUN = RunSpec(dram="95%", window=2, context=128)
CHANGES: list[dict[str, Any]] = [
    {"bundling": False},
    {"window": 6},
    {"predictor": "oracle"},
    {"coalesce": False, "bundling": True},
    {"compute_threads": 1},
    {"windowing": False},
    {"hybrid": False},
    {"predictor": "low_rank", "false_negative": 0.1},
    {"dram": "60%", "hybrid": True, "windowing": True},
    {"depth": 3, "chunk_bytes": 8192},
    {"predictor": "off", "windowing": False},
    {"io": "buffered"},
    {"predictor": "low_rank", "windowing": True, "false_negative": 0.01, "window": 1},
    {"coalesce_gap_bytes": 0, "coalesce": True},
    {"context": 64, "dram": "95%"},
]


def with_history(store: Store, setting: Setting, other: TorchCpuEngine) -> TorchCpuEngine:
    """A fresh engine that has the text of another: a copy of its KV cache."""
    fresh = TorchCpuEngine(store, setting.ablation, setting.predictors, setting.run)
    for mine, layer in zip(fresh.cache.layers, other.cache.layers, strict=True):
        if layer.length:
            mine.update(layer.keys.clone(), layer.values.clone())
    fresh.position = other.position
    return fresh


def test_any_setting_at_any_token_gives_a_fresh_engines_logits(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors
) -> None:
    text = iter(demo_text.tolist())
    seen = []
    with TorchCpuEngine(demo_store, Ablation(), demo_predictors, RUN) as live:
        live.prefill([next(text) for _ in range(5)])
        for change in CHANGES:
            live.setting = live.setting.changed(**change)
            assert live.setting.difference(Setting(Ablation(), RUN, demo_predictors))
            with with_history(demo_store, live.setting, live) as fresh:
                for _ in range(2):
                    token = next(text)
                    seen.append(live.step(token)[0])
                    assert (seen[-1] - fresh.step(token)[0]).abs().max() < 1e-4, change
                assert live.plan == fresh.plan
        assert live.position == 5 + 2 * len(CHANGES)
        assert not torch.equal(seen[-1], seen[-2])


@pytest.mark.parametrize(
    "change", [{"bundling": False}, {"window": 4}, {"false_negative": 0.1}, {"coalesce": False}, {"dram": "70%"}]
)
def test_reads_follow_from_the_new_setting(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, change: dict[str, Any]
) -> None:
    """Once the window holds tokens of the new setting only, every count is the fresh engine's."""
    counts = ("read_bytes", "reads", "active", "predicted", "loaded", "in_window")
    text = demo_text.tolist()
    with TorchCpuEngine(demo_store, Ablation(), demo_predictors, RUN) as live:
        live.prefill(text[:6])
        before = [live.step(token)[1] for token in text[6:9]][-1]
        live.setting = live.setting.changed(**change)
        with with_history(demo_store, live.setting, live) as fresh:
            for token in text[9 : 9 + live.run.window + 1]:
                for engine in (live, fresh):
                    engine.step(token)
            got, want = live.step(text[20])[1], fresh.step(text[20])[1]
    assert [getattr(got, name) for name in counts] == [getattr(want, name) for name in counts]
    if "bundling" in change:
        assert got.reads > before.reads


def test_what_cannot_be_is_refused_at_once(demo_store: Store, demo_predictors: Predictors, tmp_path: Path) -> None:
    store = convert(make_opt(tmp_path / "model"), tmp_path / "store")
    with TorchCpuEngine(demo_store, Ablation(), demo_predictors, RUN) as live:
        before, logits = live.setting, live.prefill([5, 6, 7, 8])[0]
        with pytest.raises(BudgetError, match="pass --dram"):
            live.run = dataclasses.replace(RUN, dram="10%")
        with pytest.raises(BudgetError, match="half"):
            live.run = dataclasses.replace(RUN, dram="half")
        with pytest.raises(BudgetError, match="the text so far, 4 tokens"):
            live.run = dataclasses.replace(RUN, context=3)
        with pytest.raises(AblationError, match="low_rank"):
            live.predictors = None
        assert live.setting is before
        live.rewind(3)
        assert (live.step(8)[0] - logits).abs().max() < 1e-4
    for name in ("ablation", "run", "predictors"):
        with pytest.raises(BudgetError, match="closed"):
            setattr(live, name, getattr(live, name))
    with pytest.raises(PredictorError, match="trained for"):
        TorchCpuEngine(store, Ablation(), demo_predictors, dataclasses.replace(RUN, dram="1GiB"))
    with (
        TorchCpuEngine(store, Ablation(predictor="oracle"), None, dataclasses.replace(RUN, dram="1GiB")) as tiny,
        pytest.raises(PredictorError, match="trained for"),
    ):
        tiny.predictors = demo_predictors


def test_a_set_up_that_fails_leaves_the_former_setting(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, tmp_path: Path
) -> None:
    shutil.copytree(demo_store.path, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    split = dataclasses.replace(Ablation(), bundling=False)
    text = demo_text.tolist()
    with (
        TorchCpuEngine(store, split, demo_predictors, RUN) as live,
        TorchCpuEngine(demo_store, split, demo_predictors, RUN) as sound,
    ):
        for engine in (live, sound):
            engine.prefill(text[:8])
        os.truncate(store.bundled_path, 8192)
        before = live.setting
        live.ablation = dataclasses.replace(PAPER_ROWS["hybrid"], bundling=True)  # the slots are filled from there
        with pytest.raises(ReaderError, match="short read"):
            live.step(text[8])
        assert live.setting is before
        assert live.position == 8
        assert (live.step(text[8])[0] - sound.step(text[8])[0]).abs().max() < 1e-4
        os.truncate(store.resident_path, 4096)  # nothing can be set up any more, the former setting neither
        live.ablation = PAPER_ROWS["naive"]
        with pytest.raises(ReaderError, match="short read"):
            live.step(text[9])
        with pytest.raises(ReaderError, match="short read"):
            live.step(text[9])


def test_a_file_that_is_gone_is_refused_when_asked_for(
    demo_predictors: Predictors, tmp_path: Path, tiny_opt: Path
) -> None:
    store = convert(tiny_opt, tmp_path / "store")
    run = RunSpec(dram="1GiB")
    with TorchCpuEngine(store, Ablation(predictor="oracle"), None, run) as live:
        store.split_path.rename(tmp_path / "elsewhere")
        with pytest.raises(ReaderError, match=r"ffn\.split"):
            live.ablation = Ablation(predictor="oracle", io="buffered")
        assert live.ablation.io == "threads"


def test_threads_reach_every_kernel_and_close_gives_all_back(tmp_path: Path, tiny_opt: Path) -> None:
    store = convert(tiny_opt, tmp_path / "store")
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    live = TorchCpuEngine(store, Ablation(predictor="oracle"), None, RunSpec(dram="1GiB"))
    linears = [m for m in live.model.modules() if isinstance(m, StoredLinear)]
    assert {m.threads for m in linears} == {compute_threads(RunSpec())}
    live.run = dataclasses.replace(live.run, compute_threads=3, depth=5)
    live.run = dataclasses.replace(live.run, depth=6)  # the reader opened for 5 is given back unused
    live.step(3)
    assert {m.threads for m in linears} == {3}
    live.close()
    assert live.closed
    if files is not None:
        assert len(os.listdir("/proc/self/fd")) == files
    assert (live.model, live.cache, live.shared, live.weights, live.ffns) == (None, None, None, None, [])
