"""All layers of one rank trained together: stacked factors, the gradient of their loss, AdamW.

The gradient is written out rather than left to autograd: it needs no stored graph, so that logits live only for one
block of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.predictor.initialise import Factors
from workbench.predictor.losses import Slope, loss, slope

BETAS = (0.9, 0.98)
EPSILON = 1e-8
NAMES = ("a", "b", "bias")


@dataclass
class Batch:
    """One micro-batch of one group: x [layers, tokens, d_model]; active [layers, tokens, d_ff], bool where all active
    neurons count alike, else their sizes."""

    x: torch.Tensor
    active: torch.Tensor


class Group:
    """Layers of equal rank. Parameters a [layers, rank, d_model], b [layers, d_ff, rank], bias [layers, d_ff].

    positive, negative [layers, 1, 1]: the loss's weights (`workbench.predictor.losses.weights`). `flat` holds all
    gradients, one after the other. `block_bytes` bounds the logits that exist at a time.
    """

    def __init__(
        self,
        layers: list[int],
        factors: Sequence[Factors],
        positive: torch.Tensor,
        negative: torch.Tensor,
        compute: torch.dtype,
        block_bytes: int,
        slope: Slope = slope,
    ) -> None:
        self.layers, self.compute, self.block_bytes = layers, compute, block_bytes
        self.positive, self.negative, self._slope = positive, negative, slope
        self.parameters = {name: torch.stack([getattr(f, name) for f in factors]) for name in NAMES}
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        sizes = [p.numel() for p in self.parameters.values()]
        self.flat = torch.zeros(sum(sizes), device=self.parameters["a"].device)
        parts = self.flat.split(sizes)
        self.gradients = {n: g.view(p.shape) for (n, p), g in zip(self.parameters.items(), parts, strict=True)}
        self.scales = self._scales()

    def _scales(self) -> dict[str, torch.Tensor]:
        """The size of a step for each layer's parameters: their own root mean square, the bias that of the logits."""
        a, b = (self.parameters[name].square().mean((1, 2), keepdim=True).sqrt() for name in ("a", "b"))
        rank = self.parameters["a"].shape[1]
        return {"a": a, "b": b, "bias": b[:, :, 0] * math.sqrt(rank)}

    def batch(self, tokens: int, sized: bool) -> Batch:
        """Buffers for a micro-batch of so many tokens; `sized`: active neurons differ in how much they count."""
        layers, d_ff, _ = self.parameters["b"].shape
        device = self.parameters["b"].device
        shape = (layers, tokens, self.parameters["a"].shape[2])
        return Batch(
            torch.empty(shape, dtype=self.compute, device=device),
            torch.empty((layers, tokens, d_ff), dtype=torch.bfloat16 if sized else torch.bool, device=device),
        )

    def accumulate(self, batch: Batch, want_loss: bool = True) -> torch.Tensor | None:
        """Add the micro-batch's gradient; with `want_loss` its part of the step's mean loss [layers], float64.

        The loss of a layer is (mean over its active + mean over its inactive neurons) / 2, or as its weights say; the
        gradient is d_ff times that of the mean.
        """
        layers, tokens, d_ff = batch.active.shape
        losses = torch.zeros(layers, dtype=torch.float64, device=batch.x.device) if want_loss else None
        item = 4  # of logits in float32, which the plain slope makes of them
        step_tokens = max(1, min(tokens, self.block_bytes // (item * d_ff)))
        step_layers = max(1, min(layers, self.block_bytes // (item * d_ff * step_tokens)))
        for low in range(0, layers, step_layers):
            part = slice(low, low + step_layers)
            a, b = (self.parameters[name][part].to(self.compute) for name in ("a", "b"))
            weights = (self.positive[part], self.negative[part])
            bias = self.parameters["bias"][part, None, :]
            for at in range(0, tokens, step_tokens):
                x, active = batch.x[part, at : at + step_tokens], batch.active[part, at : at + step_tokens]
                hidden = torch.bmm(x, a.transpose(1, 2))
                logits = torch.bmm(hidden, b.transpose(1, 2))
                if losses is not None:
                    losses[part] += loss(logits, bias, active, *weights) / d_ff
                back = self._slope(logits, bias, active, *weights)
                self.gradients["bias"][part] += back.sum(1, dtype=torch.float32)
                _add_product(self.gradients["b"][part], back.transpose(1, 2), hidden)
                _add_product(self.gradients["a"][part], torch.bmm(back, b).transpose(1, 2), x)
        return losses

    def apply(self, step: int, rate: float, decay: float) -> None:
        """One AdamW step (`step` from 1) with the accumulated gradients, which are cleared."""
        for name, p in self.parameters.items():
            g, m, v = self.gradients[name], self.first[name], self.second[name]
            m.lerp_(g, 1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            update = (v / (1 - BETAS[1] ** step)).sqrt_().add_(EPSILON)
            torch.div(m, update, out=update)
            if name != "bias" and decay:
                p.mul_(1 - rate * decay)
            p.sub_(update.mul_(self.scales[name] * (rate / (1 - BETAS[0] ** step))))
        self.flat.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, both moments, scales and the loss's weights, for a checkpoint; the tensors, not copies."""
        kinds = {"p": self.parameters, "m": self.first, "v": self.second, "s": self.scales}
        named = {f"{kind}.{name}": tensor for kind, group in kinds.items() for name, tensor in group.items()}
        return {**named, "w.positive": self.positive, "w.negative": self.negative}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state()` gave."""
        for key, tensor in self.state().items():
            tensor.copy_(state[key])


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, accumulated in float32 whatever the factors' dtype."""
    if left.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)
