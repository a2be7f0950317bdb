"""Predictors trained on a tiny real model: quality, resuming to the identical result, files, refusals."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from predictor_runs import D_FF, D_MODEL, LAYERS, SPEC, write_model, write_text, write_tokenizer
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, make_tiny

from workbench.capture.activations import FfnTap, active_neurons, dense, run_trunk, tokenizer
from workbench.capture.text import documents, split_of, token_windows
from workbench.errors import CheckpointError, DataError, DeviceError, PredictorError, TrainingError
from workbench.experiments.sparsity import analyze_sparsity
from workbench.models import family
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import Predictors
from workbench.predictor.taps import Sample, Taps, View
from workbench.predictor.train import train_predictors
from workbench.spec import ModelSpec


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "opt", data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    """Predictors trained without interruption."""
    out = tmp_path_factory.mktemp("whole") / "predictors"
    train_predictors(model, data, SPEC, out=out)
    return out


def same(one: Path, other: Path) -> bool:
    """Identical files, apart from measured times and the name."""
    cards = [json.loads((p / "card.json").read_text()) for p in (one, other)]
    for card in cards:
        del card["measured"]
    weights = [(p / "predictors.safetensors").read_bytes() for p in (one, other)]
    return cards[0] == cards[1] and weights[0] == weights[1]


def test_card_holds_what_an_independent_count_finds(whole: Path, model: Path, data: Path) -> None:
    predictors = Predictors.load(whole)
    loaded = dense(model)
    ups = family("opt").activated_linears(loaded)
    held_out = (text for text in documents(data) if split_of(text, SPEC.validation_share) == "test")
    windows = [w for _, w in zip(range(32), token_windows(held_out, tokenizer(model), 32), strict=False)]
    active = predicted = missed = 0
    layer = 1
    with FfnTap(ups) as tap:
        for window in windows:
            run_trunk(loaded, window[None])
            for x, z in zip(tap.inputs[layer].numpy(), tap.pre[layer].numpy(), strict=True):
                guess, truth = set(predictors.layers[layer].predict(x)), set(np.flatnonzero(z > 0))
                active, predicted, missed = active + len(truth), predicted + len(guess), missed + len(truth - guess)
    entry = predictors.card["layers"][layer]
    tokens = len(windows) * 32
    assert tokens == 1024
    assert entry["active"] * tokens == pytest.approx(active, abs=2)  # batches differ in the last bit
    assert entry["predicted"] * tokens == pytest.approx(predicted, abs=4)
    assert entry["false_negative"] == pytest.approx(missed / active, abs=2e-3)
    assert 0.01 < entry["active"] / D_FF < 0.3


def test_card_and_files(whole: Path, model: Path, data: Path) -> None:
    predictors = Predictors.load(whole)
    card = predictors.card
    assert [layer.rank for layer in predictors.layers] == [6, 6, 10]
    assert [layer.a.shape for layer in predictors.layers] == [(6, D_MODEL)] * 2 + [(10, D_MODEL)]
    for layer, entry in zip(predictors.layers, card["layers"], strict=True):
        assert entry["false_negative"] == pytest.approx(SPEC.false_negative, abs=0.04)
        assert 1 - entry["false_negative"] < entry["predicted_over_active"] < D_FF / entry["active"]
        rates = [point["predicted_over_active"] for point in entry["frontier"]]
        assert rates == sorted(rates, reverse=True)
        assert np.array_equal(layer.packed()[0].astype(np.float32), layer.a)
    assert card["steps"] == 12
    assert card["loss_curve"]["step"] == list(range(1, 13))
    first, last = (np.mean(card["loss_curve"]["loss"][i]) for i in (0, -1))
    assert last < first
    factors = (6 + 6 + 10) * (D_MODEL + D_FF) + LAYERS * D_FF
    assert card["weight_share"] == pytest.approx(factors / (LAYERS * 2 * D_MODEL * D_FF))
    scales = (6 + 6 + 10) + LAYERS * D_FF
    assert predictors.nbytes == (factors - LAYERS * D_FF) + 4 * scales + 4 * LAYERS * D_FF == card["nbytes"]
    assert (whole / "predictors.safetensors").stat().st_size > predictors.nbytes
    assert {layer.packed()[1].dtype for layer in predictors.layers} == {np.dtype(np.int8)}
    assert card["run"] == {"dtype": "float32", "micro_windows": 8, "memory_bytes": 512 << 20, "processes": 1}
    trained_on = [t for t in documents(data) if split_of(t, SPEC.validation_share) == "train"]
    assert 0 < card["data"]["train"]["documents"] <= len(trained_on)
    assert card["measured"]["share"] > 0
    text = (whole / "CARD.md").read_text()
    assert text.count("\n| ") >= 2 * LAYERS
    assert str(model.parent) not in text + json.dumps(card)


def test_other_thresholds_can_be_chosen(whole: Path) -> None:
    predictors = Predictors.load(whole)
    assert predictors.false_negatives == [0.01, 0.02, 0.05, 0.1]
    strict = predictors.at(0.01)
    assert [e["threshold"] for e in strict.card["layers"]] == [layer.threshold for layer in strict.layers]
    assert all(a.threshold < b.threshold for a, b in zip(strict.layers, predictors.layers, strict=True))
    with pytest.raises(PredictorError, match=r"there are 0\.01"):
        predictors.at(0.03)


def test_regression_beats_a_random_start_at_equal_steps(tmp_path: Path, whole: Path, model: Path, data: Path) -> None:
    other = train_predictors(model, data, replace(SPEC, init="random"), out=tmp_path / "random")
    ours = Predictors.load(whole)
    assert other.card["steps"] == ours.card["steps"]
    for a, b in zip(ours.card["layers"], other.card["layers"], strict=True):
        assert a["predicted_over_active"] < b["predicted_over_active"]


def test_small_memory_and_the_magnitude_loss(tmp_path: Path, model: Path, data: Path) -> None:
    spec = replace(SPEC, loss="magnitude", store_dtype="float32")
    found = train_predictors(model, data, spec, out=tmp_path / "p", memory_bytes=1)
    assert found.card["run"]["micro_windows"] == 1
    assert all(entry["missed_activation"] < entry["false_negative"] for entry in found.card["layers"])
    assert found.layers[0].packed()[0].dtype == np.float32


def test_int8_factors_predict_like_float32_ones(tmp_path: Path, whole: Path, model: Path, data: Path) -> None:
    exact = train_predictors(model, data, replace(SPEC, store_dtype="float32"), out=tmp_path / "p")
    narrow = Predictors.load(whole)
    x = np.random.default_rng(0).standard_normal((50, D_MODEL)).astype(np.float32)
    for one, other in zip(narrow.layers, exact.layers, strict=True):
        assert one.a_scale is not None
        assert one.b_scale is not None
        for q, scale, values in ((one.a, one.a_scale, other.a), (one.b, one.b_scale, other.b)):
            assert np.abs(q).max() == 127
            assert (np.abs(q * scale[:, None] - values) <= 0.5001 * scale[:, None]).all()
        assert np.corrcoef(one.scores(x).ravel(), other.scores(x).ravel())[0, 1] > 0.999
    for one, other in zip(narrow.card["layers"], exact.card["layers"], strict=True):
        assert one["predicted_over_active"] == pytest.approx(other["predicted_over_active"], rel=0.03)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A random Llama whose neurons fire above 0.8."""
    path = tmp_path_factory.mktemp("models") / "llama"
    sizes: dict[str, Any] = {
        "hidden_size": D_MODEL,
        "intermediate_size": D_FF,
        "vocab_size": 400,
        "max_position_embeddings": 128,
    }
    make_tiny(path, "llama", num_hidden_layers=LAYERS, **sizes)
    edit_config(path, hidden_act="fatrelu", hidden_act_param=0.8)
    write_tokenizer(path, data)
    return path


