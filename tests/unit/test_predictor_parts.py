"""The parts of predictor training against plain computations."""

from __future__ import annotations

import math
import os
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from workbench.errors import PredictorError, TrainingError
from workbench.predictor.allocate import Estimate, allocate, candidates, estimate
from workbench.predictor.config import PredictorSpec
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.initialise import Factors, Moments, _cholesky, _eigh, balance, regression
from workbench.predictor.losses import compiled_slope, fused_slope, slope, weights
from workbench.predictor.metrics import ActiveLogits, count
from workbench.predictor.optimise import Batch, Group
from workbench.predictor.quantise import rows_to_int8, store, values
from workbench.predictor.taps import Sample
from workbench.spec import ModelSpec
from workbench.training.interrupts import Interrupts
from workbench.training.schedule import rate_at
from workbench.training.state import CURRENT, StateWriter, load_state, save_state

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
    x = torch.randn(LAYERS, TOKENS, D_MODEL, generator=g)
    z = torch.randn(LAYERS, TOKENS, D_FF, generator=g) - 0.8
    sized = loss == "magnitude"
    share = (z > 0).double().mean((1, 2))
    size = z.clamp_min(0).bfloat16().double().sum((1, 2)) / (z > 0).sum((1, 2)) if sized else torch.ones(LAYERS)
    positive, negative = weights(loss, share, size.double(), TOKENS)  # type: ignore[arg-type]
    group = Group(list(range(LAYERS)), factors, positive, negative, torch.float32, block_bytes)
    batch = group.batch(TOKENS, sized)
    batch.x.copy_(x)
    batch.active.copy_(z.clamp_min(0) if sized else z > 0)
    return group, batch


def plain_loss(logits: torch.Tensor, active: torch.Tensor, loss: str) -> torch.Tensor:
    """The loss of one layer in its textbook form."""
    mask = active > 0
    if loss == "bce":
        return functional.binary_cross_entropy_with_logits(logits, mask.float())
    weight = active.float()[mask]
    positive = (functional.softplus(-logits[mask]) * weight).sum() / weight.sum()
    return (positive + functional.softplus(logits[~mask]).mean()) / 2


@pytest.mark.parametrize("loss", ["balanced", "bce", "magnitude"])
@pytest.mark.parametrize("block_bytes", [1 << 20, 4 * D_FF * 7, 1])
def test_gradient_equals_autograd(loss: str, block_bytes: int) -> None:
    group, batch = problem(loss, block_bytes)
    losses = group.accumulate(batch)
    assert losses is not None
    for layer in range(LAYERS):
        a, b, bias = (group.parameters[n][layer].clone().requires_grad_() for n in ("a", "b", "bias"))
        logits = (batch.x[layer] @ a.T) @ b.T + bias
        (plain_loss(logits, batch.active[layer], loss) * D_FF).backward()
        for name, parameter in (("a", a), ("b", b), ("bias", bias)):
            torch.testing.assert_close(group.gradients[name][layer], parameter.grad, rtol=1e-4, atol=1e-6)
        if block_bytes == 1:  # blocks of one token: every token is in the estimate
            assert losses[layer].item() == pytest.approx(plain_loss(logits, batch.active[layer], loss).item(), rel=1e-4)


def test_gradients_of_halves_add_up_to_that_of_the_whole() -> None:
    """What lets processes share a step: weights do not depend on what else is in a micro-batch."""
    whole, batch = problem("balanced")
    parts, _ = problem("balanced")
    assert whole.accumulate(batch, want_loss=False) is None
    for half in (slice(0, 9), slice(9, TOKENS)):
        parts.accumulate(Batch(batch.x[:, half], batch.active[:, half]))
    torch.testing.assert_close(parts.flat, whole.flat)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_slope_is_the_plain_one(sized: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(2, 5, 7, generator=g)).to(dtype)
    bias, z = torch.randn(2, 1, 7, generator=g), torch.randn(2, 5, 7, generator=g)
    active = z.clamp_min(0).bfloat16() if sized else z > 0
    scales = (torch.rand(2, 1, 1, generator=g), torch.rand(2, 1, 1, generator=g))
    wanted = slope(logits.clone(), bias, active, *scales)
    torch.testing.assert_close(fused_slope(logits, bias, active, *scales), wanted)
    assert wanted.dtype == dtype


def test_loss_is_finite_at_extreme_logits_and_without_active_neurons() -> None:
    group, batch = problem("balanced")
    group.parameters["bias"].mul_(1e6)
    batch.active[0] = False
    batch.active[1] = True
    losses = group.accumulate(batch)
    assert losses is not None
    assert torch.isfinite(losses).all()
    assert all(torch.isfinite(g).all() for g in group.gradients.values())


def test_step_is_adamw() -> None:
    group, batch = problem("balanced")
    before = group.parameters["b"].clone().requires_grad_()
    group.accumulate(batch)
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
    return regression(moments_of(x, weight, bias), 0, weight, bias, rank).factors(rank), x, weight, bias


