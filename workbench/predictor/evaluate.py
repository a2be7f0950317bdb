"""Thresholds for a stated false-negative rate, and the quality that they give on other text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.capture.activations import run_trunk
from workbench.predictor.initialise import Factors
from workbench.predictor.metrics import ActiveLogits, Counts, count
from workbench.predictor.taps import Sample, Taps, View
from workbench.training.distributed import World

RATES = (0.01, 0.02, 0.05, 0.1)
Tick = Callable[[int], None]


def targets(false_negative: float) -> list[float]:
    """The false-negative rates that the card reports, the asked one among them, ascending."""
    return sorted({*RATES, false_negative})


class Scorer:
    """Logits of each layer from factors as stored, computed in float32 on the model's device."""

    def __init__(self, factors: Sequence[Factors]) -> None:
        self.factors = factors

    def __call__(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, d_model] to logits float32 [tokens, d_ff]."""
        f = self.factors[layer]
        return torch.addmm(f.bias, x.float() @ f.a.T, f.b.T)


def thresholds(
    model: Any,
    ups: Sequence[nn.Linear],
    scorer: Scorer,
    batches: Iterable[np.ndarray],
    rates: list[float],
    tick: Tick,
    *,
    view: View | None = None,
    world: World | None = None,
) -> list[list[float]]:
    """For each layer the threshold of each rate: at most that share of its active neurons has a logit not above it.

    `ups`: the linears that activations sit on; `view`: see `workbench.predictor.taps` [the FFN's own input, active
    above 0]. `batches`: this process's part; all get the thresholds of the parts together.
    """
    found = [ActiveLogits() for _ in ups]

    def sink(layer: int, sample: Sample) -> None:
        found[layer].add(scorer(layer, sample.x)[sample.z > 0].cpu().numpy())

    with Taps(model, ups, view or View(), sink):
        _run(model, batches, tick)
    if world is None or world.size == 1:
        return [logits.thresholds(rates) for logits in found]
    world.agree()
    limits = []
    for own in found:
        parts = world.gather(own)  # a layer at a time: these are many values
        for other in parts[1:]:
            parts[0].merge(other)
        limits.append(parts[0].thresholds(rates))
    return limits


def measure(
    model: Any,
    ups: Sequence[nn.Linear],
    scorer: Scorer,
    batches: Iterable[np.ndarray],
    limits: list[list[float]],
    tick: Tick,
    *,
    view: View | None = None,
    world: World | None = None,
) -> list[list[Counts]]:
    """Counts of each layer at each of its thresholds; arguments as for `thresholds`."""
    found = [[Counts() for _ in row] for row in limits]
    seen = view or View()

    def sink(layer: int, sample: Sample) -> None:
        value = seen.value(layer, sample.z)
        for i, counts in enumerate(count(scorer(layer, sample.x), limits[layer], sample.z, value)):
            found[layer][i] += counts

    with Taps(model, ups, seen, sink):
        _run(model, batches, tick)
    if world is None or world.size == 1:
        return found
    world.agree()
    parts = world.gather(found)
    return [[sum(cell, Counts()) for cell in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)]


def _run(model: Any, batches: Iterable[np.ndarray], tick: Tick) -> None:
    """`batches`: token ids [windows, length]."""
    done = 0
    for batch in batches:
        run_trunk(model, batch)
        done += batch.size
        tick(done)


def time_share(ups: Sequence[nn.Linear], scorer: Scorer, parts: int = 2, rounds: int = 9) -> dict[str, Any]:
    """Time of the predictors and of the dense FFN for one token, all layers one after the other, on this machine.

    The dense FFN's matrices all have the up projection's size: its time is `parts` times that of the up projections.
    """
    device = ups[0].weight.device
    x = torch.randn(1, ups[0].in_features, generator=torch.Generator().manual_seed(0)).to(device)
    narrow = x.to(ups[0].weight.dtype)
    limit = torch.zeros((), device=device)

    def predict() -> None:
        for layer in range(len(ups)):
            (scorer(layer, x) > limit).nonzero()

    def up() -> None:
        for module in ups:
            module(narrow)

    with torch.inference_mode():
        predictor_us, up_us = (_median_us(run, rounds, device) for run in (predict, up))
    return {
        "predictor_us": predictor_us,
        "ffn_us": parts * up_us,
        "share": predictor_us / (parts * up_us),
        "how": f"torch {torch.__version__} on {device.type}, one token, median of {rounds} rounds over all layers, "
        f"predictor float32, FFN {str(ups[0].weight.dtype).removeprefix('torch.')} as {parts} up projections",
    }


def _median_us(run: Callable[[], None], rounds: int, device: torch.device) -> float:
    times = []
    for _ in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:]) * 1e6
