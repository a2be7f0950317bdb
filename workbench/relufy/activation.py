"""ReLU whose backward pass adds the gradient of a sparsity penalty."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _Penalised(torch.autograd.Function):
    """relu(z); the penalty's gradient is added on the way back, so that no tensor is kept for it."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, strength: torch.Tensor, capped: bool) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.relu(z)
        count = torch.count_nonzero(h)
        mean = h.sum(dtype=torch.float32) / count.clamp_min(1)
        ctx.save_for_backward(h, strength, mean)
        ctx.capped = capped
        ctx.mark_non_differentiable(count)
        ctx.set_materialize_grads(False)
        return h, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        (grad, _), (h, strength, mean) = grads, ctx.saved_tensors
        slope = (strength / (mean.clamp_min(1e-12) * h.numel())).to(h.dtype)
        pushed = torch.where(h < mean.to(h.dtype), slope, 0) if ctx.capped else slope
        grad = pushed.expand_as(h) if grad is None else grad + pushed
        return torch.where(h > 0, grad, 0), None, None


class PenalisedReLU(nn.Module):
    """ReLU of one layer under training. A forward pass with gradients counts the active neurons.

    strength: float32 scalar on the model's device, shared by all layers: the weight of this layer's penalty, whose
    value is the mean over all elements of a / m, or of min(a, m) / m if `capped`; m: the mean of those a above 0, held
    constant. counts: int64 [layers], to which the number of active elements is added.
    """

    def __init__(self, layer: int, strength: torch.Tensor, counts: torch.Tensor, capped: bool) -> None:
        super().__init__()
        self.layer, self.capped = layer, capped
        self.strength, self.counts = strength, counts  # not buffers: they belong to the trainer

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """relu(z), any shape."""
        if not torch.is_grad_enabled():
            return F.relu(z)
        h, count = _Penalised.apply(z, self.strength, self.capped)  # type: ignore[misc]
        self.counts[self.layer] += count
        return h
