"""Factors from the FFN's own weights: reduced-rank regression of the pre-activations on the inputs.

The pre-activations are linear in the FFN's input, z = W x + w, so the rank-r map that predicts them best in the mean
square, for inputs of covariance C = L L^T, is known in closed form: with W L = U S V^T, it is B A = U_r U_r^T W. What
it leaves unexplained is near normal with a known variance a neuron, which turns a predicted pre-activation into the
log odds of firing. Training starts from there. For another input u than the FFN's own, W is first replaced by the best
linear map from u, W Cov(x, u) Cov(u)^-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import CheckpointError, TrainingError
from workbench.predictor.taps import Sample
from workbench.training.distributed import World

PROBIT = 1.702  # logistic(1.702 x) is within 0.01 of the normal distribution function
EXACT = 1024  # up to this d_model a CPU computes all eigenvectors; beyond it only those that are wanted
SMALL = 256  # eigenvectors of matrices up to this size are found on the CPU
EXTRA, ROUNDS = 32, 8  # of the subspace iteration that finds them


class Moments:
    """Running mean and covariance of each layer's predictor input, how often its neurons fire and how large.

    `other`: the predictors' input is not the FFN's own, whose mean and joint moments with it are then kept as well.
    """

    def __init__(
        self, num_layers: int, d_model: int, d_ff: int, device: str | torch.device, other: bool = False
    ) -> None:
        double = {"dtype": torch.float64, "device": device}
        self.tokens = torch.zeros(num_layers, dtype=torch.int64)
        self.total = torch.zeros(num_layers, d_model, **double)
        self.square = torch.zeros(num_layers, d_model, d_model, **double)
        self.fired = torch.zeros(num_layers, d_ff, dtype=torch.int64, device=device)
        self.size = torch.zeros(num_layers, **double)
        self.own_total = torch.zeros(num_layers, d_model, **double) if other else None
        self.joint = torch.zeros(num_layers, d_model, d_model, **double) if other else None
        self.own_square = torch.zeros(num_layers, d_model, d_model, **double) if other else None

    def add(self, layer: int, sample: Sample) -> None:
        """Count the tokens of one forward; has the shape of a tap's sink."""
        x, active = sample.x.float(), sample.z > 0
        self.tokens[layer] += x.shape[0]
        self.total[layer] += x.sum(0)
        self.square[layer] += x.T @ x
        self.fired[layer] += active.sum(0)
        self.size[layer] += (active if sample.size is None else sample.size).sum(dtype=torch.float64)
        if self.own_total is not None and self.joint is not None and self.own_square is not None:
            own = sample.own.float()
            self.own_total[layer] += own.sum(0)
            self.joint[layer] += own.T @ x
            self.own_square[layer] += own.T @ own

    def merge(self, world: World) -> None:
        """Add up what the processes counted."""
        tokens = self.tokens.to(self.total.device)
        world.sum_(tokens, self.total, self.square, self.fired, self.size)
        self.tokens = tokens.cpu()
        if self.own_total is not None and self.joint is not None and self.own_square is not None:
            world.sum_(self.own_total, self.joint, self.own_square)

    def mean(self, layer: int) -> torch.Tensor:
        """Of the predictor's input, [d_model] float64."""
        return self.total[layer] / int(self.tokens[layer])

    def covariance(self, layer: int) -> torch.Tensor:
        """Of the predictor's input, [d_model, d_model] float64. CheckpointError when activations were not finite."""
        return self._finite(layer, self.square[layer] / int(self.tokens[layer]) - self._outer(layer))

    def _outer(self, layer: int) -> torch.Tensor:
        mean = self.mean(layer)
        return torch.outer(mean, mean)

    def _finite(self, layer: int, matrix: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(matrix).all():
            raise CheckpointError(f"layer {layer}: the dense model's activations are not finite; check its weights")
        return matrix

    def map(self, layer: int, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Float64: the best linear map [d_ff, d_model] from the predictor's input to the pre-activations, their means
        without the bias [d_ff], and their variances [d_ff], not below 1e-30."""
        w, covariance = weight.double(), self.covariance(layer)
        if self.own_total is None or self.joint is None or self.own_square is None:
            return w, w @ self.mean(layer), ((w @ covariance) * w).sum(1).clamp_min(1e-30)
        tokens = int(self.tokens[layer])
        own = self.own_total[layer] / tokens
        joint = self._finite(layer, self.joint[layer] / tokens - torch.outer(own, self.mean(layer)))
        own_covariance = self.own_square[layer] / tokens - torch.outer(own, own)
        lower = _cholesky(covariance, 1e-6)
        best = torch.cholesky_solve((w @ joint).T, lower).T
        return best, w @ own, ((w @ own_covariance) * w).sum(1).clamp_min(1e-30)

    def firing_share(self, layer: int) -> torch.Tensor:
        """[d_ff] float64, smoothed by half a token so that no neuron is certain."""
        return (self.fired[layer].double() + 0.5) / (int(self.tokens[layer]) + 1)

    def rates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_layers] float64 each: the share of a layer's neurons that fire, smoothed as above, and the mean size of
        one that does (1 where sizes are not looked at)."""
        share = (self.fired.double() + 0.5).mean(1) / (self.tokens.to(self.fired.device) + 1)
        fired = self.fired.sum(1)
        return share, torch.where((fired > 0) & (self.size > 0), self.size / fired.clamp_min(1), 1.0)


@dataclass(frozen=True)
class Factors:
    """logits = b (a x) + bias: a [rank, d_model], b [d_ff, rank], bias [d_ff], float32."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class Regression:
    """The regression of one layer up to some rank, float64; each rank's is the first components of the next one's.

    a [rank, d_model], b [d_ff, rank] (a pre-activation less its mean is b a (x - mean)), and what makes log odds of it.
    """

    a: torch.Tensor
    b: torch.Tensor
    mean: torch.Tensor
    z_mean: torch.Tensor
    variance: torch.Tensor
    offset: torch.Tensor

    def factors(self, rank: int) -> Factors:
        """Scaled to log odds, cut off at a rank."""
        a, b = self.a[:rank], self.b[:, :rank]
        left = (self.variance - b.square().sum(1)).clamp_min(1e-4 * self.variance)
        to_odds = PROBIT / left.sqrt()
        b = b * to_odds[:, None]
        return Factors(a.float(), b.float(), (self.z_mean * to_odds - b @ (a @ self.mean) + self.offset).float())


def regression(
    moments: Moments,
    layer: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rank: int,
    *,
    threshold: float = 0.0,
    balanced: bool = True,
) -> Regression:
    """Reduced-rank regression of the layer, in float64, for log odds under the balanced loss (else: plain ones).

    Each neuron's error is measured in units of its own standard deviation, and neurons that fire (almost) never or
    always count less, since their answer is known anyway. `weight` [d_ff, d_model], `bias` [d_ff] or None of the
    activated linear; a neuron is active where its pre-activation is above `threshold`.
    """
    w, z_mean, variance = moments.map(layer, weight)
    share = moments.firing_share(layer)
    importance = (share * (1 - share)).sqrt() / variance.sqrt()
    weighted = w * importance[:, None]
    root = _root(moments.covariance(layer))
    scores = weighted @ (root @ _principal(weighted @ root, rank))  # d_ff x rank: U S of the weighted problem
    strength = scores.norm(dim=0).clamp_min(1e-30)
    # a is scaled so that a (x - mean) has unit variance in each of its components
    a = ((scores / strength).T @ weighted) / strength[:, None]
    shift = (bias.double() if bias is not None else 0.0) - threshold
    offset = balance(share) if balanced else torch.zeros_like(z_mean[0])
    return Regression(a, scores / importance[:, None], moments.mean(layer), z_mean + shift, variance, offset)


def _root(covariance: torch.Tensor) -> torch.Tensor:
    """A matrix whose product with its own transpose is the covariance: the symmetric one, or, where that is dear, a
    triangular one."""
    if covariance.shape[0] > EXACT and not covariance.is_cuda:
        return _cholesky(covariance, 1e-10)
    values, vectors = _eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def _cholesky(covariance: torch.Tensor, jitter: float) -> torch.Tensor:
    """Lower triangular root; what rounding made indefinite is mended by the least of a few shares of the diagonal.

    cuSOLVER's may report success and return NaN, as it did for 18 of 32 covariances at 4096: both are looked at.
    """
    power = covariance.diagonal().mean().clamp_min(1e-30)
    unit = torch.eye(covariance.shape[0], dtype=covariance.dtype, device=covariance.device)
    lower, info = torch.linalg.cholesky_ex(covariance + jitter * power * unit)
    while (info.item() or not torch.isfinite(lower).all()) and jitter < 1:
        jitter *= 10
        lower, info = torch.linalg.cholesky_ex(covariance + jitter * power * unit)
    return lower


def _principal(projected: torch.Tensor, rank: int) -> torch.Tensor:
    """The first right singular vectors [d, rank] of `projected` [d_ff, d].

    Of a large matrix on the CPU, when few are wanted, by subspace iteration: the last of them are then near the best,
    no more. A GPU finds all of them in a tenth of a second at 4096.
    """
    gram = projected.T @ projected
    size = gram.shape[0]
    if gram.is_cuda or size <= EXACT or 4 * (rank + EXTRA) > size:
        return _eigh(gram)[1][:, -rank:].flip(1)
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(size, rank + EXTRA, generator=generator, dtype=torch.float64)
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(gram @ basis)[0]
    inner = _eigh(basis.T @ gram @ basis)[1]
    return (basis @ inner)[:, -rank:].flip(1)


def _eigh(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues, ascending, and vectors of a symmetric matrix, which rounding may have left not quite so.

    On the CPU where it is small, and where the device's solver gives up or returns what is not finite. TrainingError
    when neither finds them.
    """
    symmetric = (matrix + matrix.T) / 2
    if symmetric.is_cuda and symmetric.shape[0] > SMALL:
        try:
            values, vectors = torch.linalg.eigh(symmetric)
            if torch.isfinite(vectors).all():
                return values, vectors
        except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
            pass
    if torch.isfinite(symmetric).all():
        values, vectors = torch.linalg.eigh(symmetric.cpu())
        if torch.isfinite(vectors).all():
            return values.to(matrix.device), vectors.to(matrix.device)
    raise TrainingError(
        f"predictors: the first factors cannot be computed ({symmetric.shape[0]} x {symmetric.shape[0]} eigenvectors "
        "are not finite); pass --init random, or --device cpu"
    )


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
