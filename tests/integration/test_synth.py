"""`workbench synth`: stores that run, dense models that transformers agrees with, figures as asked, runs that go on."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import fails, run
from transformers import AutoModelForCausalLM

import workbench as wb
from workbench import assets
from workbench.ablation import PAPER_ROWS
from workbench.errors import CheckpointError, PredictorError, SpecError, StoreError
from workbench.experiments import synth_model, synth_probe
from workbench.experiments.ablate import ablate
from workbench.experiments.geometries import GEOMETRIES, geometry
from workbench.experiments.synth import Synthesis, request_of, synth
from workbench.experiments.synth_model import Generator, Request, window_shares
from workbench.flash import manifest
from workbench.flash.store import verify
from workbench.models import family_of
from workbench.predictor.low_rank import Predictors
from workbench.report import read_ablation, read_predictors
from workbench.spec import RunSpec

COMMON = {
    "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "opt": {"model_type": "opt", "ffn_dim": 512, "word_embed_proj_dim": 128, "pad_token_id": 0},
    "post-norm": {
        "model_type": "opt", "ffn_dim": 512, "word_embed_proj_dim": 64, "pad_token_id": 0,
        "do_layer_norm_before": False,
    },
    "llama": {"model_type": "llama", "intermediate_size": 384, "num_key_value_heads": 2, "hidden_act": "relu"},
    "phi": {"model_type": "phi", "intermediate_size": 512, "hidden_act": "relu"},
    "falcon": {"model_type": "falcon", "activation": "relu"},
    "persimmon": {"model_type": "persimmon", "intermediate_size": 512},
}  # fmt: skip
TINY = {name: {**COMMON, **fields} for name, fields in TINY.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Synthesis]:
    """The OPT, in bfloat16, with its dense checkpoint at PATH/dense."""
    root = tmp_path_factory.mktemp("synth")
    return root, synth(TINY["opt"], root / "store", checkpoint=root / "dense")


def weights(store: Path) -> dict[str, str]:
    """SHA-256 of each weight file."""
    files = json.loads((store / "store.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items()}


@pytest.mark.parametrize("name", TINY)
def test_oracle_gives_the_dense_logits(name: str, tmp_path: Path) -> None:
    result = synth(TINY[name], tmp_path / "store", checkpoint=tmp_path / "dense", dtype="float32")
    ids = np.random.default_rng(3).integers(3, 512, 48)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = dense(torch.from_numpy(ids)[None]).logits[0]
    assert wanted.std() > 0.5
    with wb.load(tmp_path / "store", ablation=wb.Ablation(predictor="oracle"), dram="8MiB") as engine:
        assert (engine.logits(ids) - wanted).abs().max() <= 1e-4
    # the true factors miss next to nothing, so they give nearly the same
    with wb.load(tmp_path / "store", predictors=tmp_path / "store-predictors", dram="8MiB") as engine:
        assert (engine.logits(ids) - wanted).abs().max() <= 0.1
    mean = result.record["mean"]
    # a tiny model scatters around the shares that it was solved for
    assert mean["active_share"] == pytest.approx(0.03, rel=0.2)
    assert mean["predicted_share"] == pytest.approx(0.10, rel=0.15)
    assert mean["kept_share"] == pytest.approx(0.24, rel=0.15)
    assert mean["new_share"] == pytest.approx(0.024, rel=0.25)
    assert mean["false_negative"] < 0.01
    assert result.record["rows"][-1]["active_share"] > 1.5 * result.record["rows"][0]["active_share"]


def test_thresholds_of_fatrelu_are_met(tmp_path: Path) -> None:
    config = {**TINY["llama"], "hidden_act": "fatrelu", "hidden_act_param": [0.5, 0.0, 0.2]}
    result = synth(config, tmp_path / "store", dtype="float32")
    assert result.store.spec.thresholds == (0.5, 0.0, 0.2)
    assert result.record["mean"]["active_share"] == pytest.approx(0.03, rel=0.2)
    ids = np.random.default_rng(3).integers(3, 512, 32)
    with wb.load(tmp_path / "store", ablation=wb.Ablation(predictor="oracle"), dram="8MiB") as engine:
        wanted = engine.logits(ids)
    with wb.load(tmp_path / "store", predictors=tmp_path / "store-predictors", dram="8MiB") as engine:
        assert (engine.logits(ids) - wanted).abs().max() <= 0.1


def test_reuse_is_as_published_where_a_layer_is_wide() -> None:
    spec = family_of(TINY["opt"]).spec({**TINY["opt"], "num_hidden_layers": 32})
    request = Request("wide", spec)
    densities = [request.density(layer) for layer in range(32)]
    assert sum(densities) == pytest.approx(32)
    assert [d > 1 for d in densities] == [False] * 28 + [True] * 4
    constant = synth_model.solve_constant(request)
    shares = np.array([window_shares(constant, 0.10 * density) for density in densities]).mean(0)
    assert shares == pytest.approx((0.24, 0.024), rel=0.03)
    # few neurons are popular: a tenth of them does most of the work
    popularity = synth_model.popularity(1000)
    assert float(popularity[-100:].mean()) > 1.8


def test_the_store_is_that_of_the_checkpoint(made: tuple[Path, Synthesis], tmp_path: Path) -> None:
    root, result = made
    verify(root / "store")
    assert result.store.dtype == "bfloat16"
    wb.convert(root / "dense", tmp_path / "converted")
    assert weights(tmp_path / "converted") == weights(root / "store")
    assert not [path.name for path in root.iterdir() if "partial" in path.name]


def test_it_is_marked_synthetic_and_an_ablation_reports_the_same_reuse(made: tuple[Path, Synthesis]) -> None:
    root, result = made
    card = read_predictors(root / "store-predictors")
    assert card.about["synthetic"] is True
    assert "synthetic" in (root / "store-predictors" / "CARD.md").read_text()
    assert result.record["run"]["synthetic"] is True
    text = np.random.default_rng(5).integers(3, 512, 120)
    record = ablate(
        result.store, Predictors.load(root / "store-predictors"), text, prompt=40, tokens=64,
        rows={"all": PAPER_ROWS["+ bundling (all)"]}, run=RunSpec(dram="8MiB", context=256),
    )  # fmt: skip
    row = read_ablation(record).rows[0]
    assert record["run"]["synthetic"] is True
    assert row.window_trims == 0
    assert row.in_window is not None
    assert row.loaded is not None
    mean = result.record["mean"]
    assert row.in_window / result.store.spec.ffn_neurons == pytest.approx(mean["kept_share"], rel=0.15)
    assert row.loaded / result.store.spec.ffn_neurons == pytest.approx(mean["new_share"], rel=0.25)


@pytest.mark.parametrize("at", ["embed", "layer.1", "head"])
def test_an_interrupted_run_goes_on(at: str, made: tuple[Path, Synthesis], tmp_path: Path) -> None:
    def stop(part: str, done: int, total: int) -> None:
        if part == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth(TINY["opt"], tmp_path / "store", checkpoint=tmp_path / "dense", progress=stop)
    assert not (tmp_path / "store").exists()
    seen: list[int] = []
    synth(TINY["opt"], tmp_path / "store", checkpoint=tmp_path / "dense", tell=lambda layer, _: seen.append(layer))
    assert seen == [0, 1, 2]
    assert weights(tmp_path / "store") == weights(made[0] / "store")
    for name in ("predictors.safetensors", "../dense/model-00003-of-00004.safetensors"):
        one, two = ((root / "store-predictors" / name).read_bytes() for root in (tmp_path, made[0]))
        assert one == two
    assert not [path.name for path in tmp_path.iterdir() if "partial" in path.name]


def test_the_predictors_dtype_is_no_part_of_the_weights(made: tuple[Path, Synthesis], tmp_path: Path) -> None:
    other = synth(TINY["opt"], made[0] / "store", predictors=tmp_path / "half", predictor_dtype="float16")
    assert other.store.digest == made[1].store.digest
    layers = [(low, high) for low, high in zip(made[1].predictors.layers, other.predictors.layers, strict=True)]
    assert {(low.stored, high.stored) for low, high in layers} == {("int8", "float16")}
    for low, high in layers:
        assert 1.9 < high.a.nbytes / low.a.nbytes < 2.1
        x = np.random.default_rng(0).standard_normal(low.a.shape[1]).astype(np.float32)
        spread = np.abs(high.scores(x)).max()
        assert np.abs(low.scores(x) - high.scores(x)).max() < 0.03 * spread
    with pytest.raises(PredictorError, match="already holds other predictors"):
        synth(TINY["opt"], made[0] / "store", predictors=tmp_path / "half")
    with pytest.raises(SpecError, match="predictor_dtype 'int4' is not one of int8, float16, float32"):
        request_of(TINY["opt"], predictor_dtype="int4")  # type: ignore[arg-type]


def test_what_is_there_is_opened_and_what_is_missing_is_made(made: tuple[Path, Synthesis], tmp_path: Path) -> None:
    shutil.copytree(made[0], tmp_path / "all")
    root = tmp_path / "all"
    before = (root / "store-predictors" / "predictors.safetensors").read_bytes()
    again = synth(TINY["opt"], root / "store", tell=lambda layer, row: pytest.fail("made again"))
    assert again.record["mean"] == made[1].record["mean"]
    shutil.rmtree(root / "store-predictors")
    shutil.rmtree(root / "dense")
    synth(TINY["opt"], root / "store", checkpoint=root / "dense")
    assert (root / "store-predictors" / "predictors.safetensors").read_bytes() == before
    shutil.rmtree(root / "store")
    synth(TINY["opt"], root / "store")
    assert weights(root / "store") == weights(made[0] / "store")


def test_rows_do_not_depend_on_how_they_are_read() -> None:
    with Generator(request_of({**TINY["llama"], "vocab_size": 20000})) as generator:
        whole = generator.outside("model.embed_tokens.weight")
        parts = [generator.outside("model.embed_tokens.weight", i, i + 2500) for i in range(0, 20000, 2500)]
        assert torch.equal(torch.cat(parts), whole)
        assert whole.float().std() == pytest.approx(2.5 / 128**0.5, rel=0.05)


def test_text_does_not_run_in_circles(tmp_path: Path) -> None:
    """Else a window would find each token's neurons loaded, and generated text would be faster than any other."""
    for name in ("opt", "phi"):
        result = synth({**TINY[name], "vocab_size": 9000, "num_hidden_layers": 2}, tmp_path / name)
        with wb.load(result.store.path, ablation=wb.Ablation(predictor="oracle"), dram="32MiB") as engine:
            tokens = [step.token for step in engine.generate("Once upon a time", max_new_tokens=40)]
        seen_before = [token in tokens[max(0, i - 4) : i] for i, token in enumerate(tokens)]
        assert sum(seen_before) <= 8


