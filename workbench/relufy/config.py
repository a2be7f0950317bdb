"""What to distil and how: the activation, the budget, the losses, the sparsity schedule and the threshold search."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from workbench.errors import SpecError
from workbench.spec import ModelSpec

Activation = Literal["relu", "shifted_relu"]
Train = Literal["ffn", "all"]
Penalty = Literal["l1", "capped"]
Schedule = Literal["progressive", "l1"]

DEFAULT_TOKENS = 20_000_000


@dataclass(frozen=True)
class RelufySpec:
    """How a model is turned into one with ReLU. Fields left None take a default (`resolved`). Nothing is random.

    activation: 'relu', or 'shifted_relu': relu(z - shift). shift: it is folded into the bias of the linear that the
        activation sits on, so that the checkpoint is one with plain ReLU.
    seconds, tokens, steps: the budget of the training, one of the three; 20M tokens if none is given. With `seconds`
        the number of steps is fixed early, from the measured speed. Loading and measuring are not counted.
    sequence: tokens a window. batch_tokens: tokens an optimiser step.
    learning_rate: the peak: linear over the warm-up, then a cosine to zero. warmup_steps: its length. weight_decay:
        AdamW's, of matrices. clip: the largest norm of a step's gradient.
    train: 'all' weights, or 'ffn': those of the FFNs and of the norms.
    kl_weight, ce_weight: of KL(original || student) and of the cross-entropy of the text's next token.
    layer_match: weight of the relative squared distance of the hidden states after each layer from the original's.
    penalty: what a neuron of activation a adds: 'l1' a / m, 'capped' min(a, m) / m (only small activations are pushed
        out), m being the mean positive activation of the layer, held constant. The mean over neurons, tokens and
        layers is at most about the share of active neurons.
    schedule: 'progressive': the penalty's weight is controlled so that the share of active neurons falls to a target
        and stays there; 'l1': the weight rises linearly over the run. active: the target of 'progressive'. reach: the
        share of the run at which it is reached. penalty_weight: what 'l1' rises to.
    validation_share: share of the documents never trained on, chosen by hash; one half is for the threshold search,
        the other for the measurement. validation_tokens: how many tokens of each half are used.
    skip_documents: the first documents of the first source, held out entirely and measured on as well.
    fatrelu_tolerance: how much perplexity, relatively, FATReLU's thresholds may cost; 0: no thresholds.
    compile: let torch.compile translate the forward and backward passes.
    """

    activation: Activation = "relu"
    shift: float = 0.0
    seconds: float | None = None
    tokens: int | None = None
    steps: int | None = None
    sequence: int = 512
    batch_tokens: int = 16_384
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    train: Train = "all"
    kl_weight: float = 1.0
    ce_weight: float = 0.3
    layer_match: float = 0.0
    penalty: Penalty = "capped"
    schedule: Schedule = "progressive"
    active: float = 0.09
    reach: float = 0.5
    penalty_weight: float = 1.0
    validation_share: float = 0.05
    validation_tokens: int = 32_768
    skip_documents: int = 0
    fatrelu_tolerance: float = 0.005
    compile: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("seconds", "tokens", "steps") if getattr(self, name) is not None]
        if len(given) > 1:
            raise SpecError(f"{' and '.join(given)}: give only one budget")
        for name in ("tokens", "steps", "sequence", "batch_tokens", "warmup_steps", "validation_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name}={value} is below the least value, 1")
        for name in ("seconds", "learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SpecError(f"{name}={value} is not above 0")
        for name in (
            "shift", "weight_decay", "kl_weight", "ce_weight", "layer_match", "penalty_weight", "skip_documents",
            "fatrelu_tolerance",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < float("inf"):
                raise SpecError(f"{name}={getattr(self, name)} is negative or not finite")
        for name in ("active", "reach", "validation_share"):
            if not 0 < getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)} is not a share between 0 and 1")
        if not self.kl_weight + self.ce_weight:
            raise SpecError("kl_weight and ce_weight are both 0; nothing would be learnt")
        if (self.shift > 0) != (self.activation == "shifted_relu"):
            raise SpecError(f"activation={self.activation!r} with shift={self.shift}; a shift goes with shifted_relu")
        if self.sequence < 2:
            raise SpecError("sequence=1 has no next token; the least value is 2")
        for name, allowed in (
            ("activation", Activation), ("train", Train), ("penalty", Penalty), ("schedule", Schedule),
        ):  # fmt: skip
            if getattr(self, name) not in get_args(allowed):
                raise SpecError(f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(allowed))}")

    def resolved(self, model: ModelSpec) -> RelufySpec:
        """The same with a budget, and with windows no longer than the model has positions."""
        budget = (self.seconds, self.tokens, self.steps)
        return dataclasses.replace(
            self,
            tokens=DEFAULT_TOKENS if budget == (None, None, None) else self.tokens,
            sequence=min(self.sequence, model.max_positions),
        )

    @property
    def batch_windows(self) -> int:
        """Windows an optimiser step."""
        return max(1, self.batch_tokens // self.sequence)

    def planned_steps(self) -> int | None:
        """Optimiser steps, if the budget says it; None for a budget in seconds."""
        if self.steps is not None:
            return self.steps
        return max(1, self.tokens // (self.batch_windows * self.sequence)) if self.tokens is not None else None
