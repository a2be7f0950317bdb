"""The KV cache in 16 bits: half the DRAM, nearly the same logits, changed at any token with the text kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from command_line import run as command

from workbench.ablation import Ablation
from workbench.engines import open_engine
from workbench.errors import SpecError
from workbench.flash.store import Store
from workbench.spec import RunSpec

RUN = RunSpec(dram="200%", context=128)
ORACLE = Ablation(predictor="oracle")


@pytest.mark.parametrize("backend", ["torch-cpu", "mlx-cpu"])
@pytest.mark.parametrize(("dtype", "most"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_half_the_bytes_and_nearly_the_same_logits(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, backend: str, dtype: Any, most: float
) -> None:
    if backend == "mlx-cpu":
        pytest.importorskip("mlx.core")
    ids, run = demo_text[:48].tolist(), dataclasses.replace(RUN, kv_dtype=dtype)
    with open_engine(demo_store, ORACLE, None, RUN, backend) as engine:
        whole, layers = engine.plan.kv_bytes, demo_store.spec.num_layers
    with open_engine(demo_store, ORACLE, None, run, backend) as engine:
        widened = whole // layers  # of one layer, for its attention
        assert engine.plan.kv_bytes == whole // 2 + widened
        engine.prefill(ids[:32])
        found = torch.stack([engine.step(token)[0] for token in ids[32:]])
        off = float((found - demo_logits[32:48]).abs().max() / demo_logits[32:48].abs().max())
        assert 0 < off < most
        cache = engine._cache_layers()
        kept = [layer.storage or () if hasattr(layer, "storage") else (layer.keys, layer.values) for layer in cache]
        assert sum(part.nbytes for layer in kept for part in layer) == whole // 2


@pytest.mark.parametrize("backend", ["torch-cpu", "mlx-cpu"])
def test_changed_between_tokens_the_text_stays(
    demo_store: Store, demo_text: np.ndarray, demo_logits: torch.Tensor, backend: str
) -> None:
    if backend == "mlx-cpu":
        pytest.importorskip("mlx.core")
    ids = demo_text[:40].tolist()
    with open_engine(demo_store, ORACLE, None, RUN, backend) as engine:
        engine.prefill(ids[:30])
        off = 0.0
        for at, dtype in enumerate(("bfloat16", "float16", "float32"), 30):
            engine.run = dataclasses.replace(RUN, kv_dtype=dtype)  # type: ignore[arg-type]
            found = engine.step(ids[at])[0]
            off = float((found - demo_logits[at]).abs().max() / demo_logits[at].abs().max())
            assert off < 2e-2
            assert engine.position == at + 1
        assert off > 0  # what was rounded once does not come back


def test_a_dtype_that_is_none_is_refused_and_the_option_is_there() -> None:
    with pytest.raises(SpecError, match="kv_dtype='int8' is not one of float32, float16, bfloat16"):
        RunSpec(kv_dtype="int8")  # type: ignore[arg-type]
    for name in ("ablate", "generate", "plan", "tables"):
        assert "--kv-dtype" in command(name, "--help").stdout