def moments_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Moments:
    moments = Moments(1, x.shape[1], len(weight), "cpu")
    for part in x.split(1000):
        moments.add(0, Sample(part, part, part @ weight.T + bias, None))
    return moments


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


def test_a_lower_rank_is_the_beginning_of_a_higher_one() -> None:
    high, x, weight, bias = fitted(12)
    moments = moments_of(x, weight, bias)
    cut = regression(moments, 0, weight, bias, 12).factors(4)
    own = regression(moments, 0, weight, bias, 4).factors(4)
    torch.testing.assert_close(cut.b @ cut.a, own.b @ own.a, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cut.bias, own.bias, rtol=1e-4, atol=1e-4)
    assert high.a.shape == (12, 12)


def test_a_threshold_is_a_shift_of_the_bias() -> None:
    _, x, weight, bias = fitted(4)
    plain = regression(moments_of(x, weight, bias - 0.7), 0, weight, bias - 0.7, 4).factors(4)
    shifted = regression(moments_of(x, weight, bias - 0.7), 0, weight, bias, 4, threshold=0.7).factors(4)
    torch.testing.assert_close(shifted.bias, plain.bias)


def test_large_layers_are_fitted_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3000, 256, generator=g) * torch.logspace(0, -2, 256)
    weight, bias = torch.randn(300, 256, generator=g), torch.randn(300, generator=g)
    moments = moments_of(x, weight, bias)
    exact = regression(moments, 0, weight, bias, 16)
    monkeypatch.setattr("workbench.predictor.initialise.EXACT", 32)
    quick = regression(moments, 0, weight, bias, 16)
    left = [(fit.variance - fit.b.square().sum(1)).sum().item() for fit in (exact, quick)]
    assert left[1] == pytest.approx(left[0], rel=0.01)


def test_a_root_of_what_rounding_made_indefinite_is_finite() -> None:
    basis = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.linspace(0.1, 1, 64, dtype=torch.float64)
    values[:2] = torch.tensor([-1e-6, 0.0])  # the null direction of a norm's output, as rounding leaves it
    covariance = (basis * values) @ basis.T
    root = _cholesky(covariance, 1e-10)
    assert torch.isfinite(root).all()
    torch.testing.assert_close(root @ root.T, covariance, atol=1e-4, rtol=0)


