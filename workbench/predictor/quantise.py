"""Factors in the dtype that they are stored in, and the values that they then have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from workbench.predictor.config import StoreDType
from workbench.predictor.initialise import Factors

STEPS = 127


@dataclass(frozen=True)
class Stored:
    """One layer as stored. a [rank, d_model], b [d_ff, rank]; scales float32, one a row, for int8, else None."""

    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray
    a_scale: np.ndarray | None
    b_scale: np.ndarray | None


def rows_to_int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, m] and float32 scales [n]: a value is its integer times its row's scale, the largest one 127 steps."""
    scale = matrix.float().abs().amax(1) / STEPS
    rounded = torch.where(scale[:, None] > 0, matrix.float() / scale.clamp_min(1e-38)[:, None], 0.0).round()
    return rounded.clamp(-STEPS, STEPS).to(torch.int8), scale


def store(factors: Factors, dtype: StoreDType) -> Stored:
    """Factors as numpy arrays in the stored dtype."""
    bias = factors.bias.float().cpu().numpy()
    if dtype != "int8":
        a, b = (f.to(getattr(torch, dtype)).cpu().numpy() for f in (factors.a, factors.b))
        return Stored(a, b, bias, None, None)
    (a8, a_scale), (b8, b_scale) = rows_to_int8(factors.a), rows_to_int8(factors.b)
    return Stored(a8.cpu().numpy(), b8.cpu().numpy(), bias, a_scale.cpu().numpy(), b_scale.cpu().numpy())


def values(factors: Factors, dtype: StoreDType) -> Factors:
    """The float32 values that stored factors have, on the same device."""
    if dtype != "int8":
        kind = getattr(torch, dtype)
        return Factors(factors.a.to(kind).float(), factors.b.to(kind).float(), factors.bias.clone())
    a, b = (whole.float() * scale[:, None] for whole, scale in (rows_to_int8(f) for f in (factors.a, factors.b)))
    return Factors(a, b, factors.bias.clone())
