"""All layers of one rank trained together: stacked factors, the balanced loss, its gradient, AdamW.

The gradient is written out rather than left to autograd: of the loss with respect to the logits it is
weight * (sigmoid(logit) - active), which needs no stored graph, so that logits live only for one block of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from workbench.predictor.config import Loss
from workbench.predictor.initialise import Factors

BETAS = (0.9, 0.98)
EPSILON = 1e-8
NAMES = ("a", "b", "bias")


@dataclass
class Batch:
    """One micro-batch of one group: x [layers, tokens, d_model]; active [layers, tokens, d_ff], bool for the balanced
    loss, else the activations themselves."""

    x: torch.Tensor
    active: torch.Tensor


class Group:
    """Layers of equal rank. Parameters a [layers, rank, d_model], b [layers, d_ff, rank], bias [layers, d_ff].

    `block_bytes` bounds the logits that exist at a time.
    """

    def __init__(self, layers: list[int], factors: list[Factors], loss: Loss, compute: torch.dtype, block_bytes: int):
        self.layers, self.loss, self.compute, self.block_bytes = layers, loss, compute, block_bytes
        self.parameters = {name: torch.stack([getattr(f, name) for f in factors]) for name in NAMES}
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.gradients = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.scales = self._scales()

    def _scales(self) -> dict[str, torch.Tensor]:
        """The size of a step for each layer's parameters: their own root mean square, the bias that of the logits."""
        a, b = (self.parameters[name].square().mean((1, 2), keepdim=True).sqrt() for name in ("a", "b"))
        rank = self.parameters["a"].shape[1]
        return {"a": a, "b": b, "bias": b[:, :, 0] * math.sqrt(rank)}

    def batch(self, tokens: int, device: str) -> Batch:
        """Buffers for a micro-batch of so many tokens."""
        _, d_ff, _ = self.parameters["b"].shape
        shape = (len(self.layers), tokens, self.parameters["a"].shape[2])
        kind = torch.bool if self.loss == "balanced" else torch.bfloat16
        return Batch(
            torch.empty(shape, dtype=self.compute, device=device),
            torch.empty((len(self.layers), tokens, d_ff), dtype=kind, device=device),
        )

    def accumulate(self, batch: Batch, share: float) -> torch.Tensor:
        """Add `share` times the micro-batch's gradient; the losses [layers], unweighted, from every fourth token.

        The loss of a layer is (mean over its active + mean over its inactive neurons) / 2, the mean weighted by the
        activation where the spec says so; its gradient is scaled by d_ff so that it does not vanish in large layers.
        """
        layers, tokens, d_ff = batch.active.shape
        positive, negative = _weights(batch.active, share * d_ff)
        losses = torch.zeros(layers, dtype=torch.float64, device=batch.x.device)
        step_tokens = max(1, min(tokens, self.block_bytes // (4 * d_ff)))
        step_layers = max(1, min(layers, self.block_bytes // (4 * d_ff * step_tokens)))
        for low in range(0, layers, step_layers):
            part = slice(low, low + step_layers)
            a, b = (self.parameters[name][part].to(self.compute) for name in ("a", "b"))
            for at in range(0, tokens, step_tokens):
                x, active = batch.x[part, at : at + step_tokens], batch.active[part, at : at + step_tokens]
                hidden = torch.bmm(x, a.transpose(1, 2))
                logits = torch.bmm(hidden, b.transpose(1, 2)).float().add_(self.parameters["bias"][part, None, :])
                loss, slope = _loss_and_slope(logits, active, positive[part], negative[part])
                losses[part] += loss / (share * d_ff)
                self.gradients["bias"][part] += slope.sum(1)
                slope = slope.to(self.compute)
                _add_product(self.gradients["b"][part], slope.transpose(1, 2), hidden)
                back = torch.bmm(slope, b)
                _add_product(self.gradients["a"][part], back.transpose(1, 2), x)
        return losses

    def apply(self, step: int, rate: float, decay: float) -> None:
        """One AdamW step (`step` from 1) with the accumulated gradients, which are cleared."""
        for name, p in self.parameters.items():
            g, m, v = self.gradients[name], self.first[name], self.second[name]
            m.lerp_(g, 1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            update = m / (v / (1 - BETAS[1] ** step)).sqrt_().add_(EPSILON)
            if name != "bias" and decay:
                p.mul_(1 - rate * decay)
            p.sub_(update.mul_(self.scales[name] * (rate / (1 - BETAS[0] ** step))))
            g.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, both moments and scales, for a checkpoint; the tensors themselves, not copies."""
        kinds = {"p": self.parameters, "m": self.first, "v": self.second, "s": self.scales}
        return {f"{kind}.{name}": tensor for kind, group in kinds.items() for name, tensor in group.items()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state()` gave."""
        for key, tensor in self.state().items():
            tensor.copy_(state[key])


def _weights(active: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """For each layer [layers, 1, 1]: the weight of a positive (for a unit of activation) and of a negative."""
    size = active.shape[1] * active.shape[2]
    mask = active if active.dtype == torch.bool else active > 0
    count = torch.stack([torch.count_nonzero(layer) for layer in mask])  # a sum over bools would copy them as int64
    total = count.double() if active.dtype == torch.bool else active.sum((1, 2), dtype=torch.float64)
    positive = torch.where(count > 0, 0.5 * scale / total.clamp_min(1e-12), 0.0)
    negative = 0.5 * scale / (size - count).clamp_min(1).double()
    return positive.float()[:, None, None], negative.float()[:, None, None]


def _loss_and_slope(
    logits: torch.Tensor, active: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss [layers], estimated from every fourth token, and its derivative by the logits [layers, tokens, d_ff].

    With t the logit, its sign turned where active, the loss is weight * softplus(t) and the slope
    weight * sigmoid(t), negative where active: neither overflows. The loss only goes into the curve, so that a
    quarter of the tokens is enough; the slope is exact.
    """
    mask = active if active.dtype == torch.bool else active > 0
    signed = torch.where(mask, -positive, negative)
    if active.dtype != torch.bool:
        signed = torch.where(mask, signed * active, signed)
    turned = torch.where(mask, -1.0, 1.0).mul_(logits)
    every = min(4, turned.shape[1])
    part = functional.softplus(turned[:, ::every]).mul_(signed[:, ::every].abs()).sum((1, 2)).double()
    loss = part * (turned.shape[1] / len(range(0, turned.shape[1], every)))
    return loss, turned.sigmoid_().mul_(signed)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, accumulated in float32 whatever the factors' dtype."""
    if left.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)
