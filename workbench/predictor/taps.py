"""What predictors are given and what they should say, taken from a dense model while it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from workbench.capture.activations import FfnTap
from workbench.errors import PredictorError
from workbench.models import family
from workbench.predictor.config import Input, Loss
from workbench.spec import ModelSpec

Size = Literal["none", "value", "root", "contribution"]
SIZES: dict[str, Size] = {
    "balanced": "none",
    "bce": "none",
    "magnitude": "value",
    "root_magnitude": "root",
    "contribution": "contribution",
}


@dataclass(frozen=True)
class Sample:
    """One layer of one forward. x [tokens, d_model]: the predictor's input; own: the FFN's own. z [tokens, d_ff]:
    pre-activations less the layer's threshold, above 0 where active. size [tokens, d_ff]: how much an active neuron
    counts, 0 elsewhere; None where all count alike."""

    x: torch.Tensor
    own: torch.Tensor
    z: torch.Tensor
    size: torch.Tensor | None


Sink = Callable[[int, Sample], None]


@dataclass(frozen=True)
class View:
    """How samples are formed for a model. `downs`: each layer's down projection, only looked at for 'contribution'.

    size: 'value' is the activation function's, 'root' its square root, 'contribution' the norm of what the neuron adds
    to the layer's output.
    """

    activation: str = "relu"
    thresholds: tuple[float, ...] = ()
    input: Input = "ffn"
    size: Size = "none"
    downs: tuple[Any, ...] = ()

    @classmethod
    def of(cls, model: Any, geometry: ModelSpec, loss: Loss, source: Input) -> View:
        """That of a model and what is trained."""
        downs: tuple[Any, ...] = ()
        if SIZES[loss] == "contribution":
            kind = family(geometry.model_type)
            names = (kind.ffn_names(geometry, layer).down for layer in range(geometry.num_layers))
            downs = tuple(model.get_submodule(name.removesuffix(".weight")) for name in names)
        return cls(geometry.activation, geometry.thresholds, source, SIZES[loss], downs)

    def value(self, layer: int, z: torch.Tensor) -> torch.Tensor:
        """The activation function's values, of pre-activations less the threshold."""
        value = z.clamp_min(0)
        if self.thresholds and self.thresholds[layer]:
            value = torch.where(z > 0, z + self.thresholds[layer], 0.0)
        return value.square() if self.activation == "relu2" else value


class Taps:
    """Calls `sink(layer, sample)` for every layer while a model runs. Use as a context manager."""

    def __init__(self, model: Any, ups: Sequence[nn.Linear], view: View, sink: Sink) -> None:
        self.model, self.ups, self.view, self.sink = model, list(ups), view, sink
        self._tap = FfnTap(self.ups, self._ffn, thresholds=view.thresholds)
        self._norms: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before: torch.Tensor | None = None
        self._waiting: Sample | None = None
        self._handles: list[Any] = []
        self._down_norms = [down.weight.float().norm(dim=0) for down in view.downs]

    def _ffn(self, layer: int, own: torch.Tensor, z: torch.Tensor) -> None:
        x = own
        if self.view.input == "previous_layer":
            x = own if layer == 0 or self._before is None else self._before
            self._before = own
        elif self.view.input == "before_norm":
            x = self._input_of_norm(layer, own)
        size = None
        if self.view.size in ("value", "root"):
            size = self.view.value(layer, z)
            size = size.sqrt() if self.view.size == "root" else size
        sample = Sample(x, own, z, size)
        if self.view.size == "contribution":
            self._waiting = sample
        else:
            self.sink(layer, sample)

    def _input_of_norm(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        for before, after in reversed(self._norms):
            if after.data_ptr() == own.data_ptr() and after.numel() == own.numel():
                return before.reshape(own.shape)
        raise PredictorError(f"input before_norm: no norm feeds the FFN of layer {layer} directly; use input='ffn'")

    def _norm(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._norms = [*self._norms[-3:], (args[0], output)]

    def _down(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            sample, self._waiting = self._waiting, None
            if sample is not None:
                value = args[0].reshape(sample.z.shape).abs()
                size = torch.where(sample.z > 0, value * self._down_norms[layer].to(value.dtype), 0.0)
                self.sink(layer, Sample(sample.x, sample.own, sample.z, size))

        return hook

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Taken off the model for as long as the block runs."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __enter__(self) -> Taps:
        if self.view.input == "before_norm":
            width = self.ups[0].in_features
            self._handles += [norm.register_forward_hook(self._norm) for norm in _norms(self.model, width)]
        self._handles += [
            down.register_forward_pre_hook(self._down(layer)) for layer, down in enumerate(self.view.downs)
        ]
        self._tap.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._tap.__exit__(kind, value, tb)
        for handle in self._handles:
            handle.remove()
        self._handles, self._norms, self._before, self._waiting = [], [], None, None


def _norms(model: Any, width: int) -> list[nn.Module]:
    """The modules inside decoder layers that scale each of d_model values and hold nothing else."""
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        flat = isinstance(weight, torch.Tensor) and weight.ndim == 1 and weight.numel() == width
        if flat and re.search(r"\.\d+\.", name):
            found.append(module)
    return found
