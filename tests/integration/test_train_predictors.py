"""Predictors trained on a tiny real model: quality, resuming to the identical result, files, refusals."""

from __future__ import annotations

import hashlib
import json
import os
import random
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
from safetensors.torch import load_file, save_file
from tiny_models import make_opt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workbench.capture.activations import FfnTap, active_neurons, dense, run_trunk, tokenizer
from workbench.capture.text import documents, split_of, token_windows
from workbench.errors import CheckpointError, DataError, DeviceError, PredictorError
from workbench.models import family
from workbench.predictor.config import PredictorSpec
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import Predictors
from workbench.predictor.train import train_predictors
from workbench.spec import ModelSpec

SPEC = PredictorSpec(
    rank=6,
    last_rank=10,
    last_layers=1,
    tokens=4096,
    sequence=32,
    batch_tokens=256,
    init_tokens=1024,
    validation_share=0.3,
    validation_tokens=1024,
)
LAYERS, D_MODEL, D_FF = 3, 32, 96


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of random sentences in C4's layout."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, weights=range(200, 0, -1), k=60)) for _ in range(300)]
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A random OPT with sparse FFNs and a byte-level tokenizer trained on the text."""
    path = tmp_path_factory.mktemp("models") / "opt"
    make_opt(path, num_hidden_layers=LAYERS, hidden_size=D_MODEL, ffn_dim=D_FF, vocab_size=400)
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("fc1.bias"):
            tensor -= 0.35
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    words.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(documents(data), trainer)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(path)
    return path


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
    assert predictors.nbytes == 2 * (factors - LAYERS * D_FF) + 4 * LAYERS * D_FF == card["nbytes"]
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
    assert found.card["request"]["micro_windows"] == 1
    assert all(entry["missed_activation"] < entry["false_negative"] for entry in found.card["layers"])
    assert found.layers[0].packed()[0].dtype == np.float32


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
    with pytest.raises(PredictorError, match="another request"):
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
