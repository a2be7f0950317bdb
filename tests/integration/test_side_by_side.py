"""The comparison with other programs: contenders of one tiny model choose its tokens, and what was measured stays."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from workbench.experiments.synth import request_of, synth

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import contenders  # noqa: E402
import memory_limit  # noqa: E402
import side_by_side  # noqa: E402
import to_gguf  # noqa: E402

OPT = {
    "model_type": "opt", "activation_function": "relu", "num_hidden_layers": 2, "hidden_size": 64,
    "word_embed_proj_dim": 64, "ffn_dim": 256, "num_attention_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 128, "do_layer_norm_before": True, "tie_word_embeddings": True,
    "architectures": ["OPTForCausalLM"],
}  # fmt: skip
needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is optional")
needs_limit = pytest.mark.skipif(
    os.geteuid() != 0 or not (memory_limit.CONTROLLER / "memory.limit_in_bytes").exists(), reason=memory_limit.NEEDED
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny OPT: checkpoint, store, predictors, and the request of all contenders."""
    folder = tmp_path_factory.mktemp("side")
    checkpoint = folder / "checkpoint"
    synth(OPT, folder / "store", predictors=folder / "predictors", checkpoint=checkpoint, dtype="float32")
    text = np.random.default_rng(1).integers(3, 256, 20).tolist()
    return {
        "checkpoint": str(checkpoint), "store": str(folder / "store"), "predictors": str(folder / "predictors"),
        "work": str(folder / "work"), "model_type": "opt", "dtype": "float32", "text": text, "prompt": 8,
        "warm_up": 4, "limit": None, "threads": 1, "window": 4, "half_window": 1, "accelerate_bytes": 1 << 20,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["oracle", "naive", *(pytest.param(n, marks=needs_accelerate) for n in ("mmap", "accelerate"))]
)
def test_exact_contenders_choose_the_dense_model_s_tokens(made: dict[str, Any], name: str) -> None:
    truth, found = contenders.dense(made), contenders.CONTENDERS[name](made)
    assert found["choices"] == truth["choices"]
    assert len(found["ms"]) == len(made["text"]) - made["prompt"] - made["warm_up"]
    np.testing.assert_allclose(found["last_logits"], truth["last_logits"], atol=1e-4)


def test_ours_says_what_it_read(made: dict[str, Any]) -> None:
    found = contenders.everything(made)
    assert found["flash_bytes"] > 0
    assert found["dram_bytes"] > 0
    assert 0 < found["new_share"] <= found["predicted_share"] <= 1


def test_results_are_compared_by_medians_and_tokens() -> None:
    results = {
        "dense": {"median_ms": 300.0, "choices": [1, 2, 3, 4], "last_logits": [1.0, -2.0]},
        "oracle": {"median_ms": 200.0, "choices": [1, 2, 3, 4], "last_logits": [1.0, -2.5]},
        "all": {"median_ms": 250.0, "choices": [1, 2, 9, 4]},
        "all + coalesce": {"median_ms": 200.0, "choices": [1, 2, 3, 4]},
        "all, half": {"median_ms": 450.0, "choices": [1, 2]},
        "accelerate": {"median_ms": 5000.0, "choices": [1, 2]},
        "airllm": {"failed": "OSError: no disk"},
    }
    found = side_by_side.compared(results)
    assert found["accelerate_against_all"] == 20
    assert (found["ours"], found["accelerate_against_ours"]) == ("all + coalesce", 25)
    assert found["half_against_dense"] == 1.5
    assert found["airllm_against_all"] is None
    assert found["agrees"]["all"] == "3 of 4"
    assert found["agrees"]["accelerate"] == "2 of 2"
    assert found["oracle_logits_off_by"] == 0.25


@needs_limit
def test_a_failure_is_a_line_and_what_was_measured_stays(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(side_by_side, "drop_page_cache", lambda: None)

    def measured(interpreter: str) -> dict[str, Any]:
        command = [
            "side_by_side.py", made["checkpoint"], made["store"], made["predictors"], "--work", str(tmp_path),
            "--limit", "2GiB", "--prompt", "8", "--warm-up", "4", "--tokens", "4", "--contenders", "dense",
            "all + coalesce", "--python", f"all + coalesce={interpreter}",
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", command)
        assert side_by_side.main() == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    record = measured("/bin/false")
    dense, ours = (record["contenders"][name] for name in ("dense", "all + coalesce"))
    assert dense["limit_bytes"] is None
    assert dense["peak_bytes"] > 0
    assert ours["failed"] == "exit status 1: nothing was said"
    assert ours["limit_bytes"] == 2 << 30
    assert record["versions"]["torch"] == torch.__version__
    again = measured(sys.executable)["contenders"]
    assert again["dense"] == dense
    assert again["all + coalesce"]["choices"] == dense["choices"]


def test_a_machine_without_the_controller_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_limit, "CONTROLLER", tmp_path / "none")
    with pytest.raises(memory_limit.NoMemoryLimit, match="needs root"), memory_limit.MemoryLimit("x", 1 << 30):
        pass


def test_gguf_has_every_tensor_and_rotates_pairs_side_by_side(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    checkpoint, target = make_tiny(tmp_path / "llama", "llama"), tmp_path / "model.gguf"
    to_gguf.to_gguf(checkpoint, target)
    read = {tensor.name: np.asarray(tensor.data) for tensor in gguf.GGUFReader(target).tensors}
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    own = {to_gguf.gguf_name(name): tensor.detach() for name, tensor in model.named_parameters()}
    assert set(read) >= set(own)
    np.testing.assert_array_equal(read["blk.1.ffn_down.weight"], own["blk.1.ffn_down.weight"].numpy())
    heads = model.config.num_attention_heads
    rows = own["blk.0.attn_q.weight"].numpy().reshape(heads, 2, -1, model.config.hidden_size)
    got = read["blk.0.attn_q.weight"].reshape(heads, -1, 2, model.config.hidden_size)
    np.testing.assert_array_equal(got[:, :, 0], rows[:, 0])
    np.testing.assert_array_equal(got[:, :, 1], rows[:, 1])


def test_only_a_llama_is_written_as_gguf(tmp_path: Path, made: dict[str, Any]) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="only a llama"):
        to_gguf.to_gguf(Path(made["checkpoint"]), tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="has not"):
        to_gguf.gguf_name("model.layers.0.mlp.extra.weight")


def test_geometries_of_the_benchmarks_are_models_that_run() -> None:
    for file in sorted((BENCHMARKS / "geometries").glob("*.json")):
        request = request_of(file, dtype="float32")
        assert request.spec.num_layers == 12
        assert request.spec.d_model == 2048
