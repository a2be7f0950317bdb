"""A prompt's neurons: the union of what its tokens use, or all of them in one stream, whichever is asked for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from command_line import run as command

from workbench.ablation import Ablation
from workbench.engines.torch_cpu import TorchCpuEngine
from workbench.errors import AblationError, SpecError
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

RUN = RunSpec(dram="200%", context=160)
DENSE = dataclasses.replace(RUN, prompt_neurons="dense")


@pytest.mark.parametrize("ablation", [Ablation(), Ablation(bundling=False), Ablation(windowing=False)])
@pytest.mark.parametrize("tokens", [1, 64])
def test_all_neurons_give_the_dense_models_logits(
    demo_store: Store,
    demo_predictors: Predictors,
    demo_text: np.ndarray,
    demo_logits: torch.Tensor,
    ablation: Ablation,
    tokens: int,
) -> None:
    ids, layout = demo_text[: tokens + 1].tolist(), demo_store.layout
    with TorchCpuEngine(demo_store, ablation, demo_predictors, DENSE) as engine:
        logits, stats = engine.prefill(ids[:-1], keep=tokens)
        each = layout.bundle_stride if ablation.bundling else layout.parts * layout.row_bytes
        assert stats.loaded == demo_store.spec.ffn_neurons
        assert stats.read_bytes >= demo_store.spec.ffn_neurons * (each if ablation.bundling else layout.row_bytes)
        assert stats.predicted == tokens * demo_store.spec.ffn_neurons
        after = engine.step(ids[-1])[1]
    assert (logits - demo_logits[:tokens]).abs().max() < 1e-4
    with TorchCpuEngine(demo_store, ablation, demo_predictors, RUN) as engine:
        engine.prefill(ids[:-1])
        usual = engine.step(ids[-1])[1]
    # the window is that of the last tokens all the same; the text before differs, and so do a few neurons
    assert abs(after.loaded - usual.loaded) < 0.1 * usual.predicted


def test_auto_is_the_cheaper_by_what_is_read(demo_store: Store, demo_text: np.ndarray) -> None:
    """A read counts as much as the bytes of a gap that is as cheap to read as to skip."""
    ids = demo_text[:64].tolist()
    whole = demo_store.spec.ffn_neurons

    def loaded(coalesce: bool, gap: int, way: str) -> int:
        run = dataclasses.replace(RUN, prompt_neurons=way, coalesce_gap_bytes=gap)
        with TorchCpuEngine(demo_store, Ablation(predictor="oracle", coalesce=coalesce), None, run) as engine:
            return engine.prefill(ids)[1].loaded

    union = loaded(True, 16 << 10, "union")
    assert union < whole
    assert loaded(True, 16 << 10, "auto") == union  # merged where that is cheaper: never more than all
    assert loaded(False, 0, "auto") == union  # reads cost nothing, bytes do
    assert loaded(False, 1 << 20, "auto") == whole  # reads cost much


def test_what_is_not_there_is_refused(demo_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="prompt_neurons='all' is not one of union, dense, auto"):
        RunSpec(prompt_neurons="all")  # type: ignore[arg-type]
    monkeypatch.setattr(TorchCpuEngine, "prompt_ways", ("union",))
    with pytest.raises(AblationError, match="prompt_neurons='dense'"):
        TorchCpuEngine(demo_store, Ablation(predictor="oracle"), None, DENSE)
    shown = command("generate", "--help").stdout
    assert "--prompt-neurons" in shown
