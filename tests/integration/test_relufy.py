"""Models with SiLU or GELU made into ReLU models: the checkpoint, resuming to the identical result, refusals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import edit_config, make_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from workbench.capture.activations import FfnTap, dense, run_trunk, tokenizer
from workbench.capture.perplexity import perplexity
from workbench.capture.text import documents, split_of, token_windows
from workbench.errors import CheckpointError, DataError, DeviceError, TrainingError
from workbench.experiments.convert import convert
from workbench.models import family
from workbench.models.activation import FatReLU
from workbench.relufy import RelufySpec, relufy
from workbench.relufy.models import make_student, open_original
from workbench.training.state import CURRENT, PREVIOUS

LAYERS, D_FF, VOCAB, STEPS = 2, 160, 400, 12
SPEC = RelufySpec(
    steps=STEPS,
    sequence=32,
    batch_tokens=128,
    learning_rate=3e-3,
    ce_weight=0.1,
    layer_match=0.1,
    active=0.3,
    validation_share=0.3,
    validation_tokens=512,
    skip_documents=10,
)
SMOOTH = {
    "falcon": {"activation": "gelu"},
    "llama": {"hidden_act": "silu", "tie_word_embeddings": True, "num_key_value_heads": 2},
    "opt": {"activation_function": "gelu"},
    "persimmon": {"hidden_act": "gelu"},
    "phi": {"hidden_act": "gelu_new"},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 documents of random sentences in C4's layout."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, weights=range(200, 0, -1), k=60)) for _ in range(200)]
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def words(data: Path) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on the text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents(data), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory, words: PreTrainedTokenizerFast) -> Callable[[str], Path]:
    """A random model of any architecture whose FFN is not sparse, with a tokenizer; made once."""
    root = tmp_path_factory.mktemp("models")

    def make(model_type: str) -> Path:
        path = root / model_type
        if not path.exists():
            make_tiny(path, model_type, vocab_size=VOCAB, **SMOOTH[model_type])
            words.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="module")
def model(smooth: Callable[[str], Path]) -> Path:
    return smooth("llama")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    """A run without interruption."""
    out = tmp_path_factory.mktemp("whole") / "relu"
    relufy(model, data, SPEC, out=out)
    return out


def card_of(path: Path) -> dict[str, Any]:
    """card.json without measured times."""
    card = json.loads((path / "card.json").read_text())
    del card["training"]["seconds"]
    return card


def same(one: Path, other: Path) -> bool:
    """Identical weights, settings, loss curves and measurements."""
    names = ("model.safetensors", "config.json")
    files = all((one / name).read_bytes() == (other / name).read_bytes() for name in names)
    return files and card_of(one) == card_of(other)


def held_out(data: Path, path: Path) -> np.ndarray:
    """The windows of the documents that SPEC holds out."""
    return np.stack(list(token_windows(documents(data, 0, SPEC.skip_documents), tokenizer(path), SPEC.sequence)))


@pytest.mark.parametrize("model_type", sorted(SMOOTH))
def test_each_architecture_becomes_a_checkpoint_that_runs_sparse(
    tmp_path: Path, smooth: Callable[[str], Path], data: Path, model_type: str
) -> None:
    original, out = smooth(model_type), tmp_path / "out"
    spec = replace(SPEC, steps=6, activation="shifted_relu", shift=0.1, fatrelu_tolerance=0.02, train="ffn")
    card = relufy(original, [(data, 2.0), data], spec, out=out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    found = dense(out)
    thresholds = card["fatrelu"]["thresholds"]
    assert family(model_type).spec(json.loads((out / "config.json").read_text())).thresholds == tuple(thresholds)
    windows, zeros = held_out(data, out), [0, 0]

    def count(layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        zeros[layer] += int((z <= (thresholds[layer] if thresholds else 0)).sum())

    with FfnTap(family(model_type).activated_linears(found), count):
        run_trunk(found, windows)
    after = card["measured"]["held out"]["after"]
    assert [n / (windows.size * D_FF) for n in zeros] == pytest.approx(after["zeros_by_layer"], abs=1e-4)
    assert perplexity(found, windows) == pytest.approx(after["perplexity"], rel=1e-4)
    assert card["measured"]["held out"]["before"]["zeros"] < 0.01
    before, moved = load_file(original / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], moved[name])}
    kept = {name for name in before if "attn" in name or "attention." in name or "embed" in name}
    assert changed
    assert not changed & {name for name in kept if "norm" not in name}
    extra = {name: tensor for name, tensor in moved.items() if name not in before}
    assert all(name.endswith(".bias") for name in extra)
    biases = {id(linear.bias) for linear in family(model_type).activated_linears(found)}
    for name, tensor in extra.items():
        assert tensor.any() == (id(found.get_parameter(name)) in biases)


def test_the_checkpoint_is_one_for_transformers_and_for_the_store(tmp_path: Path, model: Path, data: Path) -> None:
    out = tmp_path / "out"
    card = relufy(model, data, replace(SPEC, fatrelu_tolerance=0.0, steps=4), out=out)
    assert card["fatrelu"]["thresholds"] == []
    found = AutoModelForCausalLM.from_pretrained(out)
    assert found.config.hidden_act == "relu"
    windows = held_out(data, out)
    after = card["measured"]["held out"]["after"]
    assert perplexity(found.eval(), windows) == pytest.approx(after["perplexity"], rel=1e-4)
    store = convert(out, tmp_path / "store")
    assert (store.spec.activation, store.spec.thresholds, store.spec.parts) == ("relu", (), 3)


def test_a_folded_shift_is_a_shifted_relu(model: Path) -> None:
    spec = replace(SPEC, activation="shifted_relu", shift=0.25)
    original = open_original(model)
    student, plain = make_student(original, spec, "cpu"), dense(model, force=True)
    arch = family("llama")
    for layer in range(LAYERS):
        arch.set_activation(student, layer, torch.nn.ReLU())
        arch.set_activation(plain, layer, Shifted(0.25))
    ids = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(student(ids).logits, plain(ids).logits)


class Shifted(torch.nn.Module):
    """relu(z - shift), as the definition has it."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return (z - self.shift).clamp_min(0)