@pytest.mark.parametrize(
    ("loss", "source"),
    [
        ("balanced", "ffn"),
        ("bce", "ffn"),
        ("root_magnitude", "ffn"),
        ("contribution", "ffn"),
        ("balanced", "before_norm"),
        ("balanced", "previous_layer"),
    ],
)
def test_a_gated_model_with_thresholds_by_every_loss_and_input(
    tmp_path: Path, gated: Path, data: Path, loss: Any, source: Any
) -> None:
    spec = replace(SPEC, loss=loss, input=source, tokens=3072)
    found = train_predictors(gated, data, spec, out=tmp_path / "p")
    card = found.card
    geometry = family("llama").spec(json.loads((gated / "config.json").read_text()))
    factors = (6 + 6 + 10) * (D_MODEL + D_FF) + LAYERS * D_FF
    assert card["weight_share"] == pytest.approx(factors / (LAYERS * 3 * D_MODEL * D_FF))
    assert (card["input"], geometry.thresholds) == (source, (0.8,) * LAYERS)
    for entry in card["layers"]:
        assert 0.05 < entry["active"] / D_FF < 0.4
        assert entry["false_negative"] == pytest.approx(SPEC.false_negative, abs=0.04)
        assert entry["predicted_over_active"] < D_FF / entry["active"]
    if source == "ffn":
        found.check(geometry)
    else:
        with pytest.raises(PredictorError, match=f"trained on input '{source}', for comparison only"):
            found.check(geometry)


