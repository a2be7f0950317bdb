"""The parts of predictor training against plain computations."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from workbench.predictor.config import PredictorSpec
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.initialise import Factors, Moments, balance, regression
from workbench.predictor.metrics import ActiveLogits, count
from workbench.predictor.optimise import Batch, Group
from workbench.spec import ModelSpec
from workbench.training.schedule import rate_at
from workbench.training.state import CURRENT, load_state, save_state

LAYERS, TOKENS, D_MODEL, D_FF, RANK = 3, 24, 10, 14, 4


def problem(loss: str, block_bytes: int = 1 << 20) -> tuple[Group, Batch]:
    g = torch.Generator().manual_seed(3)
    factors = [
        Factors(
            torch.randn(RANK, D_MODEL, generator=g),
            torch.randn(D_FF, RANK, generator=g),
            torch.randn(D_FF, generator=g),
        )
        for _ in range(LAYERS)
    ]
    group = Group(list(range(LAYERS)), factors, loss, torch.float32, block_bytes)  # type: ignore[arg-type]
    batch = group.batch(TOKENS, "cpu")
    batch.x.copy_(torch.randn(batch.x.shape, generator=g))
    z = torch.randn(batch.active.shape, generator=g) - 0.8
    batch.active.copy_(z > 0 if loss == "balanced" else z.clamp_min(0))
    return group, batch


def plain_loss(logits: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """The balanced loss of one layer in its textbook form."""
    mask = active > 0
    weight = active.float()[mask]
    positive = (functional.softplus(-logits[mask]) * weight).sum() / weight.sum()
    return (positive + functional.softplus(logits[~mask]).mean()) / 2


@pytest.mark.parametrize("loss", ["balanced", "magnitude"])
@pytest.mark.parametrize("block_bytes", [1 << 20, 4 * D_FF * 7, 1])
def test_gradient_equals_autograd(loss: str, block_bytes: int) -> None:
    group, batch = problem(loss, block_bytes)
    losses = group.accumulate(batch, 0.5)
    for layer in range(LAYERS):
        a, b, bias = (group.parameters[n][layer].clone().requires_grad_() for n in ("a", "b", "bias"))
        logits = (batch.x[layer] @ a.T) @ b.T + bias
        (plain_loss(logits, batch.active[layer]) * 0.5 * D_FF).backward()
        for name, parameter in (("a", a), ("b", b), ("bias", bias)):
            torch.testing.assert_close(group.gradients[name][layer], parameter.grad, rtol=1e-4, atol=1e-6)
        if block_bytes == 1:  # blocks of one token: every token is in the estimate
            assert losses[layer].item() == pytest.approx(
                plain_loss(logits, batch.active[layer]).item(), rel=1e-4 if loss == "balanced" else 1e-3
            )


def test_loss_is_finite_at_extreme_logits_and_without_active_neurons() -> None:
    group, batch = problem("balanced")
    group.parameters["bias"].mul_(1e6)
    batch.active[0] = False
    batch.active[1] = True
    losses = group.accumulate(batch, 1.0)
    assert torch.isfinite(losses).all()
    assert all(torch.isfinite(g).all() for g in group.gradients.values())


def test_step_is_adamw() -> None:
    group, batch = problem("balanced")
    before = group.parameters["b"].clone().requires_grad_()
    group.accumulate(batch, 1.0)
    scale = group.scales["b"][0].item()
    twin = torch.optim.AdamW([before], lr=0.01 * scale, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1 / scale)
    before.grad = group.gradients["b"].clone()
    before.grad[1:] = 0
    group.apply(1, 0.01, 0.1)
    twin.step()
    torch.testing.assert_close(group.parameters["b"][0], before.detach()[0])
    assert not group.gradients["b"].any()


def test_rate_rises_then_falls_to_zero() -> None:
    rates = [rate_at(step, 100, 1.0, 0.1) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] < 0.001
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))
    assert rate_at(1, 1, 1.0, 0.0) == 1.0


def fitted(rank: int) -> tuple[Factors, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    mixing = torch.randn(12, 12, generator=g) * torch.linspace(2, 0.1, 12)
    x = torch.randn(4000, 12, generator=g) @ mixing.T + 0.5
    weight, bias = torch.randn(30, 12, generator=g), torch.randn(30, generator=g) - 2
    moments = Moments(1, 12, 30, "cpu")
    for part in x.split(1000):
        moments.add(0, part, part @ weight.T + bias)
    return regression(moments, 0, weight, bias, rank), x, weight, bias


def test_regression_at_full_rank_predicts_every_neuron() -> None:
    factors, x, weight, bias = fitted(12)
    logits = (x @ factors.a.T) @ factors.b.T + factors.bias
    active = x @ weight.T + bias > 0
    share = (active.double().sum(0) + 0.5) / 4001
    predicted = logits > balance(share)  # the logits carry the balance, a constant of the layer
    assert (predicted != active).float().mean() < 1e-3


def test_regression_is_the_best_of_its_rank() -> None:
    """Its squared error on the weighted pre-activations is the least that any rank-4 map has (Eckart and Young)."""
    factors, x, weight, bias = fitted(4)
    z = (x @ weight.T + bias).double()
    share = ((z > 0).double().sum(0) + 0.5) / (len(z) + 1)
    centred, inputs = z - z.mean(0), (x - x.mean(0)).double()
    target = centred * (share * (1 - share)).sqrt() / centred.square().mean(0).sqrt()
    hidden = inputs @ factors.a.double().T
    b = torch.linalg.solve(hidden.T @ hidden, hidden.T @ target)
    error = (hidden @ b - target).square().sum()
    least = torch.linalg.eigvalsh(target.T @ target).flip(0)[4:].sum()
    assert error.item() == pytest.approx(least.item(), rel=1e-3)


def test_thresholds_miss_at_most_the_share_exact_and_from_the_histogram() -> None:
    values = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    values[:300] = -1.5  # ties
    exact, binned = ActiveLogits(), ActiveLogits(limit=5000)
    for part in np.split(values, 10):
        exact.add(part)
        binned.add(part)
    for share in (0.0, 0.01, 0.05, 0.5):
        for found in (exact, binned):
            assert (values <= found.threshold(share)).sum() <= share * values.size
        just_above = np.nextafter(np.float32(exact.threshold(share)), np.float32(np.inf))
        assert (values <= just_above).sum() > share * values.size
        assert binned.threshold(share) == pytest.approx(exact.threshold(share), rel=2e-3, abs=2e-3)
    assert ActiveLogits().threshold(0.05) == 0.0


def test_counts_by_hand() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.1, 3.0, -2.0]])
    pre = torch.tensor([[1.0, 3.0, -1.0], [0.0, 0.5, -1.0]])
    low, high = count(logits, [0.0, 2.5], pre)
    assert (low.active, low.predicted, low.missed) == (3, 4, 1)
    assert low.false_negative == pytest.approx(1 / 3)
    assert low.false_positive == pytest.approx(2 / 3)
    assert low.predicted_over_active == pytest.approx(4 / 3)
    assert low.missed_share == pytest.approx(3 / 4.5)
    assert (high.predicted, high.missed) == (1, 2)
    both = low + high
    assert (both.tokens, both.missed) == (4, 3)
    assert count(logits, [9.0], -pre.abs())[0].false_negative == 0.0


def test_fingerprint_is_the_same_in_every_storage_dtype_and_differs_between_models() -> None:
    g = torch.Generator().manual_seed(0)
    layers = [torch.randn(200, 24, generator=g) * 10.0**-k for k in (1, 5, 9)]  # the last underflows in float16
    wanted = fingerprint(layers)
    narrow = [w.to(torch.bfloat16) for w in layers]
    twice = [w.to(torch.float16).to(torch.bfloat16) for w in layers]
    bits = [w.view(torch.uint16).numpy() for w in narrow]
    for same in (narrow, twice, bits, [w.half() for w in layers], [w.numpy() for w in layers]):
        assert fingerprint(same) == wanted
    layers[1] = layers[1] + 1e-7 * torch.randn(200, 24, generator=g)
    assert fingerprint(layers) != wanted
    assert fingerprint(layers[:2]) != wanted


def test_state_falls_back_to_the_one_before(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    for step in (1, 2):
        save_state(tmp_path, {"x": torch.full((3,), float(step))}, {"step": step})
    found = load_state(tmp_path)
    assert found is not None
    assert (found[1]["step"], found[0]["x"][0].item()) == (2, 2.0)
    raw = bytearray((tmp_path / CURRENT).read_bytes())
    raw[-3] ^= 1
    for damage in (bytes(raw), raw[:40], b""):
        (tmp_path / CURRENT).write_bytes(damage)
        found = load_state(tmp_path)
        assert found is not None
        assert found[1]["step"] == 1


def test_defaults_scale_with_the_model_and_nonsense_is_refused() -> None:
    def model(layers: int, d_model: int) -> ModelSpec:
        return ModelSpec("opt", layers, d_model, 4 * d_model, 100, "relu", 128)

    large = PredictorSpec().resolved(model(32, 4096))  # OPT-6.7B: the paper's own ranks
    assert (large.rank, large.last_rank, large.last_layers) == (128, 1024, 4)
    assert large.sequence == 128
    assert large.ranks(32) == [128] * 28 + [1024] * 4
    small = PredictorSpec().resolved(model(6, 512))
    assert small.ranks(6) == [64] * 5 + [128]
    assert PredictorSpec(rank=99).resolved(model(2, 16)).ranks(2) == [16, 16]
    for wrong in ({"rank": 0}, {"false_negative": 1.0}, {"loss": "plain"}, {"learning_rate": 0.0}, {"warmup": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PredictorSpec(**wrong)  # type: ignore[arg-type]
    assert math.isclose(PredictorSpec().false_negative, 0.05)
