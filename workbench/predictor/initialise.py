"""Factors from the FFN's own weights: reduced-rank regression of the pre-activations on the inputs.

The pre-activations are linear in the input, z = W x + w, so the rank-r map that predicts them best in the mean
square, for inputs of covariance C, is known in closed form: with W C^(1/2) = U S V^T, it is B A = U_r U_r^T W. What it
leaves unexplained is near normal with a known variance a neuron, which turns a predicted pre-activation into the
log odds of firing. Training starts from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import CheckpointError

PROBIT = 1.702  # logistic(1.702 x) is within 0.01 of the normal distribution function


class Moments:
    """Running mean and covariance of each layer's FFN input, and how often its neurons fire."""

    def __init__(self, num_layers: int, d_model: int, d_ff: int, device: str) -> None:
        self.tokens = [0] * num_layers
        self.total = torch.zeros(num_layers, d_model, dtype=torch.float64, device=device)
        self.square = torch.zeros(num_layers, d_model, d_model, dtype=torch.float64, device=device)
        self.fired = torch.zeros(num_layers, d_ff, dtype=torch.int64, device=device)

    def add(self, layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        """x [tokens, d_model], z [tokens, d_ff] of one forward; has the shape of a tap's sink."""
        x32 = x.float()
        self.tokens[layer] += x.shape[0]
        self.total[layer] += x32.sum(0)
        self.square[layer] += x32.T @ x32
        self.fired[layer] += (z > 0).sum(0)

    def mean(self, layer: int) -> torch.Tensor:
        """[d_model] float64."""
        return self.total[layer] / self.tokens[layer]

    def covariance(self, layer: int) -> torch.Tensor:
        """[d_model, d_model] float64. CheckpointError when the activations were not finite."""
        mean = self.mean(layer)
        result = self.square[layer] / self.tokens[layer] - torch.outer(mean, mean)
        if not torch.isfinite(result).all():
            raise CheckpointError(f"layer {layer}: the dense model's activations are not finite; check its weights")
        return result

    def firing_share(self, layer: int) -> torch.Tensor:
        """[d_ff] float64, smoothed by half a token so that no neuron is certain."""
        return (self.fired[layer].double() + 0.5) / (self.tokens[layer] + 1)


@dataclass(frozen=True)
class Factors:
    """logits = b (a x) + bias: a [rank, d_model], b [d_ff, rank], bias [d_ff], float32."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor


def regression(moments: Moments, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, rank: int) -> Factors:
    """Reduced-rank regression of the layer, in float64, scaled to log odds under the balanced loss.

    Each neuron's error is measured in units of its own standard deviation, and neurons that fire (almost) never or
    always count less, since their answer is known anyway. `weight` [d_ff, d_model], `bias` [d_ff] or None.
    """
    w = weight.double()
    mean, covariance = moments.mean(layer), moments.covariance(layer)
    share = moments.firing_share(layer)
    variance = ((w @ covariance) * w).sum(1).clamp_min(1e-30)
    importance = (share * (1 - share)).sqrt() / variance.sqrt()
    root, v = _principal(covariance, w * importance[:, None], rank)
    scores = (w * importance[:, None]) @ (root @ v)  # d_ff x rank: U S of the weighted problem
    strength = scores.norm(dim=0).clamp_min(1e-30)
    u = scores / strength
    # a is scaled so that a (x - mean) has unit variance in each of its components
    a = (u.T @ (w * importance[:, None])) / strength[:, None]
    b = scores / importance[:, None]
    left = (variance - b.square().sum(1)).clamp_min(1e-4 * variance)
    to_odds = PROBIT / left.sqrt()
    z_mean = w @ mean + (bias.double() if bias is not None else 0.0)
    b = b * to_odds[:, None]
    offset = z_mean * to_odds - b @ (a @ mean) + balance(share)
    return Factors(a.float(), b.float(), offset.float())


def _principal(covariance: torch.Tensor, w: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """C^(1/2) [d, d], and the first right singular vectors [d, rank] of w C^(1/2)."""
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    projected = w @ root
    _, right = torch.linalg.eigh(projected.T @ projected)
    return root, right[:, -rank:].flip(1)


def random(moments: Moments, layer: int, d_ff: int, rank: int, generator: torch.Generator) -> Factors:
    """Random factors at a sensible scale: unit variance after each product; the mean input gives no logit."""
    mean, covariance = moments.mean(layer), moments.covariance(layer)
    power = covariance.diagonal().mean().clamp_min(1e-30)
    a = torch.randn(rank, mean.shape[0], generator=generator, dtype=torch.float64).to(mean.device)
    a = a / (mean.shape[0] * power).sqrt()
    b = torch.randn(d_ff, rank, generator=generator, dtype=torch.float64).to(mean.device) / rank**0.5
    return Factors(a.float(), b.float(), (-b @ (a @ mean)).float())


def balance(share: torch.Tensor) -> torch.Tensor:
    """What equal weights for positives and negatives add to the log odds: log((1 - p) / p) of the layer's mean p."""
    mean = share.mean()
    return torch.log((1 - mean) / mean)
