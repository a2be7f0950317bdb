"""RMS norms as one kernel instead of six; at this size they take a fifth of a training step otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class FusedRMSNorm(nn.Module):
    """weight * x / rms(x) over the last axis, with another norm's weight. Under autocast it returns autocast's dtype,
    so that the linears behind it need not convert their input each for itself."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d_model] of any float dtype."""
        y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        device = x.device.type
        return y.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else y


def fuse_norms(model: Any) -> int:
    """Put FusedRMSNorm in place of transformers' own RMS norms (the parameters stay); returns how many there were."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    ]
    for name, module in found:
        model.set_submodule(name, FusedRMSNorm(module.weight, module.variance_epsilon))
    return len(found)
