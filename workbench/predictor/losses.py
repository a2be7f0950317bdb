"""The loss of predictors and its slope by the logits, plain and as one fused kernel.

The weight of a neuron in a layer's loss is fixed for the whole run, from how often the layer's neurons fire: `positive`
for an active one (times its size, where sizes count), `negative` for the others. With t the logit, its sign turned
where active, the loss is weight * softplus(t) and the slope weight * sigmoid(t), negative where active: neither
overflows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from workbench.errors import DeviceError
from workbench.predictor.config import Loss

EVERY = 4  # the loss only goes into the curve, so that a quarter of the tokens is enough; the slope is exact
Slope = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def weights(loss: Loss, share: torch.Tensor, size: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [layers, 1, 1] each: what a positive (of size 1) and a negative count in the sum over the `tokens` of a
    step, such that this sum is d_ff times the mean loss: it does not vanish in large layers.

    `share`: of a layer's neurons that fire; `size`: mean of an active one; float64 [layers].
    """
    if loss == "bce":
        positive = negative = torch.full_like(share, 1 / tokens)
    else:
        positive, negative = 0.5 / (share * size * tokens), 0.5 / ((1 - share) * tokens)
    return positive.float()[:, None, None], negative.float()[:, None, None]


def slope(
    logits: torch.Tensor, bias: torch.Tensor, active: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor
) -> torch.Tensor:
    """The derivative of the loss by the logits [layers, tokens, d_ff], in their dtype; `logits` is overwritten.

    bias [layers, 1, d_ff]; active [layers, tokens, d_ff]: bool, or sizes that are 0 where inactive.
    """
    turned = logits.float().add_(bias)
    mask = active if active.dtype == torch.bool else active > 0
    turned.mul_(torch.where(mask, -1.0, 1.0)).sigmoid_()
    return turned.mul_(_signed(active, mask, positive, negative)).to(logits.dtype)


def fused_slope(
    logits: torch.Tensor, bias: torch.Tensor, active: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor
) -> torch.Tensor:
    """As `slope`, written for the compiler: each element is read and written once."""
    y = logits.float() + bias
    mask = active if active.dtype == torch.bool else active > 0
    return (torch.sigmoid(torch.where(mask, -y, y)) * _signed(active, mask, positive, negative)).to(logits.dtype)


def _signed(active: torch.Tensor, mask: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    weight = torch.where(mask, -positive, negative)
    return weight if active.dtype == torch.bool else torch.where(mask, weight * active, weight)


def loss(
    logits: torch.Tensor, bias: torch.Tensor, active: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor
) -> torch.Tensor:
    """The sum of the losses [layers] float64, estimated from every fourth token."""
    tokens = logits.shape[1]
    every = min(EVERY, tokens)
    y, active = logits[:, ::every].float() + bias, active[:, ::every]
    mask = active if active.dtype == torch.bool else active > 0
    part = functional.softplus(torch.where(mask, -y, y)) * _signed(active, mask, positive, negative).abs()
    return part.sum((1, 2)).double() * (tokens / len(range(0, tokens, every)))


def compiled_slope() -> Slope:
    """`fused_slope` through torch.compile, compiled at its first call. DeviceError there when this torch cannot."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    run = torch.compile(fused_slope, dynamic=True, fullgraph=True)

    def call(*args: torch.Tensor) -> torch.Tensor:
        try:
            return run(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            first = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise DeviceError(f"the loss cannot be compiled here ({first}); pass fused=False") from error

    return call
