"""What the tables are measured on: a store, its predictors and checkpoint, text, and the settings of the runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench import assets
from workbench.capture.text import source_identity, split_of
from workbench.experiments.convert import convert
from workbench.experiments.record import commit
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

Progress = Callable[[str, int, int], None]
DEMO_TOKENS = 440
"""Of figure 8: the demo model has 512 positions."""


@dataclass(frozen=True)
class Subject:
    """What is measured, and how.

    predictors: their folder, None for none. model: the dense checkpoint (directory or hub id) that the store was made
    from, None where only the store is there. held_out: take only documents that the predictors were not trained on,
    where they were trained on a part of `data`. prompt, tokens: of each row that decodes. text_tokens: that activations
    are analysed on; pair_tokens: that pairs of neurons are counted on; quality_tokens: that perplexity is measured on;
    long_tokens: of figure 8. tasks_dir: data of the zero-shot tasks in local files, None for the hub; limit: documents
    of each task. row_seconds: a row that decodes ends after this long.
    """

    store: Store
    data: str | Path
    predictors: Path | None = None
    model: str | Path | None = None
    held_out: bool = False
    run: RunSpec = dataclasses.field(default_factory=RunSpec)
    backend: str = "torch-cpu"
    prompt: int = 64
    tokens: int = 64
    text_tokens: int = 4096
    pair_tokens: int = 10_240
    quality_tokens: int = 2048
    long_tokens: int = 1000
    tasks_dir: Path | None = None
    limit: int | None = None
    row_seconds: float = 120.0

    @cached_property
    def trained(self) -> Predictors | None:
        """The predictors, loaded. PredictorError where they are damaged."""
        return Predictors.load(self.predictors) if self.predictors else None

    @property
    def predictors_name(self) -> str:
        """What records call them."""
        return self.predictors.name if self.predictors else ""

    def keep(self, document: str) -> bool:
        """Whether a document is one to measure on."""
        if not self.held_out or self.trained is None:
            return True
        share = self.trained.card.get("spec", {}).get("validation_share", 0.1)
        return split_of(document, share) == "test"

    def rates(self, wanted: tuple[float, ...]) -> list[float]:
        """Those of `wanted` that the predictors have thresholds for, else all that they have."""
        have = self.trained.false_negatives if self.trained else ()
        return [rate for rate in wanted if any(abs(rate - own) < 1e-9 for own in have)] or list(have)

    @cached_property
    def request(self) -> str:
        """A digest of everything that decides a result, so that only parts of the same request are taken over."""
        trained = self.trained
        settings = {
            f.name: str(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in ("store", "predictors", "data", "run")
        }
        parts: dict[str, Any] = {
            "store": self.store.digest,
            "predictors": trained and [trained.model_digest, trained.card.get("sha256")],
            "data": source_identity(self.data),
            "run": dataclasses.asdict(self.run),
            "settings": settings,
            "commit": commit(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def demo_subject(folder: Path, *, progress: Progress | None = None, **settings: Any) -> Subject:
    """The embedded demo model, its predictors and text; the store is made in `folder`/store. `settings`: fields of
    `Subject` in place of the demo's own; its DRAM budget is that of `workbench demo`, 80% (see there why)."""
    model = assets.path("data/demo-model")
    store = convert(model, folder / "store", dtype="float32", progress=progress)
    own = {"run": RunSpec(dram="80%", context=256), "held_out": True, "long_tokens": DEMO_TOKENS}
    return Subject(
        store, assets.path("data/text"), assets.path("predictors/demo-model"), model=model, **{**own, **settings}
    )
