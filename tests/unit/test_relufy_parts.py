"""Parts of relufy against plain autograd, plain counts and a plain reading of the text."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import make_tiny
from torch import nn

from workbench.capture import perplexity as perplexity_module
from workbench.capture.activations import dense
from workbench.capture.perplexity import negative_log_likelihood, perplexity
from workbench.errors import DataError
from workbench.models import family
from workbench.relufy import text as text_module
from workbench.relufy.activation import PenalisedReLU
from workbench.relufy.config import RelufySpec
from workbench.relufy.measure import Energy, at_most, largest, measure
from workbench.relufy.norms import FusedRMSNorm, fuse_norms
from workbench.relufy.objective import distil, match
from workbench.relufy.text import Ahead, Mixture, TokenSource
from workbench.relufy.trainer import choose_micro_windows
from workbench.training.sparsity import SparsityControl

TOKENS, WIDTH, VOCAB = 13, 8, 29


def random_heads(bias: bool) -> tuple[torch.Tensor, nn.Linear, torch.Tensor, nn.Linear, torch.Tensor]:
    """Hidden states, heads and labels of a student and a teacher; two labels are unknown."""
    torch.manual_seed(3)
    ours, theirs = nn.Linear(WIDTH, VOCAB, bias=bias), nn.Linear(WIDTH, VOCAB, bias=bias).requires_grad_(False)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[[4, 12]] = -1
    return torch.randn(TOKENS, WIDTH, requires_grad=True), ours, torch.randn(TOKENS, WIDTH), theirs, labels


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kl", "ce"), [(1.0, 0.0), (0.7, 0.0), (0.5, 0.3), (0.0, 1.0)])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunked_gradients_are_those_of_autograd(bias: bool, kl: float, ce: float, chunk: int) -> None:
    hidden, ours, taught, theirs, labels = random_heads(bias)
    log_s, log_t = ours(hidden).log_softmax(-1), theirs(taught).log_softmax(-1)
    kl_loss = F.kl_div(log_s, log_t, log_target=True, reduction="sum")
    ce_loss = F.nll_loss(log_s, labels, ignore_index=-1, reduction="sum")
    parameters = [hidden, *ours.parameters()]
    expected = torch.autograd.grad(kl * kl_loss + ce * ce_loss, parameters)
    for value in (False, True):
        found = distil(
            hidden.detach(), ours, taught, theirs, labels, kl=kl, ce=ce, compute=torch.float32, value=value, chunk=chunk
        )
        assert found.weight is not None
        gradients = [found.hidden, found.weight, *([found.bias] if found.bias is not None else [])]
        assert len(gradients) == len(expected)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
        if value:
            assert found.kl is not None
            assert found.ce is not None
            assert float(found.kl) == pytest.approx(kl_loss.item(), rel=1e-4)
            assert float(found.ce) == pytest.approx(ce_loss.item(), rel=1e-4)
        else:
            assert found.kl is None
            assert found.ce is None


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    hidden, ours, taught, theirs, labels = random_heads(True)
    ours.requires_grad_(False)
    found = distil(hidden, ours, taught, theirs, labels, kl=1, ce=0, compute=torch.float32, value=False)
    assert found.weight is None
    assert found.bias is None


def test_match_is_the_relative_distance_and_its_gradient() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 5, 7)
    expected = ((ours - theirs).square().sum(-1) / theirs.square().sum(-1)).sum()
    (gradient,) = torch.autograd.grad(expected, ours)
    value, found = match(ours.detach(), theirs)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("capped", [False, True])
def test_the_penalty_has_the_gradient_of_its_definition(capped: bool) -> None:
    torch.manual_seed(1)
    z, outer, weight = torch.randn(4, 6, 10, requires_grad=True), torch.randn(4, 6, 10), 0.7
    h = F.relu(z)
    m = h[h > 0].mean().detach()
    penalty = (h.clamp_max(m) if capped else h).mean() / m
    (expected,) = torch.autograd.grad((h * outer).sum() + weight * penalty, z)
    counts = torch.zeros(3, dtype=torch.int64)
    module = PenalisedReLU(1, torch.tensor(weight), counts, capped)
    found = module(z)
    assert torch.equal(found, h)
    (gradient,) = torch.autograd.grad((found * outer).sum(), z)
    torch.testing.assert_close(gradient, expected)
    assert counts.tolist() == [0, int((z > 0).sum()), 0]
    with torch.no_grad():
        module(z)
    assert counts.sum() == (z > 0).sum()


def test_the_controller_brings_a_plant_to_its_target_and_holds_it() -> None:
    control = SparsityControl(0.09, 0.05, 0.65, gain=0.03, boost=2.0, floor=0.01)
    steps, active, shares = 2000, 0.4, []
    for step in range(1, steps + 1):
        if step % 50 == 0:  # restored from JSON, as a resumed run is
            state = json.loads(json.dumps(control.state()))
            control = SparsityControl(0.09, 0.05, 0.65, gain=0.03, boost=2.0, floor=0.01)
            control.restore(state)
        weight = control.step(step / steps, active)
        assert (weight == 0) == (step < 0.05 * steps)
        active += 0.02 * (0.4 / (1 + 3 * weight) - active)  # what the weight would give, approached slowly
        shares.append(active)
    assert all(abs(share / 0.09 - 1) < 0.1 for share in shares[1400:])
    assert all(abs(share / 0.09 - 1) < 0.02 for share in shares[1800:])
    assert min(shares) > 0.08


def test_no_goal_is_above_the_share_seen_first() -> None:
    control = SparsityControl(0.5, 0.1, 0.5)
    control.step(0.05, 0.3)
    assert control.goal(0.2) == control.goal(0.9) == 0.5


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"seconds": 1.0, "tokens": 5}, "only one budget"),
        ({"tokens": 0}, "tokens=0"),
        ({"seconds": math.inf}, "seconds=inf"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"ce_weight": -1.0}, "ce_weight=-1.0"),
        ({"active": 1.0}, "active=1.0"),
        ({"kl_weight": 0.0, "ce_weight": 0.0}, "both 0"),
        ({"shift": 0.1}, "goes with shifted_relu"),
        ({"activation": "shifted_relu"}, "goes with shifted_relu"),
        ({"sequence": 1}, "no next token"),
        ({"penalty": "l2"}, "not one of l1, capped"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RelufySpec(**fields)


class Words:
    """A tokenizer of bytes; 0 ends a text. What the sources need of transformers' own."""

    eos_token_id = 0

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return None

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        self.calls += 1
        return {"input_ids": [list(text.encode()) for text in texts]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    texts = [f"document {i} " + "x" * (i % 37) for i in range(200)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def keep(text: str) -> bool:
    return not text.startswith("document 1")


def expected_tokens(source: Path, start: int) -> np.ndarray:
    """One round of the kept documents."""
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()][start:]
    return np.array([token for t in texts if keep(t) for token in [*t.encode(), 0]])


@pytest.mark.parametrize("remembered", [1 << 20, 10])
def test_a_source_goes_round_and_round(source: Path, monkeypatch: pytest.MonkeyPatch, remembered: int) -> None:
    monkeypatch.setattr(text_module, "REMEMBERED_TOKENS", remembered)
    round_ = expected_tokens(source, 5)
    words = Words()
    stream = TokenSource(source, words, keep, 5)
    taken = np.concatenate([stream.take(n) for n in [7, 1, 300] * 60])
    assert len(taken) > 3 * len(round_)
    assert np.array_equal(taken, np.resize(round_, len(taken)))
    batches = -(-195 // text_module.DOCUMENTS)
    assert (words.calls > batches) == (remembered == 10)
    assert stream.card.documents == (round_ == 0).sum()
    assert stream.card.tokens == len(round_) - stream.card.documents


@pytest.mark.parametrize("before", [0, 3, 40, 100])
def test_a_source_goes_on_where_it_was(source: Path, before: int) -> None:
    stream = TokenSource(source, Words(), keep, 5)
    for _ in range(before):
        stream.take(50)
    position = stream.position()
    other = TokenSource(source, Words(), keep, 5)
    other.seek(position)
    for _ in range(200):
        assert np.array_equal(stream.take(50), other.take(50))
    assert stream.card == other.card


def test_a_source_without_text_is_refused(source: Path) -> None:
    with pytest.raises(DataError, match="no text to train on"):
        TokenSource(source, Words(), lambda text: False).take(1)


def test_a_mixture_keeps_its_shares_and_is_made_ahead(source: Path) -> None:
    def mixture() -> Mixture:
        return Mixture([TokenSource(source, Words(), keep, start) for start in (0, 7, 9)], [3.0, 1.0, 2.0], 16)

    plain = mixture()
    expected = [plain.windows(4) for _ in range(30)]
    assert plain.given == [60, 20, 40]
    with Ahead(mixture(), 4, False) as ahead:
        batches = [ahead.next() for _ in range(12)]
    for batch, windows in zip(batches, expected, strict=False):
        assert np.array_equal(batch.ids.numpy(), windows)
    resumed = mixture()
    resumed.seek(batches[11].position)
    assert all(np.array_equal(resumed.windows(4), windows) for windows in expected[12:])


def test_an_error_of_the_thread_reaches_the_one_who_asks(source: Path) -> None:
    source.write_text(source.read_text()[:-20] + "\n")
    with (
        Ahead(Mixture([TokenSource(source, Words(), keep)], [1.0], 64), 100, False) as ahead,
        pytest.raises(DataError, match="not JSON"),
    ):
        list(iter(ahead.next, None))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A dense gated model with ReLU, float32."""
    return dense(make_tiny(tmp_path_factory.mktemp("perplexity") / "llama", "llama"))


@pytest.fixture(scope="module")
def windows() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 96, (70, 40))


def test_perplexity_is_that_of_the_logits(llama: Any, windows: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.from_numpy(windows)
    with torch.no_grad():
        logits = llama(ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten(), reduction="sum").item()
    total, tokens = negative_log_likelihood(llama, windows)
    assert tokens == 70 * 39
    assert total == pytest.approx(expected, rel=1e-6)
    seen: list[int] = []
    monkeypatch.setitem(perplexity_module.CHUNK_BYTES, "cpu", 4 * 96 * 7)
    assert perplexity(llama, windows, progress=seen.append) == pytest.approx(math.exp(expected / tokens), rel=1e-6)
    assert seen == [51 * 40, 70 * 40]
    for bad in (windows[:0], windows[:, :1]):
        with pytest.raises(ValueError, match="no token to score"):
            perplexity(llama, bad)


def captured(model: Any, windows: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each layer the gate's pre-activations and what the down projection is given, [tokens, d_ff]."""
    found = []
    for layer in model.model.layers:
        kept: dict[str, torch.Tensor] = {}
        found.append(kept)
        layer.mlp.gate_proj.register_forward_hook(lambda m, a, out, k=kept: k.update(z=out.flatten(0, 1)))
        layer.mlp.down_proj.register_forward_pre_hook(lambda m, a, k=kept: k.update(v=a[0].flatten(0, 1)))
    with torch.no_grad():
        model(torch.from_numpy(windows))
    for layer in model.model.layers:
        layer.mlp.gate_proj._forward_hooks.clear()
        layer.mlp.down_proj._forward_pre_hooks.clear()
    return [(kept["z"], kept["v"]) for kept in found]


def test_zeros_and_energy_are_those_of_an_independent_count(llama: Any, windows: np.ndarray) -> None:
    linears = family("llama").activated_linears(llama)
    pairs = captured(llama, windows)
    thresholds = [0.1, 0.3]
    found = measure(llama, linears, windows, at_most(thresholds))
    assert found["zeros_by_layer"] == [
        pytest.approx(float((z <= t).float().mean())) for (z, _), t in zip(pairs, thresholds, strict=True)
    ]
    assert found["perplexity"] == pytest.approx(perplexity(llama, windows))
    downs = [layer.mlp.down_proj for layer in llama.model.layers]
    energy = Energy(linears, downs)
    with energy.tap():
        perplexity(llama, windows)
    for share in (1e-3, 0.05):
        for (z, v), down, threshold in zip(pairs, downs, energy.thresholds(share), strict=True):
            own = v.square() * down.weight.square().sum(0)
            below = float(own[z <= threshold].sum() / own.sum())
            more = float(own[z <= threshold * 2 ** (1 / 32)].sum() / own.sum())
            assert below <= share * 1.0001
            assert more > share
    assert energy.thresholds(0.05) > energy.thresholds(1e-3)


@pytest.mark.parametrize("last", range(-1, 9))
def test_bisection_finds_the_last_that_is_accepted(last: int) -> None:
    asked: list[int] = []

    def accepted(index: int) -> bool:
        asked.append(index)
        return index <= last

    assert largest(accepted, 9) == last
    assert len(asked) <= 4


def test_fused_norms_are_those_of_transformers(llama: Any, windows: np.ndarray, tmp_path: Path) -> None:
    other = dense(make_tiny(tmp_path / "other", "llama", rms_norm_eps=1e-3))
    ids = torch.from_numpy(windows[:2])
    with torch.no_grad():
        expected = other(ids).logits
        names = list(other.state_dict())
        assert fuse_norms(other) == 5
        torch.testing.assert_close(other(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert list(other.state_dict()) == names
    norm = FusedRMSNorm(nn.Parameter(torch.rand(8)), 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.rand(3, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize(("memory", "windows"), [(1, 1), (1 << 40, 12), (1_500_000, 2)])
def test_micro_windows_divide_the_batch_and_fit(llama: Any, memory: int, windows: int) -> None:
    spec = RelufySpec(steps=1, sequence=32, batch_tokens=32 * 12)
    model = family("llama").spec(llama.config.to_dict())
    assert choose_micro_windows(spec, model, 4, memory) == windows


def test_one_source_alone_is_itself(source: Path) -> None:
    mixture = Mixture([TokenSource(source, Words(), keep)], [5.0], 8)
    plain = TokenSource(source, Words(), keep)
    assert all(np.array_equal(mixture.windows(1)[0], plain.take(8)) for _ in islice(range(50), 50))