def test_the_card_tells_what_was_done(whole: Path, model: Path, data: Path) -> None:
    card = json.loads((whole / "card.json").read_text())
    training = card["training"]
    assert training["steps"] == STEPS
    assert training["tokens"] == STEPS * 128
    assert training["curve"]["step"] == list(range(1, STEPS + 1))
    assert training["curve"]["penalty"][-1] > 0
    trained_on = [t for t in documents(data, 10) if split_of(t, SPEC.validation_share) == "train"]
    assert 0 < card["data"][0]["documents"] <= len(trained_on)
    for text in ("validation", "held out"):
        assert set(card["measured"][text]) == {"before", "swapped", "after"}
    windows, plain = held_out(data, model), dense(model, force=True)
    assert card["measured"]["held out"]["before"]["perplexity"] == pytest.approx(perplexity(plain, windows), rel=1e-5)
    for layer in range(LAYERS):
        family("llama").set_activation(plain, layer, torch.nn.ReLU())
    swapped = card["measured"]["held out"]["swapped"]
    assert swapped["perplexity"] == pytest.approx(perplexity(plain, windows), rel=1e-5)
    assert 0.3 < swapped["zeros"] < 0.7
    text = (whole / "CARD.md").read_text()
    assert text.count("\n| ") > LAYERS + STEPS
    assert str(model.parent) not in text + json.dumps(card)


def test_thresholds_are_the_most_that_the_tolerance_allows(tmp_path: Path, model: Path, data: Path) -> None:
    out = tmp_path / "out"
    found = relufy(model, data, replace(SPEC, steps=2, fatrelu_tolerance=0.01), out=out)["fatrelu"]
    limit = found["perplexity"] * 1.01
    assert found["share"] == max(one["share"] for one in found["tried"] if one["perplexity"] <= limit)
    student = dense(out)
    assert [m.threshold for m in student.modules() if isinstance(m, FatReLU)] == found["thresholds"]
    texts = (t for t in documents(data, 10) if split_of(t, SPEC.validation_share) == "calibrate")
    windows = list(token_windows(texts, tokenizer(out), 32))[:16]
    assert perplexity(student, np.stack(windows)) <= limit * 1.0001


