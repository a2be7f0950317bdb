"""Reading ahead: what comes out is the same, and everything that was read is counted."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench.ablation import Ablation
from workbench.engines import open_engine
from workbench.engines.prefetch import MARGIN_STEP, MOST_MARGIN, Arrived, ReadAhead, next_margin
from workbench.errors import AblationError, ReaderError
from workbench.experiments.ablate import ablate
from workbench.flash.reader import FlashReader, ReadStats
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.report import ablation_table, read_ablation
from workbench.spec import RunSpec

RUN = RunSpec(dram="300%", window=2, context=64)
ON = Ablation(prefetch=True)


@pytest.mark.parametrize(
    "ablation",
    [ON, dataclasses.replace(ON, windowing=False), dataclasses.replace(ON, bundling=False, coalesce=False),
     dataclasses.replace(ON, predictor="oracle"), dataclasses.replace(ON, hybrid=False, io="buffered")],
    ids=lambda a: a.describe(),
)  # fmt: skip
def test_logits_and_neurons_are_the_same(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, ablation: Ablation
) -> None:
    """To the bit, with slots for all; every byte that was read is either needed or called wasted."""
    text = demo_text[:16].tolist()
    runs = []
    for chosen in (dataclasses.replace(ablation, prefetch=False), ablation):
        with open_engine(demo_store, chosen, demo_predictors, RUN) as engine:
            engine.prefill(text[:8])
            runs.append([engine.step(token) for token in text[8:]])
    for (wanted, before), (found, after) in zip(*runs, strict=True):
        assert torch.equal(wanted, found)
        for name in ("active", "predicted", "loaded", "in_window"):
            assert getattr(before, name) == getattr(after, name)
        assert (before.prefetched, before.wasted_bytes, before.hidden_io_ms) == (0, 0, 0.0)
        assert after.wasted <= after.prefetched
        assert 0 <= after.wasted_bytes <= after.read_bytes
        assert after.total_ms == pytest.approx(after.io_ms + after.mem_ms + after.compute_ms)
        if not ablation.coalesce:  # no gaps are read: bytes are a matter of which neurons came
            assert after.read_bytes - after.wasted_bytes == pytest.approx(before.read_bytes, rel=0.02)
    stats = [after for _, after in runs[1]]
    assert sum(s.prefetched for s in stats) > 0
    assert sum(s.wasted for s in stats) < sum(s.prefetched for s in stats)  # some guesses were right


@pytest.mark.parametrize("predictor", ["low_rank", "oracle"])
def test_more_neurons_than_slots(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, predictor: Any
) -> None:
    """A token's neurons come in parts: the next layer's are read ahead once the last of them has been taken."""
    text, runs = demo_text[:16].tolist(), []
    for ahead in (False, True):
        with open_engine(demo_store, Ablation(predictor=predictor, prefetch=ahead), demo_predictors, RUN) as engine:
            for ffn in engine.ffns:
                ffn.set_slots(72)
            runs.append([engine.step(token) for token in text])
    for (wanted, before), (found, after) in zip(*runs, strict=True):
        assert (found - wanted).abs().max() < 1e-4
        assert before.predicted == after.predicted
    assert max(stats.predicted for _, stats in runs[0]) > 2 * 72 * demo_store.spec.num_layers
    assert sum(stats.prefetched for _, stats in runs[1]) > sum(stats.wasted for _, stats in runs[1]) > 0


def test_the_buffer_is_in_the_plan(demo_store: Store, demo_predictors: Predictors) -> None:
    with open_engine(demo_store, ON, demo_predictors, RUN) as engine:
        assert engine.plan.ahead_bytes == demo_store.spec.d_ff // 8 * engine.plan.slot_bytes
        assert len(engine.shared.ahead.buffer) == engine.plan.ahead_bytes
        engine.ablation = Ablation()
        engine.settle()
        assert engine.shared.ahead is None
        assert engine.plan.ahead_bytes == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_a_read_ahead_that_fails_is_the_tokens_failure(
    demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = demo_text[:16].tolist()
    with open_engine(demo_store, ON, demo_predictors, RUN) as engine:
        engine.prefill(text[:4])
        wanted = engine.step(text[4])[0]
        engine.reset()
        engine.prefill(text[:4])
        main, whole = threading.current_thread(), FlashReader.read

        def failing(self: FlashReader, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not main:
                raise ReaderError("flash went away")
            return whole(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(FlashReader, "read", failing)
            with pytest.raises(ReaderError, match="flash went away"):
                engine.step(text[9])
        assert engine.position == 4
        # the window is gone, so that slots are in another order, and sums too
        assert torch.allclose(engine.step(text[4])[0], wanted, atol=1e-4)


@pytest.mark.parametrize("predictor", ["off"])
def test_where_nothing_is_predicted_it_is_refused(predictor: Any) -> None:
    with pytest.raises(AblationError, match=r"prefetch=True with predictor='off' is undefined.*set prefetch=False"):
        Ablation(predictor=predictor, windowing=False, prefetch=True)


def test_mlx_engines_refuse_it(demo_store: Store, demo_predictors: Predictors) -> None:
    pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'flash-workbench[mlx]'")
    with pytest.raises(AblationError, match=r"prefetch=True is not there with backend mlx-cpu"):
        open_engine(demo_store, ON, demo_predictors, RUN, "mlx-cpu")


def test_a_record_says_what_was_wasted(demo_store: Store, demo_text: np.ndarray, demo_predictors: Predictors) -> None:
    rows = {"all": Ablation(), "all, prefetch": ON}
    record = ablate(demo_store, demo_predictors, demo_text, rows=rows, run=RUN, prompt=8, tokens=6)
    plain, ahead = record["rows"]
    assert "wasted_bytes" not in plain
    assert 0 <= ahead["wasted"] <= ahead["prefetched"]
    assert 0 <= ahead["wasted_bytes"] <= ahead["flash_bytes"]
    assert ahead["hidden_io_ms"] > 0
    read = read_ablation(record)
    assert read.rows[1].wasted_bytes == ahead["wasted_bytes"]
    (note,) = (text for text in ablation_table(read).notes if text.startswith("all, prefetch: "))
    assert "neurons a token read ahead" in note
    assert "a token wasted" in note


def test_read_ahead_takes_what_there_is_room_for(tmp_path: Path) -> None:
    ahead = ReadAhead(np.zeros(4 * 8 + 5, np.uint8), 8)
    assert ahead.capacity == 4
    assert ahead.take() is None
    seen: list[Any] = []

    def read(ids: np.ndarray, buffer: np.ndarray) -> ReadStats:
        seen.append((ids.tolist(), threading.current_thread().name))
        return ReadStats(len(ids) * 8, 1, 0.5)

    ahead.start(np.arange(9, dtype=np.int32), read)
    arrived = ahead.take()
    assert arrived is not None
    assert seen[0][0] == arrived.ids.tolist() == [0, 1, 2, 3]
    assert seen[0][1].startswith("read-ahead")
    assert arrived.hidden_s == pytest.approx(0.5, abs=0.4)
    assert ahead.take() is None
    ahead.start(np.zeros(0, np.int32), read)
    assert ahead.take() is None

    def fails(ids: np.ndarray, buffer: np.ndarray) -> ReadStats:
        raise ReaderError("gone")

    ahead.start(np.arange(2, dtype=np.int32), fails)
    ahead.drain()
    assert ahead.take() is None
    ahead.start(np.arange(2, dtype=np.int32), fails)
    with pytest.raises(ReaderError, match="gone"):
        ahead.take()
    ahead.close()


def test_guesses_get_surer_only_where_waste_costs_time() -> None:
    ids, nothing = np.arange(100, dtype=np.int32), np.zeros(0, np.uint8)
    late = Arrived(ids, nothing, ReadStats(1, 1, 1.0), 0.5)
    in_time = Arrived(ids, nothing, ReadStats(1, 1, 1.0), 0.0)
    assert next_margin(1.0, late, 50) == pytest.approx(1.0 + MARGIN_STEP)
    assert next_margin(1.0, late, 10) == pytest.approx(1.0 - MARGIN_STEP)
    assert next_margin(1.0, in_time, 50) == pytest.approx(1.0 - MARGIN_STEP)
    assert next_margin(0.0, in_time, 0) == 0.0
    assert next_margin(MOST_MARGIN, late, 99) == MOST_MARGIN
