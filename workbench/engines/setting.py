"""What an engine can be told at any token: techniques, how the pipeline runs, which predictors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from workbench.ablation import Ablation
from workbench.errors import AblationError
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec


@dataclass(frozen=True, eq=False)
class Setting:
    """An ablation, a run and the predictors, taken together: they hold for the same tokens, or none of them does."""

    ablation: Ablation
    run: RunSpec
    predictors: Predictors | None

    def same(self, other: Setting) -> bool:
        """Whether nothing has to be done to go from one to the other. Predictors are the same object or others."""
        return self.ablation == other.ablation and self.run == other.run and self.predictors is other.predictors

    @property
    def reader(self) -> tuple[str, int, int]:
        """What the flash reader is made with: engine, depth, bytes of the longest read."""
        return self.ablation.io, self.run.depth, self.run.chunk_bytes

    def values(self) -> dict[str, Any]:
        """Every field of the ablation and the run by name, and `false_negative`, the rate that the predictors'
        thresholds are set for (None where they are set for none of the card's)."""
        rate = false_negative_rate(self.predictors) if self.predictors is not None else None
        return {**dataclasses.asdict(self.ablation), **dataclasses.asdict(self.run), "false_negative": rate}

    def changed(self, **values: Any) -> Setting:
        """The setting with some of `values` replaced. AblationError or PredictorError, one line, for a name or a value
        that is none."""
        techniques, run = ({f.name for f in dataclasses.fields(kind)} for kind in (Ablation, RunSpec))
        rate = values.pop("false_negative", None)
        unknown = values.keys() - techniques - run
        if unknown:
            raise AblationError(f"setting: there is no {min(unknown)!r}; fields are those of Ablation and RunSpec")
        predictors = self.predictors
        if rate is not None:
            if predictors is None:
                raise AblationError(f"setting: false_negative={rate:g} needs trained predictors; pass predictors=...")
            predictors = predictors if rate == false_negative_rate(predictors) else predictors.at(rate)
        try:
            new_run = dataclasses.replace(self.run, **{k: v for k, v in values.items() if k in run})
        except (TypeError, ValueError) as error:
            raise AblationError(f"setting: {error}") from None
        return Setting(
            dataclasses.replace(self.ablation, **{k: v for k, v in values.items() if k in techniques}),
            new_run,
            predictors,
        )

    def difference(self, former: Setting) -> dict[str, Any]:
        """The values that are other than in `former`, by name."""
        before = former.values()
        return {name: value for name, value in self.values().items() if value != before[name]}


def false_negative_rate(predictors: Predictors) -> float | None:
    """The false-negative rate whose thresholds are in use; None where they are none of the card's."""
    entry = predictors.card["layers"][0]
    for point in entry.get("frontier", ()):
        if abs(point["threshold"] - predictors.layers[0].threshold) < 1e-9:
            return float(point["target"])
    return None
