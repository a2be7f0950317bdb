"""What to train: ranks, text budget, optimiser and the false-negative rate to reach."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from workbench.errors import SpecError
from workbench.spec import ModelSpec

Loss = Literal["balanced", "bce", "magnitude", "root_magnitude", "contribution"]
Init = Literal["regression", "random"]
Input = Literal["ffn", "before_norm", "previous_layer"]
Allocation = Literal["groups", "measured"]
StoreDType = Literal["int8", "float16", "float32"]
ITEMSIZE: dict[str, int] = {"int8": 1, "float16": 2, "float32": 4}
MOST_BATCH_TOKENS, LEAST_STEPS = 8192, 256


@dataclass(frozen=True)
class PredictorSpec:
    """How predictors are trained. Fields left None take a default scaled to the model (`resolved`).

    rank, last_rank, last_layers: rank of the first layers, of the last ones, and how many are last. The paper takes
        128, 1024 and 4 for OPT-6.7B (d_model 4096, 32 layers); the defaults are d_model/32 but at least 64, d_model/4,
        and an eighth of the layers.
    allocation: 'groups' as above; 'measured' gives ranks to the layers where they save most predicted neurons a byte,
        estimated before training from the regression cut off at several ranks. rank_bytes: all layers' factors
        together, as stored, for 'measured' [what the groups would take].
    input: what predictors see. 'ffn' is the paper's, the FFN's own input, and the only one that an engine takes; for
        comparison 'before_norm', that of the norm before the FFN, and 'previous_layer', the FFN input one layer
        earlier (DejaVu's; the first layer has its own).
    tokens: the training budget, in tokens of text that go through the dense model once (text shorter than that is
        read again). sequence: tokens a window. batch_tokens: tokens an optimiser step [512 to 8192, such that there
        are some 256 steps].
    init_tokens: tokens at the start whose statistics initialise the factors; part of the budget.
    init: 'regression' from the FFN's own weights, or 'random' (for comparison).
    loss: 'balanced' weights positives and negatives equally (paper section 3.1); 'magnitude' also weights each
        positive by its activation, 'root_magnitude' by its square root, 'contribution' by the norm of what the
        neuron adds to the layer's output, so that missing a large one costs more; 'bce' weights nothing.
    learning_rate: relative to each factor's own scale. weight_decay: AdamW's. warmup: share of the steps.
    validation_share: share of the documents never trained on, chosen by hash; one half sets the thresholds, the other
        measures. validation_tokens: how many tokens of each half are used. skip_documents: the first documents of the
        text, held out entirely, for `evaluate`.
    false_negative: the share of active neurons that the thresholds may miss, per layer.
    store_dtype: of the saved factors ('int8' with a scale for each row); quality is measured with the values as saved.
    """

    rank: int | None = None
    last_rank: int | None = None
    last_layers: int | None = None
    allocation: Allocation = "groups"
    rank_bytes: int | None = None
    input: Input = "ffn"
    tokens: int = 100_000
    sequence: int = 256
    batch_tokens: int | None = None
    init_tokens: int | None = None
    init: Init = "regression"
    loss: Loss = "balanced"
    learning_rate: float = 0.02
    weight_decay: float = 0.0
    warmup: float = 0.1
    validation_share: float = 0.1
    validation_tokens: int = 8192
    skip_documents: int = 0
    false_negative: float = 0.05
    store_dtype: StoreDType = "int8"
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("rank", "last_rank", "rank_bytes", "tokens", "sequence", "batch_tokens", "init_tokens")
        for name in (*counts, "validation_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name}={value} is below the least value, 1")
        if self.skip_documents < 0:
            raise SpecError(f"skip_documents={self.skip_documents} is negative")
        if self.last_layers is not None and self.last_layers < 0:
            raise SpecError(f"last_layers={self.last_layers} is negative")
        for name in ("validation_share", "false_negative"):
            if not 0 < getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} is not a share between 0 and 1")
        if not 0 <= self.warmup < 1:
            raise SpecError(f"warmup={self.warmup} is not a share from 0 to below 1")
        if not 0 < self.learning_rate < float("inf") or not 0 <= self.weight_decay < float("inf"):
            raise SpecError(
                f"learning_rate={self.learning_rate}, weight_decay={self.weight_decay} must be finite and not negative"
            )
        choices = {"loss": Loss, "init": Init, "store_dtype": StoreDType, "input": Input, "allocation": Allocation}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise SpecError(f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(allowed))}")
        if self.allocation == "measured" and self.init != "regression":
            raise SpecError("allocation='measured' needs init='regression', whose ranks it compares")
        if self.rank_bytes is not None and self.allocation != "measured":
            raise SpecError("rank_bytes only goes with allocation='measured'")

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
            batch_tokens=self.batch_tokens or _batch_tokens(self.tokens),
        )

    def ranks(self, num_layers: int) -> list[int]:
        """Rank of each layer by groups; only for a resolved spec."""
        if self.rank is None or self.last_rank is None or self.last_layers is None:
            raise ValueError("ranks are only known after resolved(model)")
        first = num_layers - self.last_layers
        return [self.rank if layer < first else self.last_rank for layer in range(num_layers)]

    def rank_cost(self, d_model: int, d_ff: int) -> int:
        """Bytes that one more rank takes in a layer."""
        return (d_model + d_ff) * ITEMSIZE[self.store_dtype] + (4 if self.store_dtype == "int8" else 0)


def _batch_tokens(tokens: int) -> int:
    """A power of two that leaves some 256 steps, from 512 to 8192."""
    fit = max(1, tokens // LEAST_STEPS)
    return min(MOST_BATCH_TOKENS, max(512, 1 << (fit.bit_length() - 1)))