@pytest.mark.parametrize("name", GEOMETRIES)
def test_named_geometries_can_be_run(name: str) -> None:
    request = request_of(name)
    assert request.spec.config["synthetic"] is True
    assert geometry(name)[0] == name
    assert Generator(request).constant == pytest.approx(0.546, abs=0.01)
    billions = sum(torch.Size(shape).numel() for shape in Generator(request).shapes.values()) / 1e9
    published = {
        "opt-125m": 0.125, "opt-350m": 0.331, "opt-1.3b": 1.316, "opt-2.7b": 2.652, "opt-6.7b": 6.658,
        "opt-13b": 12.853, "opt-30b": 29.975, "opt-66b": 65.716, "falcon-7b": 6.922, "persimmon-8b": 9.4,
        "phi-2": 2.780, "llama-2-7b": 6.738,
    }  # fmt: skip
    assert billions == pytest.approx(published[name], rel=0.01)


def test_commands(tmp_path: Path) -> None:
    config = tmp_path / "some-model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({**TINY["llama"], "hidden_act": "silu", "vocab_size": 8192}))
    store, record = tmp_path / "store", tmp_path / "synth.json"
    assert "--activation" in fails("synth", config, store)
    done = run(
        "synth", config, store, "--activation", "relu", "--active", "0.05", "--predicted", "0.12", "--json", record
    )
    assert done.returncode == 0, done.stderr
    assert "some-model, synthetic" in done.stdout
    assert "GB/min" in done.stdout
    mean = json.loads(record.read_text())["mean"]
    assert mean["active_share"] == pytest.approx(0.05, rel=0.15)
    assert mean["predicted_share"] == pytest.approx(0.12, rel=0.15)
    predictors = tmp_path / "store-predictors"
    done = run(
        "generate", store, "--prompt", "Once", "--predictors", predictors, "--dram", "8MiB", "--max-new-tokens", "4"
    )
    assert done.returncode == 0, done.stderr
    done = run(
        "ablate", store, "--data", assets.path("data/text"), "--predictors", predictors, "--dram", "8MiB", "--prompt",
        "8", "--tokens", "4", "--json", record,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(record.read_text())["run"]["synthetic"] is True
    assert "synthetic" in done.stdout


def test_bad_input_is_one_line(made: tuple[Path, Synthesis], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made[0]
    line = fails("synth", "opt-7b", tmp_path / "store")
    assert all(name in line for name in ("opt-7b", "opt-6.7b", "persimmon-8b"))
    (tmp_path / "bad.json").write_text("{")
    assert "not JSON" in fails("synth", tmp_path / "bad.json", tmp_path / "store")
    (tmp_path / "bad.json").write_text('{"model_type": "bert"}')
    assert "bert" in fails("synth", tmp_path / "bad.json", tmp_path / "store")
    assert "predicted" in fails("synth", "opt-125m", tmp_path / "store", "--active", "0.2")
    assert "different places" in fails("synth", "opt-125m", tmp_path / "store", "--checkpoint", tmp_path / "store")
    with pytest.raises(StoreError, match="already holds a store"):
        synth(TINY["opt"], root / "store", predictors=tmp_path / "p", seed=1)
    with pytest.raises(PredictorError, match="already holds other predictors"):
        synth(TINY["opt"], tmp_path / "store", predictors=root / "store-predictors", seed=1)
    with pytest.raises(StoreError, match="not this request's checkpoint"):
        synth(TINY["opt"], tmp_path / "store", checkpoint=root / "dense", seed=1)
    with pytest.raises(SpecError, match="max_positions"):
        synth({**TINY["opt"], "max_position_embeddings": 64}, tmp_path / "store")
    with pytest.raises(CheckpointError, match="hidden_size"):
        synth({**TINY["opt"], "hidden_size": 0}, tmp_path / "store")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 10 << 30))
    assert "needed" in fails("synth", "opt-6.7b", tmp_path / "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json"]


def test_an_unfinished_run_of_another_request_is_refused(tmp_path: Path) -> None:
    def stop(part: str, done: int, total: int) -> None:
        if part == "layer.1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth(TINY["opt"], tmp_path / "store", progress=stop)
    with pytest.raises(StoreError, match="another request"):
        synth(TINY["opt"], tmp_path / "store", seed=1)
    state = tmp_path / "store-predictors.partial" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(StoreError, match="damaged"):
        synth(TINY["opt"], tmp_path / "store")
    assert manifest.MANIFEST not in [path.name for path in (tmp_path / "store.partial").iterdir()]


def test_memory_follows_the_layer_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is made, the weights of those before it are gone."""
    held: list[int] = []
    begin = synth_probe.Probe.run

    def counting(self: Any, layer: int) -> Any:
        gc.collect()
        held.append(sum(torch.is_tensor(o) and o.shape == (512, 128) and o.is_cpu for o in gc.get_objects()))
        return begin(self, layer)

    monkeypatch.setattr(synth_probe.Probe, "run", counting)
    synth({**TINY["opt"], "num_hidden_layers": 6}, tmp_path / "store")
    assert len(held) == 6
    assert set(held) == {1}  # a block of the embedding