def test_other_inputs_are_what_they_say(gated: Path, data: Path) -> None:
    loaded = dense(gated)
    geometry = family("llama").spec(json.loads((gated / "config.json").read_text()))
    ups = family("llama").activated_linears(loaded)
    window = next(token_windows(documents(data), tokenizer(gated), 32))
    seen: dict[str, list[Sample]] = {}
    for source in ("ffn", "before_norm", "previous_layer"):
        view = View.of(loaded, geometry, "contribution", source)  # type: ignore[arg-type]
        rows = seen.setdefault(source, [])
        with Taps(loaded, ups, view, lambda layer, sample, rows=rows: rows.append(sample)):
            run_trunk(loaded, window[None])
    for layer in range(LAYERS):
        own = seen["ffn"][layer].x
        block = loaded.model.layers[layer]
        assert torch.equal(seen["ffn"][layer].z > 0, ups[layer](own) > 0.8)
        torch.testing.assert_close(block.post_attention_layernorm(seen["before_norm"][layer].x), own)
        assert torch.equal(seen["previous_layer"][layer].x, seen["ffn"][max(0, layer - 1)].x)
        value = block.mlp.act_fn(block.mlp.gate_proj(own)) * block.mlp.up_proj(own)
        one = (value[:, 5:6] @ block.mlp.down_proj.weight[:, 5:6].T).norm(dim=1)
        size = seen["ffn"][layer].size
        assert size is not None
        torch.testing.assert_close(size[:, 5], one)


def test_sparsity_counts_neurons_at_or_below_the_threshold_as_zero(tmp_path: Path, gated: Path, data: Path) -> None:
    trained = train_predictors(gated, data, replace(SPEC, tokens=2048), out=tmp_path / "p")
    rows = analyze_sparsity(gated, data, tokens=1024)["rows"]
    for row, entry in zip(rows, trained.card["layers"], strict=True):
        assert 1 - row["zeros"] == pytest.approx(entry["active"] / D_FF, rel=0.15)  # other text


def test_the_regression_from_another_input_beats_a_random_start(tmp_path: Path, gated: Path, data: Path) -> None:
    found = {}
    for init in ("regression", "random"):
        spec = replace(SPEC, input="previous_layer", init=init)  # type: ignore[arg-type]
        found[init] = train_predictors(gated, data, spec, out=tmp_path / init).card["layers"]
    ratios = {init: [entry["predicted_over_active"] for entry in layers] for init, layers in found.items()}
    assert sum(ratios["regression"]) < sum(ratios["random"])


def test_ranks_go_to_the_layers_that_need_them(tmp_path: Path, model: Path, data: Path) -> None:
    spec = replace(SPEC, allocation="measured", rank_bytes=24 * (D_MODEL + D_FF + 4), tokens=2048)
    with pytest.raises(KeyboardInterrupt):
        train_predictors(model, data, spec, out=tmp_path / "p", progress=Stop("train", 2, interrupt))
    found = train_predictors(model, data, spec, out=tmp_path / "p")
    ranks, allocation = [layer.rank for layer in found.layers], found.card["allocation"]
    assert sum(ranks) <= 24
    assert set(ranks) <= set(allocation["candidates"])
    assert sum(ranks) > 24 - max(np.diff(allocation["candidates"]))
    for row in allocation["predicted"]:
        assert row[0] > row[-1]
    assert "within 0.00 MB of factors" in (tmp_path / "p" / "CARD.md").read_text()
    with pytest.raises(PredictorError, match="rank_bytes 100 is below"):
        train_predictors(model, data, replace(spec, rank_bytes=100), out=tmp_path / "small")


