"""Learning-rate schedules."""

from __future__ import annotations

import math


def rate_at(step: int, steps: int, peak: float, warmup: float) -> float:
    """Learning rate of step 1..steps: linear warm-up over a share of the steps, then a cosine to zero."""
    rise = int(warmup * steps)
    if step <= rise:
        return peak * step / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise - 1) / max(1, steps - rise)))
