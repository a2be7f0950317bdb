"""Ranks given to the layers that need them, under a budget of bytes.

Before training, the regression of each layer cut off at a few ranks says how many neurons it would predict, on text
held back from its statistics, to miss no more than the stated share of the active ones. Bytes then go, step by step,
to the layer in which a byte spares most predicted neurons.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import PredictorError
from workbench.predictor.initialise import Factors, Regression

CANDIDATES = 8
HELD_TOKENS = 1024
BLOCK_TOKENS = 256


@dataclass(frozen=True)
class Estimate:
    """One layer on held-back text: neurons a token that are active, and that each rank would predict (means)."""

    active: float
    predicted: dict[int, float]


def candidates(d_model: int) -> list[int]:
    """At most 8 ranks from d_model/64 (at least 16) to d_model/2, about evenly spaced on a logarithmic scale, multiples
    of 16; of a sixteenth of d_model where that is small. Few, so that layers of equal rank are many."""
    step = 16 if d_model >= 256 else max(1, d_model // 16)
    most = max(step, d_model // 2 // step * step)
    least = min(most, max(step, d_model // 64 // step * step))
    ratio = most / least
    found = {round(least * ratio ** (i / (CANDIDATES - 1)) / step) * step for i in range(CANDIDATES)}
    return sorted(found)


def estimate(
    fitted: Regression, x: torch.Tensor, active: torch.Tensor, ranks: list[int], false_negative: float
) -> Estimate:
    """What each rank predicts when its threshold misses `false_negative` of the active neurons of the same tokens.

    x [tokens, d_model], active bool [tokens, d_ff].
    """
    found = {}
    tokens, count = x.shape[0], int(active.sum())
    for rank in ranks:
        factors = fitted.factors(rank)
        logits = torch.cat([_logits(factors, part) for part in x.split(BLOCK_TOKENS)])
        if count:
            at = int(false_negative * count) + 1
            edge = logits[active].kthvalue(min(at, count)).values
            found[rank] = float((logits >= edge).sum()) / tokens
        else:
            found[rank] = 0.0
    return Estimate(count / tokens, found)


def _logits(factors: Factors, x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(factors.bias, x.float() @ factors.a.T, factors.b.T)


def allocate(estimates: list[Estimate], rank_cost: int, budget: int) -> list[int]:
    """The rank of each layer: all the least one, then the best step of any layer for its bytes until no step fits.

    `rank_cost`: bytes of one more rank in one layer. PredictorError when the budget is below the least ranks.
    """
    ladder = sorted(estimates[0].predicted)
    chosen = [ladder[0]] * len(estimates)
    left = budget - sum(chosen) * rank_cost
    if left < 0:
        raise PredictorError(
            f"rank_bytes {budget} is below what rank {ladder[0]} in every layer takes, {budget - left}; give more"
        )
    while True:
        best: tuple[float, int, int] | None = None
        for layer, entry in enumerate(estimates):
            for rank in ladder:
                more = (rank - chosen[layer]) * rank_cost
                if not 0 < more <= left:
                    continue
                gain = (entry.predicted[chosen[layer]] - entry.predicted[rank]) / more
                if gain > 0 and (best is None or gain > best[0]):
                    best = (gain, layer, rank)
        if best is None:
            return chosen
        _, layer, rank = best
        left -= (rank - chosen[layer]) * rank_cost
        chosen[layer] = rank