def test_less_is_active_and_the_original_is_kept_to(tmp_path: Path, model: Path, data: Path) -> None:
    spec = replace(SPEC, steps=100, learning_rate=5e-3, active=0.15, fatrelu_tolerance=0.0, layer_match=0.0)
    cards = {
        penalty: relufy(model, data, replace(spec, penalty=penalty), out=tmp_path / penalty)
        for penalty in ("l1", "capped")
    }
    cards["weights"] = relufy(model, data, replace(spec, schedule="l1", penalty_weight=2.0), out=tmp_path / "weights")
    for card in cards.values():
        measured = card["measured"]["validation"]
        assert measured["after"]["zeros"] > measured["swapped"]["zeros"] + 0.1
        assert measured["after"]["perplexity"] < measured["swapped"]["perplexity"]
    for penalty in ("l1", "capped"):
        assert cards[penalty]["training"]["curve"]["active"][-1] == pytest.approx(0.15, rel=0.3)
    assert cards["weights"]["training"]["penalty_weight"] == pytest.approx(2.0)


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
    ("stage", "call", "action", "left"),
    [
        ("measure", 1, ctrl_c, STEPS),
        ("train", 1, ctrl_c, STEPS - 1),
        ("train", 7, interrupt, STEPS - 7),
        ("thresholds", 1, interrupt, 0),
    ],
)
def test_interrupted_and_resumed_is_identical(
    tmp_path: Path, whole: Path, model: Path, data: Path, stage: str, call: int, action: Callable[[], None], left: int
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        relufy(model, data, SPEC, out=tmp_path / "out", progress=Stop(stage, call, action))
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (tmp_path / "out").exists()
    seen: list[str] = []
    relufy(model, data, SPEC, out=tmp_path / "out", progress=lambda stage, done, total: seen.append(stage))
    assert seen.count("train") == left
    assert same(tmp_path / "out", whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "both"])
def test_a_damaged_state_falls_back(tmp_path: Path, whole: Path, model: Path, data: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        relufy(model, data, SPEC, out=tmp_path / "out", progress=Stop("train", 5, interrupt), checkpoint_seconds=0)
    for name in [CURRENT, PREVIOUS] if damage == "both" else [CURRENT]:
        file = tmp_path / "out.partial" / name
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw[:100] if damage == "truncate" else raw)
    seen: list[str] = []
    relufy(model, data, SPEC, out=tmp_path / "out", progress=lambda stage, done, total: seen.append(stage))
    assert seen.count("train") == (STEPS if damage == "both" else STEPS - 4)
    assert same(tmp_path / "out", whole)


KILLED = """
import os, signal, sys
import torch
from workbench.relufy import RelufySpec, relufy

model, data, out, spec, where, count = sys.argv[1:]
torch.set_num_threads(1)
left = int(count)

def die(*args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

if where == "fsync":  # in the middle of writing the result
    real = os.fsync
    os.fsync = lambda *args: (die(), real(*args))[1]
relufy(model, data, RelufySpec(**eval(spec)), out=out, checkpoint_seconds=0,
       progress=lambda stage, done, total: die() if stage == where else None)
"""


@pytest.mark.parametrize(("where", "count"), [("train", 6), ("fsync", 44)])
def test_killed_and_run_again_is_identical(
    tmp_path: Path, whole: Path, model: Path, data: Path, where: str, count: int
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(model), str(data), str(out), repr(asdict(SPEC)), where, str(count)]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    relufy(model, data, SPEC, out=out)
    assert same(out, whole)


def test_a_budget_of_seconds_fixes_its_steps_once(tmp_path: Path, model: Path, data: Path) -> None:
    spec = replace(SPEC, steps=None, seconds=1.5, warmup_steps=8, layer_match=0.0)
    totals: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "train":
            totals.append(total)
            if len(totals) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        relufy(model, data, spec, out=tmp_path / "out", progress=progress)
    card = relufy(model, data, spec, out=tmp_path / "out", progress=progress)
    assert len(set(totals)) == 1
    assert card["training"]["steps"] * 128 == totals[0]
    assert card["training"]["curve"]["step"][-1] == card["training"]["steps"]


def test_a_finished_run_is_returned_at_once_and_never_overwritten(whole: Path, model: Path, data: Path) -> None:
    seen: list[str] = []
    before = (whole / "card.json").read_bytes()
    again = relufy(model, data, SPEC, out=whole, progress=lambda stage, done, total: seen.append(stage))
    assert seen == []
    assert again == json.loads(before)
    with pytest.raises(TrainingError, match="choose another OUT"):
        relufy(model, data, replace(SPEC, steps=3), out=whole)
    assert (whole / "card.json").read_bytes() == before


