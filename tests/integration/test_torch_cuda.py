"""torch-cuda: its whole path with the kernels emulated and tensors on the CPU, against torch-cpu; and on a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_torch import EmulatedTorch
from test_families import VARIANTS, Made, make

from workbench.ablation import Ablation
from workbench.engines import load, memory_bandwidth, open_engine
from workbench.engines.pipeline import FlashEngine
from workbench.engines.setting import Setting
from workbench.engines.torch_cuda.engine import TorchCudaEngine
from workbench.engines.torch_cuda.graphs import TokenGraphs
from workbench.errors import DeviceError
from workbench.experiments.convert import convert
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

TOLERANCE = 1e-4
RUN = RunSpec(dram="150%", window=2, context=64)
ORACLE = Ablation(predictor="oracle")
Opened = Callable[..., FlashEngine]


def emulated(
    store: Store, ablation: Ablation, predictors: Predictors | None = None, run: RunSpec = RUN
) -> TorchCudaEngine:
    return TorchCudaEngine(store, ablation, predictors, run, EmulatedTorch())


def on_a_card(store: Store, ablation: Ablation, predictors: Predictors | None = None, run: RunSpec = RUN) -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return open_engine(store, ablation, predictors, run, "torch-cuda")


both = pytest.mark.parametrize("opened", [emulated, pytest.param(on_a_card, marks=pytest.mark.device)])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("family"), VARIANTS[request.param])


@both
@pytest.mark.parametrize("made", ["opt", "persimmon", "llama fatrelu, biases", "falcon 7b", "phi"], indirect=True)
def test_oracle_logits_are_transformers(made: Made, opened: Opened) -> None:
    """A prompt, tokens one by one, and a few at once."""
    ids = made.ids[:26].tolist()
    with opened(made.store, ORACLE) as engine:
        found = [engine.prefill(ids[:18], keep=18)[0]]
        found += [engine.step(token)[0][None] for token in ids[18:21]]
        found.append(engine.prefill(ids[21:], keep=len(ids[21:]))[0])
        assert difference(torch.cat(found), made.logits[: len(ids)]) < TOLERANCE


@pytest.mark.parametrize("made", ["opt", "persimmon", "llama fatrelu, biases", "falcon 7b", "phi"], indirect=True)
def test_a_token_at_a_position_that_is_data(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded as graphs on a card, run without being recorded: position and mask are arrays, and attention
    sees all places of the KV cache, some with what was taken back."""
    ids = made.ids[:24].tolist()
    with emulated(made.store, ORACLE) as engine:
        monkeypatch.setattr(engine, "_as_graphs", lambda: True)
        engine.prefill(ids[:18])
        engine.prefill(ids[5:10])
        engine.rewind(18)
        found = []
        for token in ids[18:]:
            engine._drop_graphs()
            found.append(engine.step(token)[0])
            assert engine.card.graphs.tokens == 1
        assert engine.position == len(ids)
    assert difference(torch.stack(found), made.logits[18 : len(ids)]) < TOLERANCE