def test_a_root_that_is_not_finite_is_not_taken_for_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.linalg.cholesky_ex, []

    def first_gives_nan(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(matrix)
        lower, info = real(matrix)
        return (lower * math.nan if len(calls) == 1 else lower), torch.zeros_like(info)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", first_gives_nan)
    covariance = torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(_cholesky(covariance, 1e-10) ** 2, covariance, atol=1e-8, rtol=0)
    assert len(calls) == 2


def test_eigenvectors_that_are_not_finite_are_refused() -> None:
    with pytest.raises(TrainingError, match="3 x 3 eigenvectors are not finite"):
        _eigh(torch.full((3, 3), math.nan, dtype=torch.float64))


def test_an_input_that_determines_the_ffn_input_is_as_good() -> None:
    """u = x M: the best map from u is W M^-1, and the factors predict the same."""
    factors, x, weight, bias = fitted(12)
    g = torch.Generator().manual_seed(5)
    mix = torch.eye(12) + 0.2 * torch.randn(12, 12, generator=g)
    u = x @ mix + 0.3
    moments = Moments(1, 12, 30, "cpu", other=True)
    for own, seen in zip(x.split(1000), u.split(1000), strict=True):
        moments.add(0, Sample(seen, own, own @ weight.T + bias, None))
    other = regression(moments, 0, weight, bias, 12).factors(12)
    active = x @ weight.T + bias > 0
    share = (active.double().sum(0) + 0.5) / 4001
    for found, given in ((factors, x), (other, u)):
        logits = (given @ found.a.T) @ found.b.T + found.bias
        assert ((logits > balance(share)) != active).float().mean() < 2e-3


def test_ranks_are_allocated_where_they_gain_most() -> None:
    flat = Estimate(10.0, {2: 20.0, 4: 19.0, 8: 18.5})
    steep = Estimate(10.0, {2: 90.0, 4: 89.0, 8: 20.0})  # the first step alone looks poor
    assert allocate([flat, steep], 10, 10 * 12) == [4, 8]
    assert allocate([flat, steep], 10, 10 * 10) == [2, 8]
    assert allocate([flat, steep], 10, 10 * 9) == [4, 4]
    assert allocate([flat, steep], 10, 10 * 16) == [8, 8]
    with pytest.raises(PredictorError, match="rank_bytes 39 is below"):
        allocate([flat, steep], 10, 39)
    assert candidates(4096) == [64, 112, 176, 288, 464, 768, 1248, 2048]
    assert candidates(576)[-1] == 288
    assert all(rank % 16 == 0 for width in (256, 576, 768, 2048) for rank in candidates(width))
    assert candidates(16)


def test_an_estimate_counts_what_a_threshold_at_the_rate_predicts() -> None:
    _, x, weight, bias = fitted(12)
    fit = regression(moments_of(x, weight, bias), 0, weight, bias, 12)
    held, active = x[:600], x[:600] @ weight.T + bias > 0
    found = estimate(fit, held, active, [2, 12], 0.05)
    for rank in (2, 12):
        f = fit.factors(rank)
        logits = ((held @ f.a.T) @ f.b.T + f.bias).numpy()
        edge = np.quantile(logits[active.numpy()], 0.05, method="lower")
        assert found.predicted[rank] == pytest.approx((logits >= edge).sum() / 600, rel=0.01)
    assert found.active < found.predicted[12] * 1.06 < found.predicted[2]


def test_rows_are_rounded_to_127_steps() -> None:
    matrix = torch.tensor([[1.0, -2.54, 0.0], [0.0, 0.0, 0.0], [1e-30, 5e-31, 0.0]])
    q, scale = rows_to_int8(matrix)
    assert q.tolist() == [[50, -127, 0], [0, 0, 0], [127, 64, 0]]
    assert scale.tolist() == pytest.approx([0.02, 0.0, 1e-30 / 127])
    stored = store(Factors(matrix, matrix.T, torch.zeros(3)), "int8")
    exact = values(Factors(matrix, matrix.T, torch.zeros(3)), "int8")
    assert stored.a_scale is not None
    assert np.array_equal(stored.a * stored.a_scale[:, None], exact.a.numpy())


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


def test_merged_parts_give_the_thresholds_of_the_whole() -> None:
    values = np.random.default_rng(1).normal(size=9000).astype(np.float32)
    for limit in (10_000, 7000, 2000):  # exact; a histogram once merged; histograms from the start
        whole, parts = ActiveLogits(limit), [ActiveLogits(limit) for _ in range(3)]
        whole.add(values)
        for part, own in zip(parts, np.split(values, 3), strict=True):
            part.add(own)
        for other in parts[1:]:
            parts[0].merge(other)
        assert parts[0].size == 9000
        assert parts[0].thresholds([0.01, 0.05]) == whole.thresholds([0.01, 0.05])


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


def test_states_are_written_while_training_goes_on(tmp_path: Path) -> None:
    writer, parameter = StateWriter(tmp_path), torch.zeros(1000)
    for step in range(1, 6):
        parameter.fill_(float(step))
        writer.save({"x": parameter, "y": torch.tensor([True, False])}, {"step": step})
        parameter.fill_(-1.0)  # what is written is what was there
    writer.join()
    found = load_state(tmp_path)
    assert found is not None
    assert (found[1]["step"], found[0]["x"].unique().tolist()) == (5, [5.0])
    assert found[0]["y"].tolist() == [True, False]
    blocked = StateWriter(tmp_path / "absent")
    blocked.save({"x": parameter}, {})
    with pytest.raises(TrainingError, match="cannot be written"):
        blocked.join()


def test_signals_of_one_ctrl_c_count_once() -> None:
    with Interrupts(grace=60.0) as interrupts:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert interrupts.pending
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_the_compiled_slope_is_the_plain_one() -> None:
    run = compiled_slope()
    for shape in ((2, 5, 7), (1, 16, 96), (3, 64, 40)):
        logits, z = torch.randn(shape).bfloat16(), torch.randn(shape)
        scales = (torch.rand(shape[0], 1, 1), torch.rand(shape[0], 1, 1))
        bias = torch.randn(shape[0], 1, shape[2])
        torch.testing.assert_close(run(logits, bias, z > 0, *scales), slope(logits, bias, z > 0, *scales))


def test_defaults_scale_with_the_model_and_nonsense_is_refused() -> None:
    def model(layers: int, d_model: int) -> ModelSpec:
        return ModelSpec("opt", layers, d_model, 4 * d_model, 100, "relu", 128)

    large = PredictorSpec().resolved(model(32, 4096))  # OPT-6.7B: the paper's own ranks
    assert (large.rank, large.last_rank, large.last_layers) == (128, 1024, 4)
    assert large.sequence == 128
    assert large.ranks(32) == [128] * 28 + [1024] * 4
    small = PredictorSpec().resolved(model(6, 512))
    assert small.ranks(6) == [64] * 5 + [128]
    assert (large.batch_tokens, PredictorSpec(tokens=3_000_000).resolved(model(2, 64)).batch_tokens) == (512, 8192)
    assert large.rank_cost(4096, 16384) == 20480 + 4
    assert PredictorSpec(rank=99).resolved(model(2, 16)).ranks(2) == [16, 16]
    for wrong in (
        {"rank": 0},
        {"false_negative": 1.0},
        {"loss": "plain"},
        {"input": "logits"},
        {"rank_bytes": 99},
        {"learning_rate": 0.0},
        {"warmup": 1.0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PredictorSpec(**wrong)  # type: ignore[arg-type]
    assert math.isclose(PredictorSpec().false_negative, 0.05)
