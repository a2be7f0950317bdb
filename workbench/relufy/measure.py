"""Perplexity and zeros of a dense model, and FATReLU's thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.capture.activations import FfnTap
from workbench.capture.perplexity import perplexity

Tick = Callable[[int], None]
Zero = Callable[[int, torch.Tensor], torch.Tensor]
_BINS_A_DOUBLING, _LEAST, _BINS = 32, -24, 1024
GRID = [10 ** (-5 + 4.5 * i / 31) for i in range(32)]
"""Shares of the FFN outputs' energy that the thresholds may take away; from 1e-5 to 0.32."""


def measure(
    model: Any,
    linears: Sequence[nn.Linear],
    windows: np.ndarray,
    zero: Zero,
    *,
    autocast: torch.dtype | None = None,
    progress: Tick | None = None,
) -> dict[str, Any]:
    """Perplexity, and by layer the share of the activation's output that is exactly zero.

    linears: whose output the activation sits on. windows: int64 [n, T]. zero(layer, z): where the activation of the
    pre-activations z is zero. Windows of all tokens count, the first of each included.
    """
    zeros = torch.zeros(len(linears), dtype=torch.int64, device=linears[0].weight.device)
    elements = [0] * len(linears)

    def sink(layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        zeros[layer] += zero(layer, z).sum()
        elements[layer] += z.numel()

    with FfnTap(linears, sink):
        found = perplexity(model, windows, autocast=autocast, progress=progress)
    shares = [count / of for count, of in zip(zeros.tolist(), elements, strict=True)]
    return {"perplexity": found, "zeros": sum(shares) / len(shares), "zeros_by_layer": shares}


def at_most(thresholds: Sequence[float]) -> Zero:
    """`zero` of ReLU with these thresholds, one a layer; none: 0 everywhere."""
    return lambda layer, z: z <= (thresholds[layer] if len(thresholds) else 0.0)


class Energy:
    """By layer, how the squared contributions to the FFN's output are spread over the pre-activations that make them.

    A neuron's contribution for a token is what its down column is multiplied by, times the column's norm.
    """

    def __init__(self, linears: Sequence[nn.Linear], downs: Sequence[nn.Linear]) -> None:
        self.linears, self.downs = list(linears), list(downs)
        device = linears[0].weight.device
        self.sums = torch.zeros(len(linears), _BINS, dtype=torch.float64, device=device)
        self._z: torch.Tensor | None = None

    @contextmanager
    def tap(self) -> Iterator[None]:
        """While open, every forward of the model is added."""

        def keep(layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
            self._z = z

        handles = [down.register_forward_pre_hook(self._hook(i)) for i, down in enumerate(self.downs)]
        try:
            with FfnTap(self.linears, keep):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int) -> Callable[..., None]:
        norms = self.downs[layer].weight.float().square().sum(0)

        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            assert self._z is not None
            z, value = self._z.float(), args[0].reshape(self._z.shape).float()
            bins = ((z.clamp_min(2.0**_LEAST).log2() - _LEAST) * _BINS_A_DOUBLING).long().clamp_(0, _BINS - 1)
            energy = value.square() * norms
            self.sums[layer] += torch.bincount(bins.flatten(), energy.flatten().double(), _BINS)

        return hook

    def thresholds(self, share: float) -> list[float]:
        """For each layer the value below which at most `share` of its energy lies; 0 where the first bin has more."""
        cumulated = self.sums.cumsum(1)
        whole = (cumulated <= share * cumulated[:, -1:]).sum(1).tolist()
        return [2.0 ** (_LEAST + count / _BINS_A_DOUBLING) if count else 0.0 for count in whole]


def largest(accepted: Callable[[int], bool], count: int) -> int:
    """The largest index below `count` that is accepted, or -1, if all before an accepted one are; by bisection."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low