def test_a_started_run_of_another_request_is_kept_unless_told(
    tmp_path: Path, whole: Path, model: Path, data: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        relufy(model, data, replace(SPEC, steps=5), out=out, progress=Stop("train", 2, interrupt))
    with pytest.raises(TrainingError, match="another request"):
        relufy(model, data, SPEC, out=out)
    relufy(model, data, SPEC, out=out, resume=False)
    assert same(out, whole)


def test_a_loss_that_is_not_finite_is_named_and_the_state_kept(tmp_path: Path, model: Path, data: Path) -> None:
    spec = replace(SPEC, learning_rate=1e30, clip=1e30, weight_decay=0.0)
    with pytest.raises(TrainingError, match=r"step \d+: the loss .* lower --learning-rate \(now 1e\+30\)"):
        relufy(model, data, spec, out=tmp_path / "out", checkpoint_seconds=0)
    assert (tmp_path / "out.partial" / CURRENT).exists()
    assert not (tmp_path / "out").exists()


def test_logs_need_tensorboard(tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainingError, match=r"pip install 'flash-workbench\[train\]'"):
        relufy(model, data, SPEC, out=tmp_path / "out", logs=tmp_path / "logs")


def test_logs_that_are_a_file_are_refused_before_any_work(tmp_path: Path, model: Path, data: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(TrainingError, match="choose another --logs"):
        relufy(model, data, SPEC, out=tmp_path / "out", logs=tmp_path / "logs")
    assert not list(tmp_path.glob("out*"))


def test_logs_hold_the_curve(tmp_path: Path, model: Path, data: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    card = relufy(model, data, replace(SPEC, steps=3), out=tmp_path / "out", logs=tmp_path / "logs")
    found = events.EventAccumulator(str(tmp_path / "logs")).Reload()
    values = [event.value for event in found.Scalars("kl")]
    assert values == pytest.approx(card["training"]["curve"]["kl"], abs=1e-5)


@pytest.mark.slow
def test_a_compiled_run_has_the_same_curve(tmp_path: Path, model: Path, data: Path) -> None:
    spec = replace(SPEC, steps=4)
    curves = [
        relufy(model, data, replace(spec, compile=on), out=tmp_path / str(on))["training"]["curve"]
        for on in (False, True)
    ]
    for name in ("kl", "ce", "match", "active"):
        assert curves[1][name] == pytest.approx(curves[0][name], rel=1e-2)


def test_refusals_leave_nothing_behind(tmp_path: Path, model: Path, data: Path) -> None:
    out, tiny = tmp_path / "out", tmp_path / "tiny.txt"
    tiny.write_text("a few words\n")
    with pytest.raises(DataError, match="fewer than 32 tokens of validation text"):
        relufy(model, tiny, replace(SPEC, skip_documents=0), out=out)
    with pytest.raises(DataError, match="no such file"):
        relufy(model, tmp_path / "absent.jsonl", SPEC, out=out)
    with pytest.raises(DataError, match="give --data"):
        relufy(model, [], SPEC, out=out)
    with pytest.raises(DataError, match="its weight"):
        relufy(model, [(data, 0.0)], SPEC, out=out)
    with pytest.raises(DataError, match="no text to train on"):
        relufy(model, [data, tiny], replace(SPEC, validation_share=0.99), out=out)
    with pytest.raises(CheckpointError):
        relufy(tmp_path, data, SPEC, out=out)
    with pytest.raises(DeviceError, match="not one of cpu, cuda"):
        relufy(model, data, SPEC, out=out, device="tpu")
    with pytest.raises(DeviceError, match="float32 or bfloat16"):
        relufy(model, data, SPEC, out=out, dtype="float16")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="CUDA"):
            relufy(model, data, SPEC, out=out, device="cuda")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.txt"]
    out.mkdir()
    with pytest.raises(TrainingError, match="delete it"):
        relufy(model, data, SPEC, out=out)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot be written"):
        relufy(model, data, SPEC, out=tmp_path / "file" / "out")


def test_a_model_that_is_sparse_already_is_refused(tmp_path: Path, data: Path) -> None:
    path = make_tiny(tmp_path / "relu", "llama")
    with pytest.raises(CheckpointError, match=r"already relu.*workbench convert"):
        relufy(path, data, SPEC, out=tmp_path / "out")
    edit_config(path, hidden_act="fatrelu", hidden_act_param=0.1)
    with pytest.raises(CheckpointError, match="already relu"):
        relufy(path, data, SPEC, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["relu"]
