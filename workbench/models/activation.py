"""The activation of an FFN: which ones leave neurons at exactly zero, and FATReLU, which transformers does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models.fields import MOST_LAYERS, is_number

FATRELU, FATRELU_FIELD = "fatrelu", "hidden_act_param"
_SPARSE = {"relu": "relu", "relu2": "relu2", "relu_squared": "relu2", FATRELU: "relu"}
"""Activations under which a neuron at or below its threshold adds nothing, and what the engines call them."""


class FatReLU(nn.Module):
    """z where z > threshold, else 0 (Kurtz et al. 2020; ProSparse, Song et al. 2024). Any shape.

    The threshold is rounded to the dtype of z, as the taps of `workbench.capture` round it.
    """

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        threshold = torch.full((), self.threshold, dtype=z.dtype, device=z.device)
        return torch.where(z > threshold, z, torch.zeros_like(z))

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"


def activation(
    config: Mapping[str, Any], field: str, default: str, num_layers: int, force: bool
) -> tuple[str, tuple[float, ...]]:
    """`ModelSpec.activation` and `ModelSpec.thresholds`, from the config's `field`.

    'fatrelu' is 'relu' with thresholds: `hidden_act_param` is one number for all layers, or a list of one a layer.
    Raises CheckpointError when the activation is none of relu, relu2 and fatrelu and `force` is not given: neurons
    that are never exactly zero cannot be left out.
    """
    name = config.get(field, default)
    if not isinstance(name, str):
        raise CheckpointError(f"config.json: {field} is {name!r}, not the name of an activation; see its card")
    if name not in _SPARSE and not force:
        raise CheckpointError(
            f"config.json: activation {name!r} is not ReLU, so few neurons are zero; "
            f"run `workbench relufy` on the model first, or pass --force to convert it as it is"
        )
    return _SPARSE.get(name, name), _thresholds(config, num_layers) if name == FATRELU else ()


def in_transformers(name: str) -> str:
    """The activation to build transformers' own model with; FATReLU is put in afterwards, as a module."""
    return _SPARSE.get(name, name)


def _thresholds(config: Mapping[str, Any], num_layers: int) -> tuple[float, ...]:
    value = config.get(FATRELU_FIELD)
    if num_layers > MOST_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers is {num_layers}, more than {MOST_LAYERS}; see its card")
    thresholds: list[Any] = value if isinstance(value, list) else [value] * num_layers
    if len(thresholds) != num_layers:
        raise CheckpointError(
            f"config.json: {FATRELU_FIELD} has {len(thresholds)} thresholds for {num_layers} layers; "
            f"give one number, or one a layer"
        )
    for threshold in thresholds:
        if not is_number(threshold) or threshold < 0:
            raise CheckpointError(
                f"config.json: {FATRELU_FIELD} has {threshold!r}, not a number of at least 0; give fatrelu's threshold"
            )
    return tuple(float(threshold) for threshold in thresholds)