def test_a_token_that_cannot_be_recorded_is_taken_all_the_same(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in the middle, with neurons half loaded and others being read ahead."""
    monkeypatch.setattr(TokenGraphs, "record", lambda self, forward: forward())
    with emulated(demo_store, dataclasses.replace(ORACLE, prefetch=True)) as engine:
        monkeypatch.setattr(engine, "_as_graphs", lambda: engine._recordable)
        engine.step(int(demo_text[0]))
        original = engine.ffns[3]._fetch

        def failing(*args: Any, **kwargs: Any) -> None:
            monkeypatch.setattr(engine.ffns[3], "_fetch", original)
            raise RuntimeError("operation not permitted\nand more")

        monkeypatch.setattr(engine.ffns[3], "_fetch", failing)
        with pytest.warns(UserWarning, match=r"cannot be recorded as CUDA graphs \(operation not permitted\)"):
            logits, stats = engine.step(int(demo_text[1]))
        assert engine.card.graphs is None
        assert stats.active == stats.predicted  # the oracle's; nothing of the first attempt is counted
        found = [logits, *(engine.step(token)[0] for token in demo_text[2:5].tolist())]
    assert difference(torch.stack(found), demo_logits[1:5]) < TOLERANCE


@pytest.mark.device
def test_tokens_as_graphs_are_torch_cpus(demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors) -> None:
    run, ids = dataclasses.replace(RUN, dram="110%"), demo_text[:40].tolist()
    with (
        on_a_card(demo_store, Ablation(), demo_predictors, run) as ours,
        open_engine(demo_store, Ablation(), demo_predictors, run) as cpu,
    ):
        for ablation in (Ablation(), Ablation(prefetch=True), Ablation()):
            ours.ablation = cpu.ablation = ablation
            for engine in (ours, cpu):
                engine.reset()
                engine.prefill(ids[:20])
            for token in ids[20:28]:
                assert difference(ours.step(token)[0], cpu.step(token)[0]) < TOLERANCE
            assert ours.card.graphs.whole
            for engine in (ours, cpu):
                engine.prefill(ids[28:31])
                engine.rewind(29)
            for token in ids[31:34]:
                (found, cost), (wanted, known) = ours.step(token), cpu.step(token)
                assert difference(found, wanted) < TOLERANCE
                assert (cost.predicted, cost.in_window) == (known.predicted, known.in_window)


@both
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_storage_is_float32_arithmetic(tmp_path: Path, tiny_opt: Path, opened: Opened, dtype: Any) -> None:
    store, ids = convert(tiny_opt, tmp_path / "store", dtype=dtype), list(range(3, 25))
    with open_engine(store, ORACLE, None, RUN) as engine:
        wanted = torch.cat([engine.prefill(ids[:20], keep=20)[0], engine.step(20)[0][None], engine.step(21)[0][None]])
    with opened(store, ORACLE) as engine:
        found = torch.cat([engine.prefill(ids[:20], keep=20)[0], engine.step(20)[0][None], engine.step(21)[0][None]])
    assert difference(found, wanted) < TOLERANCE


CHANGES: list[dict[str, Any]] = [
    {"bundling": False},
    {"predictor": "oracle"},
    {"window": 6, "bundling": True, "prefetch": True},
    {"windowing": False},
    {"hybrid": False, "prefetch": False},
    {"predictor": "low_rank", "false_negative": 0.1},
    {"dram": "100%", "hybrid": True, "windowing": True},
    {"predictor": "off", "windowing": False},
    {"io": "buffered", "hybrid": False},
    {"predictor": "low_rank", "windowing": True, "hybrid": True, "context": 160},
    {"prefetch": True},
]


@both
def test_any_setting_at_any_token_is_torch_cpus(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, opened: Any
) -> None:
    """The same neurons and logits, and the same reads where none is made ahead, through every change."""
    text = iter(demo_text.tolist())
    setting = Setting(Ablation(), dataclasses.replace(RUN, dram="110%", context=128), demo_predictors)
    with (
        open_engine(demo_store, setting.ablation, setting.predictors, setting.run) as cpu,
        opened(demo_store, setting.ablation, setting.predictors, setting.run) as ours,
    ):
        prompt = [next(text) for _ in range(20)]
        assert difference(ours.prefill(prompt)[0], cpu.prefill(prompt)[0]) < TOLERANCE
        for change in [{}, *CHANGES]:
            setting = setting.changed(**change)
            ours.setting = cpu.setting = setting
            for count in (1, 1, 3):
                tokens = [next(text) for _ in range(count)]
                (found, cost), (wanted, known) = ours.prefill(tokens), cpu.prefill(tokens)
                assert difference(found, wanted) < TOLERANCE, change
                for name in ("active", "predicted", "loaded", "in_window", "window_trims"):
                    assert getattr(cost, name) == getattr(known, name), (change, name)
                if setting.ablation.prefetch:
                    continue
                # Read by halves of the staging here: each cut may part what one read, with its gap, would bring.
                half = len(ours.card.halves[0].bytes) // ours.shared.slot_bytes
                cuts = demo_store.layout.parts * (known.loaded // half)
                assert abs(cost.reads - known.reads) <= cuts, change
                assert abs(cost.read_bytes - known.read_bytes) <= cuts * (setting.run.coalesce_gap_bytes + 8192), change


@both
def test_one_wait_a_layer_and_nothing_compiled_anew(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, opened: Any
) -> None:
    run = dataclasses.replace(RUN, dram="110%")
    with opened(demo_store, Ablation(prefetch=True), demo_predictors, run) as engine:
        engine.prefill(demo_text[:20].tolist())
        engine.step(int(demo_text[20]))
        before, loaded = engine.card.machine.compilations, set()
        for token in demo_text[21:27].tolist():
            stats = engine.step(token)[1]
            loaded.add(stats.loaded)
            assert stats.waits == demo_store.spec.num_layers + 1  # the lists, and the logits
            assert stats.prefetched >= stats.wasted >= 0
        assert len(loaded) > 2
        assert engine.card.machine.compilations == before


@both
def test_more_neurons_than_slots(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, opened: Opened
) -> None:
    with opened(demo_store, ORACLE, None, dataclasses.replace(RUN, dram="49MiB")) as engine:
        assert min(engine.plan.slots) < 200
        found = [engine.step(token)[0] for token in demo_text[:4].tolist()]
        found += engine.prefill(demo_text[4:8].tolist(), keep=4)[0]
    assert difference(torch.stack(found), demo_logits[:8]) < TOLERANCE


def test_an_interrupted_token_leaves_no_trace(
    demo_store: Store, demo_text: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = demo_text[:40].tolist()
    with emulated(demo_store, dataclasses.replace(ORACLE, prefetch=True), None, RUN) as engine:
        engine.prefill(text[:6])
        wanted = torch.stack([engine.step(token)[0] for token in text[6:9]])
        for part in ("_sum_of", "_fetch", "_add_part", "_put_landed"):
            engine.reset()
            engine.prefill(text[:6])
            ffn, calls = type(engine.ffns[3]), []
            original = getattr(ffn, part)

            def interrupted(*args: Any, whole: Any = original, calls: list[int] = calls, **kwargs: Any) -> Any:
                calls.append(1)
                if len(calls) == 3:
                    raise KeyboardInterrupt
                return whole(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(ffn, part, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.prefill(text[10:40]) if part == "_add_part" else engine.step(text[20])
            assert engine.position == 6
            found = torch.stack([engine.step(token)[0] for token in text[6:9]])
            assert difference(found, wanted) < TOLERANCE, part


def test_without_a_card_it_is_one_line(demo_store: Store) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(
        DeviceError, match=r"^backend 'torch-cuda': torch has no CUDA device here; this needs an NVIDIA"
    ):
        load(demo_store.path, ablation=ORACLE, backend="torch-cuda")


@pytest.mark.device
def test_the_floor_goes_by_the_cards_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    assert memory_bandwidth("torch-cuda") > 2 * memory_bandwidth("torch-cpu")
