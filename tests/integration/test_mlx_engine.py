"""The MLX engines: on the CPU, and the code for Metal and for CUDA with its kernels emulated, against torch-cpu."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_families import SOME, VARIANTS, Made, make

from workbench.ablation import Ablation
from workbench.engines import load, open_engine
from workbench.engines.mlx.device import check_memory
from workbench.engines.mlx.engine import MlxEngine
from workbench.engines.pipeline import FlashEngine
from workbench.engines.setting import Setting
from workbench.errors import BudgetError, DataError, DeviceError
from workbench.experiments.ablate import ablate
from workbench.experiments.convert import convert
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec
from workbench.widgets.session import Session

pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'flash-workbench[mlx]'", exc_type=ImportError)
from emulated_mlx import EmulatedMlx

TOLERANCE = 1e-4
RUN = RunSpec(dram="150%", window=2, context=64)
ORACLE = Ablation(predictor="oracle")
Opened = Callable[..., FlashEngine]


def on_cpu(store: Store, ablation: Ablation, predictors: Predictors | None = None, run: RunSpec = RUN) -> FlashEngine:
    return open_engine(store, ablation, predictors, run, "mlx-cpu")


def as_on_metal(
    store: Store, ablation: Ablation, predictors: Predictors | None = None, run: RunSpec = RUN
) -> FlashEngine:
    return MlxEngine(store, ablation, predictors, run, "mlx-metal", EmulatedMlx())


def as_on_cuda(
    store: Store, ablation: Ablation, predictors: Predictors | None = None, run: RunSpec = RUN
) -> FlashEngine:
    return MlxEngine(store, ablation, predictors, run, "mlx-cuda", EmulatedMlx())


gpu = pytest.mark.parametrize("opened", [as_on_metal, as_on_cuda])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def compilations(engine: FlashEngine) -> int:
    assert isinstance(engine, MlxEngine)
    assert engine.gpu is not None
    return engine.gpu.machine.compilations  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("family"), VARIANTS[request.param])


@pytest.mark.parametrize("made", SOME, indirect=True)
def test_oracle_logits_on_the_cpu_are_transformers(made: Made) -> None:
    ids = made.ids.tolist()
    with on_cpu(made.store, ORACLE) as engine:
        assert difference(engine.logits(ids), made.logits) < TOLERANCE
        engine.reset()
        first = engine.prefill(ids[:15], keep=15)[0]
        rest = [engine.step(token)[0] for token in ids[15:]]
        assert difference(torch.cat([first, torch.stack(rest)]), made.logits) < TOLERANCE


@gpu
@pytest.mark.parametrize("made", ["opt", "persimmon", "llama fatrelu, biases"], indirect=True)
def test_oracle_logits_through_the_kernels_are_transformers(made: Made, opened: Opened) -> None:
    ids = made.ids[:8].tolist()
    with opened(made.store, ORACLE) as engine:
        first = engine.prefill(ids[:4], keep=4)[0]
        rest = [engine.step(token)[0] for token in ids[4:]]
        assert difference(torch.cat([first, torch.stack(rest)]), made.logits[:8]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("opened", [on_cpu, as_on_metal])
def test_16_bit_storage_is_float32_arithmetic(tmp_path: Path, tiny_opt: Path, opened: Opened, dtype: Any) -> None:
    store, ids = convert(tiny_opt, tmp_path / "store", dtype=dtype), list(range(3, 15))
    with open_engine(store, ORACLE, None, RUN) as engine:
        wanted = torch.cat([engine.prefill(ids[:10], keep=10)[0], engine.step(20)[0][None], engine.step(21)[0][None]])
    with opened(store, ORACLE) as engine:
        found = torch.cat([engine.prefill(ids[:10], keep=10)[0], engine.step(20)[0][None], engine.step(21)[0][None]])
    assert difference(found, wanted) < TOLERANCE


CHANGES: list[dict[str, Any]] = [
    {"bundling": False},
    {"predictor": "oracle"},
    {"window": 6, "bundling": True},
    {"windowing": False},
    {"hybrid": False},
    {"predictor": "low_rank", "false_negative": 0.1},
    {"dram": "100%", "hybrid": True, "windowing": True},
    {"predictor": "off", "windowing": False},
    {"io": "buffered", "hybrid": False},
    {"predictor": "low_rank", "windowing": True, "hybrid": True, "context": 100},
]
"""The demo model's, which cannot be told from another's by its size; low_rank follows off and oracle."""


@pytest.mark.parametrize("opened", [on_cpu, as_on_metal, as_on_cuda])
def test_any_setting_at_any_token_is_torchs(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, opened: Opened
) -> None:
    """The same reads, neurons and logits as torch-cpu, through every change."""
    text = iter(demo_text.tolist())
    setting = Setting(Ablation(), dataclasses.replace(RUN, dram="110%"), demo_predictors)
    with (
        open_engine(demo_store, setting.ablation, setting.predictors, setting.run) as torchs,
        opened(demo_store, setting.ablation, setting.predictors, setting.run) as ours,
    ):
        prompt = [next(text) for _ in range(6)]
        assert difference(ours.prefill(prompt)[0], torchs.prefill(prompt)[0]) < TOLERANCE
        for change in [{}, *CHANGES]:
            setting = setting.changed(**change)
            ours.setting = torchs.setting = setting
            for _ in range(2):
                token = next(text)
                (found, cost), (wanted, known) = ours.step(token), torchs.step(token)
                assert difference(found, wanted) < TOLERANCE, change
                for name in ("read_bytes", "reads", "active", "predicted", "loaded", "in_window", "window_trims"):
                    assert getattr(cost, name) == getattr(known, name), (change, name)


@gpu
def test_a_number_of_neurons_compiles_nothing_and_waits_once_a_layer(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, opened: Opened
) -> None:
    with opened(demo_store, Ablation(), demo_predictors, dataclasses.replace(RUN, dram="110%")) as engine:
        engine.prefill(demo_text[:4].tolist())
        engine.step(int(demo_text[4]))
        engine.step(int(demo_text[5]))
        before, loaded = compilations(engine), set()
        for token in demo_text[6:12].tolist():
            stats = engine.step(token)[1]
            loaded.add(stats.loaded)
            assert stats.waits == demo_store.spec.num_layers + 1  # the lists, and the logits
            assert 0 < stats.wait_ms <= stats.compute_ms
            assert stats.predictor_ms > 0
        assert len(loaded) > 2
        assert compilations(engine) == before


@gpu
def test_more_neurons_than_slots(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, opened: Opened
) -> None:
    least = "49MiB"
    with opened(demo_store, ORACLE, None, dataclasses.replace(RUN, dram=least)) as engine:
        assert min(engine.plan.slots) < 200
        found = torch.stack([engine.step(token)[0] for token in demo_text[:4].tolist()])
    assert difference(found, demo_logits[:4]) < TOLERANCE


def test_a_session_in_its_own_thread(demo_store: Store, demo_predictors: Predictors) -> None:
    run = RunSpec(dram="95%", context=64)
    wanted = []
    with load(demo_store.path, predictors=demo_predictors, run=run) as engine:
        wanted = [step.token for step in engine.generate("Once upon a time", 12)]
    with Session.open(demo_store.path, demo_predictors, run=run, backend="mlx-cpu") as session:
        session.start("Once upon a time", tokens=12)
        assert not session.wait(60).error
        session.change(bundling=False, window=2)
        session.go_on(tokens=6)
        snapshot = session.wait(60)
        assert not snapshot.error, snapshot.line
    with load(demo_store.path, predictors=demo_predictors, run=run, backend="mlx-cpu") as engine:
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.extend(step.token for step in engine.generate("Once upon a time", 12))
        )
        thread.start()
        thread.join()
    assert found == wanted


def test_an_ablation_record_names_the_backend(demo_store: Store, demo_text: np.ndarray) -> None:
    record = ablate(
        demo_store, None, demo_text, rows={"all": ORACLE}, run=dataclasses.replace(RUN, dram="100%"), prompt=8,
        tokens=4, backend="mlx-cpu",
    )  # fmt: skip
    assert record["run"]["backend"] == "mlx-cpu"
    assert record["run"]["versions"]["mlx"] == importlib.metadata.version("mlx")
    assert record["rows"][0]["tokens"] == 4
    assert "waits" not in record["rows"][0]  # nobody to wait for


@pytest.mark.parametrize("opened", [open_engine, on_cpu, as_on_metal, as_on_cuda])
def test_an_interrupted_token_or_prompt_leaves_no_trace(
    demo_store: Store, demo_text: np.ndarray, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    """Wherever it is interrupted, what comes after is what an engine gives that never saw it."""
    text, run = demo_text[:40].tolist(), dataclasses.replace(RUN, dram="110%")
    with opened(demo_store, ORACLE, None, run) as engine:
        engine.prefill(text[:6])
        wanted = [engine.step(token)[0] for token in text[6:9]]
        ffn = type(engine.ffns[3])
        parts = ["_sum_of", "_part", "_fetch"] if hasattr(ffn, "_part") else ["_compute", "_add", "_fetch"]
        for part in parts:
            engine.reset()
            engine.prefill(text[:6])
            calls: list[int] = []
            original = getattr(ffn, part)

            def interrupted(*args: Any, whole: Any = original, calls: list[int] = calls, **kwargs: Any) -> Any:
                calls.append(1)
                if len(calls) == 3:
                    raise KeyboardInterrupt
                return whole(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(ffn, part, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.prefill(text[10:40]) if part in ("_part", "_add") else engine.step(text[20])
            assert engine.position == 6
            found = [engine.step(token)[0] for token in text[6:9]]
            assert difference(torch.stack(found), torch.stack(wanted)) < TOLERANCE, part


@pytest.mark.parametrize("opened", [open_engine, on_cpu, as_on_metal])
def test_tokens_that_the_model_does_not_have_are_refused(demo_store: Store, opened: Any) -> None:
    with opened(demo_store, ORACLE, None, dataclasses.replace(RUN, dram="110%")) as engine:
        for bad in (-1, demo_store.spec.vocab_size, 2**31, 2**40):
            with pytest.raises(DataError, match=rf"token {bad} is not one of the model's"):
                engine.prefill([1, bad])
            with pytest.raises(DataError, match="is not one of the model's"):
                engine.step(bad)
        assert engine.position == 0


def test_what_is_not_here_is_one_line(
    demo_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlx.core as mx

    if not mx.metal.is_available():
        with pytest.raises(DeviceError, match=r"backend 'mlx-metal': MLX has no Metal device here; this needs a Mac"):
            load(demo_store.path, ablation=ORACLE, backend="mlx-metal")
    if not mx.cuda.is_available():
        with pytest.raises(DeviceError, match=r"backend 'mlx-cuda': MLX has no CUDA device here; this needs an NVIDIA"):
            load(demo_store.path, ablation=ORACLE, backend="mlx-cuda")
    with pytest.raises(DeviceError, match="choose one of torch-cpu, torch-cuda, mlx-metal, mlx-cuda, mlx-cpu"):
        load(demo_store.path, ablation=ORACLE, backend="mlx")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
        with pytest.raises(DeviceError, match=r"backend 'mlx-cpu': MLX 0.9.1 is too old .* pip install 'mlx>=0.30'"):
            load(demo_store.path, ablation=ORACLE, backend="mlx-cpu")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mlx.core", None)
        with pytest.raises(DeviceError, match=r"backend 'mlx-cpu': MLX is not installed; pip install 'flash-workbench"):
            load(demo_store.path, ablation=ORACLE, backend="mlx-cpu")


def test_memory_that_the_gpu_does_not_have_is_one_line() -> None:
    info = {"memory_size": 8 << 30, "max_recommended_working_set_size": 5 << 30}
    check_memory(4 << 30, "store", info)
    check_memory(4 << 30, "store", {})
    with pytest.raises(BudgetError, match=r"store: 6.44 GB do not fit the 5.37 GB .*; pass a smaller --dram"):
        check_memory(6 << 30, "store", info)
    with pytest.raises(BudgetError, match="a smaller --dram"):
        check_memory(9 << 30, "store", {"total_memory": 8 << 30})
