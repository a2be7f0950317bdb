"""A controller of the sparsity penalty's weight."""

from __future__ import annotations

import math


class SparsityControl:
    """The penalty weight that holds the share of active neurons at a goal, which falls over the run.

    From progress `start` (0 to 1) the goal falls geometrically from the share seen there to `target`, reached at
    `end` and held. Each step multiplies the weight by exp(gain * error), error being the share's relative distance
    from the goal, held within 1; `floor` is the least weight. What is returned is that weight times
    exp(boost * error): a boost above 0 answers an error at once and damps the swings of the slow part.
    """

    def __init__(
        self,
        target: float,
        start: float = 0.1,
        end: float = 0.5,
        *,
        gain: float = 0.01,
        boost: float = 0.0,
        floor: float = 1e-5,
    ) -> None:
        self.target, self.start, self.end = target, start, end
        self.gain, self.boost, self.floor = gain, boost, floor
        self.weight, self.first = 0.0, 0.0

    def goal(self, progress: float) -> float:
        """The share of active neurons aimed at, after `start`."""
        fallen = min(1.0, (progress - self.start) / (self.end - self.start))
        return self.first * (self.target / self.first) ** fallen if self.first > self.target else self.target

    def step(self, progress: float, active: float) -> float:
        """The weight to use next, given the run's progress (0 to 1) and the share seen last."""
        if progress < self.start or not self.first:
            self.first = active
        if progress < self.start:
            return 0.0
        error = max(-1.0, min(1.0, active / self.goal(progress) - 1))
        self.weight = max(self.floor, self.weight) * math.exp(self.gain * error)
        return self.weight * math.exp(self.boost * error)

    def state(self) -> dict[str, float]:
        """JSON-ready: what `restore` takes."""
        return {"weight": self.weight, "first": self.first}

    def restore(self, state: dict[str, float]) -> None:
        """Go on where `state()` was taken."""
        self.weight, self.first = state["weight"], state["first"]