def test_little_memory_means_bfloat16_and_a_resumed_run_keeps_to_it(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.predictor.train.free_bytes", lambda device: 3 << 20)
    with pytest.raises(KeyboardInterrupt):
        train_predictors(model, data, SPEC, out=tmp_path / "p", progress=Stop("train", 2, interrupt))
    monkeypatch.undo()
    found = train_predictors(model, data, SPEC, out=tmp_path / "p")
    assert found.card["run"] == {"dtype": "bfloat16", "micro_windows": 8, "memory_bytes": 1 << 20, "processes": 1}
    assert found.card["request"]["dtype"] == "auto"


def test_curves_for_tensorboard_go_on_after_a_stop(tmp_path: Path, model: Path, data: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra 'train'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec, logs = replace(SPEC, tokens=2048), tmp_path / "logs"
    with pytest.raises(KeyboardInterrupt):
        train_predictors(model, data, spec, out=tmp_path / "p", progress=Stop("train", 2, interrupt), logs=logs)
    found = train_predictors(model, data, spec, out=tmp_path / "p", logs=logs)
    events = EventAccumulator(str(logs)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss/layers_0-1_rank_6", "loss/layers_2_rank_10", "learning_rate", "tokens_per_s"} <= tags
    points = [(e.step, e.value) for e in events.Scalars("loss/layers_2_rank_10")]
    curve = found.card["loss_curve"]
    wanted = [(s, pytest.approx(row[2])) for s, row in zip(curve["step"], curve["loss"], strict=True)]
    assert points == wanted
    assert events.Scalars("false_negative/layer_01")[0].value == pytest.approx(
        found.card["layers"][1]["false_negative"]
    )


def test_logs_without_tensorboard_are_refused_before_anything_runs(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainingError, match=r"pip install 'flash-workbench\[train\]'"):
        train_predictors(model, data, SPEC, out=tmp_path / "p", logs=tmp_path / "logs")
    assert list(tmp_path.iterdir()) == []


def test_c4_shards_through_the_datasets_library(tmp_path: Path, whole: Path, model: Path, data: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra 'data'")
    shards = tmp_path / "shards"
    shards.mkdir()
    lines = data.read_text().splitlines(keepends=True)
    for n, part in enumerate((lines[:140], lines[140:])):
        (shards / f"c4-train.{n:05d}-of-00002.json.gz").write_bytes(gzip.compress("".join(part).encode()))
    source = f"c4:{shards}"
    assert list(documents(source, 130, 150)) == list(documents(data, 130, 150))
    with pytest.raises(KeyboardInterrupt):
        train_predictors(model, source, SPEC, out=tmp_path / "p", progress=Stop("train", 5, interrupt))
    found = train_predictors(model, source, SPEC, out=tmp_path / "p")
    assert found.card["data"]["train"]["source"] == "c4:shards"
    assert found.card["loss_curve"] == Predictors.load(whole).card["loss_curve"]
    with pytest.raises(DataError, match="no such file"):
        train_predictors(model, f"c4:{tmp_path}/absent", SPEC, out=tmp_path / "q")


def test_text_shorter_than_the_budget_is_read_again(tmp_path: Path, model: Path, data: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("".join(data.read_text().splitlines(keepends=True)[:60]))
    found = train_predictors(model, short, replace(SPEC, tokens=12_000), out=tmp_path / "p")
    assert found.card["data"]["rounds"] > 1
    assert found.card["data"]["train"]["documents"] < 60


class Stop:
    """A progress callback that does something at the n-th call of a stage."""

    def __init__(self, stage: str, call: int, action: Callable[[], None]) -> None:
        self.stage, self.left, self.action = stage, call, action

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == self.stage:
            self.left -= 1
            if self.left == 0:
                self.action()


def interrupt() -> None:
    raise KeyboardInterrupt


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("stage", "call", "action"),
    [("statistics", 2, ctrl_c), ("train", 1, ctrl_c), ("train", 7, interrupt), ("measure", 3, ctrl_c)],
)
def test_interrupted_and_resumed_is_identical(
    tmp_path: Path, whole: Path, model: Path, data: Path, stage: str, call: int, action: Callable[[], None]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_predictors(model, data, SPEC, out=tmp_path / "p", progress=Stop(stage, call, action))
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (tmp_path / "p").exists()
    seen: list[tuple[str, int]] = []
    train_predictors(
        model, data, SPEC, out=tmp_path / "p", progress=lambda stage, done, total: seen.append((stage, done))
    )
    steps = {"statistics": 12, "train": 12 - call, "measure": 0}[stage]
    assert len([s for s, _ in seen if s == "train"]) == steps
    assert same(tmp_path / "p", whole)
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "both"])
def test_a_damaged_state_falls_back(tmp_path: Path, whole: Path, model: Path, data: Path, damage: str) -> None:
    def train(progress: Any = None) -> None:
        train_predictors(model, data, SPEC, out=tmp_path / "p", progress=progress, checkpoint_seconds=0)

    with pytest.raises(KeyboardInterrupt):
        train(Stop("train", 5, interrupt))
    partial = tmp_path / "p.partial"
    for name in ["state", "state.previous"] if damage == "both" else ["state"]:
        raw = bytearray((partial / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (partial / name).write_bytes(raw[:100] if damage == "truncate" else raw)
    train()
    assert same(tmp_path / "p", whole)


KILLED = """
import os, signal, sys
import torch
from workbench.predictor.config import PredictorSpec
from workbench.predictor.train import train_predictors

model, data, out, spec, where, count = sys.argv[1:]
torch.set_num_threads(1)
left = int(count)

def die(*args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def progress(stage, done, total):
    if stage == where:
        die()

if where in ("replace", "fsync"):  # in the middle of writing a state or the result
    real = getattr(os, where)
    setattr(os, where, lambda *args: (die(), real(*args))[1])
train_predictors(model, data, PredictorSpec(**eval(spec)), out=out, progress=progress, checkpoint_seconds=0)
"""


@pytest.mark.parametrize(("where", "count"), [("train", 6), ("replace", 9), ("fsync", 14), ("replace", 42)])
def test_killed_and_run_again_is_identical(
    tmp_path: Path, whole: Path, model: Path, data: Path, where: str, count: int
) -> None:
    out = tmp_path / "p"
    spec = {f: getattr(SPEC, f) for f in SPEC.__dataclass_fields__}
    command = [sys.executable, "-c", KILLED, str(model), str(data), str(out), repr(spec), where, str(count)]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    train_predictors(model, data, SPEC, out=out)
    assert same(out, whole)


def test_a_finished_run_is_returned_at_once_and_never_overwritten(whole: Path, model: Path, data: Path) -> None:
    seen: list[str] = []
    before = (whole / "card.json").read_bytes()
    again = train_predictors(model, data, SPEC, out=whole, progress=lambda stage, done, total: seen.append(stage))
    assert seen == []
    assert np.array_equal(again.layers[0].b, Predictors.load(whole).layers[0].b)
    with pytest.raises(PredictorError, match="another request; choose another --out"):
        train_predictors(model, data, replace(SPEC, seed=1), out=whole)
    assert (whole / "card.json").read_bytes() == before


def test_a_started_run_of_another_request_is_kept_unless_told(
    tmp_path: Path, whole: Path, model: Path, data: Path
) -> None:
    out = tmp_path / "p"
    with pytest.raises(KeyboardInterrupt):
        train_predictors(model, data, replace(SPEC, seed=1), out=out, progress=Stop("train", 2, interrupt))
    with pytest.raises(TrainingError, match="another request"):
        train_predictors(model, data, SPEC, out=out)
    train_predictors(model, data, SPEC, out=out, resume=False)
    assert same(out, whole)


def test_predictors_belong_to_their_model(whole: Path, model: Path) -> None:
    predictors = Predictors.load(whole)
    loaded = dense(model)
    spec = family("opt").spec(loaded.config.to_dict())
    digest = fingerprint(up.weight for up in family("opt").activated_linears(loaded))
    predictors.check(spec, digest)
    with pytest.raises(PredictorError, match="d_model 32, d_ff 96, but the model has 3, 32, 128"):
        predictors.check(replace(spec, d_ff=128), digest)
    with pytest.raises(PredictorError, match="fingerprint"):
        predictors.check(spec, "0" * 64)
    assert isinstance(spec, ModelSpec)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("no directory", "cannot be read"),
        ("no tensors", "cannot be read"),
        ("truncated", "damaged or truncated"),
        ("flipped", "damaged or truncated"),
        ("newer", "schema 99"),
        ("card cut", "not JSON"),
        ("missing tensor", "tensor b.1 is missing"),
        ("missing scale", "tensor b_scale.1 is missing"),
        ("wrong dtype", "tensor a.1 is float32, but the card says int8"),
        ("wrong shape", "where finite"),
        ("not finite", "where finite"),
    ],
)
def test_damaged_directories_are_named(tmp_path: Path, whole: Path, damage: str, says: str) -> None:
    predictors = Predictors.load(whole)
    broken = list(predictors.layers)
    if damage == "wrong shape":
        broken[1] = replace(broken[1], b=broken[1].b[:-1])
    if damage == "not finite":
        broken[1] = replace(broken[1], bias=broken[1].bias * np.nan)
    folder = tmp_path / "p"
    if damage == "missing scale":
        broken[1] = replace(broken[1], b_scale=None)
    if damage == "wrong dtype":
        broken[1] = replace(broken[1], a=broken[1].a.astype(np.float32), stored="float32")
    replace(predictors, layers=broken).save(folder)
    tensors, card = folder / "predictors.safetensors", folder / "card.json"
    raw = tensors.read_bytes()
    if damage == "no directory":
        folder = tmp_path / "absent"
    elif damage == "no tensors":
        tensors.unlink()
    elif damage == "truncated":
        tensors.write_bytes(raw[:-10])
    elif damage == "flipped":
        tensors.write_bytes(raw[:-10] + bytes([raw[-10] ^ 1]) + raw[-9:])
    elif damage == "newer":
        card.write_text(json.dumps({**json.loads(card.read_text()), "schema": 99}))
    elif damage == "card cut":
        card.write_text(card.read_text()[:200])
    elif damage == "missing tensor":
        kept = {k: v for k, v in load_file(tensors).items() if k != "b.1"}
        save_file(kept, tensors)
        digest = hashlib.sha256(tensors.read_bytes()).hexdigest()
        card.write_text(json.dumps({**json.loads(card.read_text()), "sha256": digest}))
    with pytest.raises(PredictorError, match=says) as caught:
        Predictors.load(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(PredictorError, match="already exists"):
        predictors.save(whole)


def test_refusals_leave_nothing_behind(tmp_path: Path, model: Path, data: Path) -> None:
    out = tmp_path / "p"
    tiny = tmp_path / "tiny.txt"
    tiny.write_text("a few words\n")
    with pytest.raises(DataError, match=r"no training text|validation text"):
        train_predictors(model, tiny, SPEC, out=out)
    with pytest.raises(DataError, match="no such file"):
        train_predictors(model, tmp_path / "absent.jsonl", SPEC, out=out)
    with pytest.raises(CheckpointError):
        train_predictors(tmp_path, data, SPEC, out=out)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="CUDA"):
            train_predictors(model, data, SPEC, out=out, device="cuda")
    assert not out.exists()


def test_active_neurons_are_those_of_the_dense_model(model: Path, data: Path) -> None:
    loaded = dense(model)
    ups = family("opt").activated_linears(loaded)
    windows = [w for _, w in zip(range(3), token_windows(documents(data), tokenizer(model), 32), strict=False)]
    found = active_neurons(loaded, ups, windows)
    assert [len(layer) for layer in found] == [96] * LAYERS
    layer = loaded.model.decoder.layers[0]
    ids = torch.from_numpy(np.stack(windows))
    with torch.inference_mode():
        hidden = loaded.model.decoder(ids, output_hidden_states=True).hidden_states[0]
        after = hidden + layer.self_attn(layer.self_attn_layer_norm(hidden), attention_mask=causal(32))[0]
        z = layer.fc1(layer.final_layer_norm(after)).reshape(-1, D_FF)
    for token in range(96):
        clear = np.flatnonzero(z[token].abs() > 1e-5)
        assert np.array_equal(np.intersect1d(found[0][token], clear), clear[z[token].numpy()[clear] > 0])


def causal(length: int) -> torch.Tensor:
    """An additive attention mask."""
    return torch.full((length, length), float("-inf")).triu(1)[None, None]


def test_a_loss_that_is_not_finite_ends_the_training(model: Path, data: Path, tmp_path: Path) -> None:
    spec = replace(SPEC, learning_rate=1e30)
    with pytest.raises(TrainingError, match=r"layer \d: the loss is not finite at step \d+; start again with --fresh"):
        train_predictors(model, data, spec, out=tmp_path / "p")
    assert not (tmp_path / "p" / "predictors.safetensors").exists()
