"""What to train: ranks, text budget, optimiser and the false-negative rate to reach."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from workbench.spec import ModelSpec

Loss = Literal["balanced", "magnitude"]
Init = Literal["regression", "random"]
StoreDType = Literal["float16", "float32"]


@dataclass(frozen=True)
class PredictorSpec:
    """How predictors are trained. Fields left None take a default scaled to the model (`resolved`).

    rank, last_rank, last_layers: rank of the first layers, of the last ones, and how many are last. The paper takes
        128, 1024 and 4 for OPT-6.7B (d_model 4096, 32 layers); the defaults are d_model/32 but at least 64, d_model/4,
        and an eighth of the layers.
    tokens: the training budget, in tokens of text that go through the dense model once (text shorter than that is
        read again). sequence: tokens a window. batch_tokens: tokens an optimiser step.
    init_tokens: tokens at the start whose statistics initialise the factors; part of the budget.
    init: 'regression' from the FFN's own weights, or 'random' (for comparison).
    loss: 'balanced' weights positives and negatives equally (paper section 3.1); 'magnitude' also weights each
        positive by its activation, so that missing a large one costs more.
    learning_rate: relative to each factor's own scale. weight_decay: AdamW's. warmup: share of the steps.
    validation_share: share of the documents never trained on, chosen by hash; one half sets the thresholds, the other
        measures. validation_tokens: how many tokens of each half are used.
    false_negative: the share of active neurons that the thresholds may miss, per layer.
    store_dtype: of the saved factors; quality is measured with the values as saved.
    """

    rank: int | None = None
    last_rank: int | None = None
    last_layers: int | None = None
    tokens: int = 100_000
    sequence: int = 256
    batch_tokens: int = 512
    init_tokens: int | None = None
    init: Init = "regression"
    loss: Loss = "balanced"
    learning_rate: float = 0.02
    weight_decay: float = 0.0
    warmup: float = 0.1
    validation_share: float = 0.1
    validation_tokens: int = 8192
    false_negative: float = 0.05
    store_dtype: StoreDType = "float16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "last_rank", "tokens", "sequence", "batch_tokens", "init_tokens", "validation_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is below the least value, 1")
        if self.last_layers is not None and self.last_layers < 0:
            raise ValueError(f"last_layers={self.last_layers} is negative")
        for name in ("validation_share", "false_negative"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a share between 0 and 1")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} is not a share from 0 to below 1")
        if self.learning_rate <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"learning_rate={self.learning_rate}, weight_decay={self.weight_decay} must not be negative"
            )
        for name, allowed in (("loss", Loss), ("init", Init), ("store_dtype", StoreDType)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(allowed))}")

    def resolved(self, model: ModelSpec) -> PredictorSpec:
        """The same with every None filled in for this model, ranks at most d_model, sequence at most its positions."""
        d_model, num_layers = model.d_model, model.num_layers
        first = self.rank if self.rank is not None else max(d_model // 32, min(64, d_model // 4), 1)
        last = self.last_rank if self.last_rank is not None else max(d_model // 4, first)
        layers = self.last_layers if self.last_layers is not None else max(1, round(num_layers / 8))
        init_tokens = self.init_tokens if self.init_tokens is not None else max(8192, 4 * d_model)
        return dataclasses.replace(
            self,
            rank=min(first, d_model),
            last_rank=min(last, d_model),
            last_layers=min(layers, num_layers),
            sequence=min(self.sequence, model.max_positions),
            init_tokens=init_tokens,
        )

    def ranks(self, num_layers: int) -> list[int]:
        """Rank of each layer; only for a resolved spec."""
        if self.rank is None or self.last_rank is None or self.last_layers is None:
            raise ValueError("ranks are only known after resolved(model)")
        first = num_layers - self.last_layers
        return [self.rank if layer < first else self.last_rank for layer in range(num_layers)]
