"""transformers' own model of a spec: its config, and the model on the meta device without FFN matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models.activation import FatReLU, in_transformers
from workbench.spec import ModelSpec

Place = Callable[[Any, int, nn.Module], None]
"""Puts a module into a layer of a model: a family's `install` or `set_activation`."""

_NOT_OURS = ("auto_map", "return_dict", "output_attentions", "output_hidden_states")
"""Settings that would change what a forward returns, or name code of the checkpoint's own."""


class NotInstalled(nn.Module):
    """Stands where a layer's FFN belongs."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"layer {self.layer}: no FFN was installed in the skeleton")


def transformers_config(spec: ModelSpec, model_class: Any, activation_field: str) -> Any:
    """transformers' config object, with sdpa attention. CheckpointError when transformers refuses a field."""
    values = {name: copy.deepcopy(value) for name, value in spec.config.items() if name not in _NOT_OURS}
    if activation_field in values:
        values[activation_field] = in_transformers(values[activation_field])
    try:
        config = model_class.config_class.from_dict(values)
    except Exception as error:  # transformers checks a config's fields with error classes of its own
        raise refused(error) from error
    config._attn_implementation = "sdpa"
    return config


def skeleton(spec: ModelSpec, model_class: Any, activation_field: str, install: Place) -> Any:
    """transformers' model on the meta device, in evaluation mode, with sdpa attention and without FFN matrices.

    No parameter is allocated; the rotary frequencies, which are no part of a checkpoint, are real. Its state dict's
    names are those of the store's resident tensors, apart from the FFN's biases (the installed module has them) and
    a tied head: after `load_state_dict(..., assign=True)` call `model.tie_weights()`. A layer whose FFN was not
    installed raises RuntimeError when it runs.
    """
    config = transformers_config(spec, model_class, activation_field)
    try:
        with torch.device("meta"):
            model = model_class(config)
        rotary = getattr(model.base_model, "rotary_emb", None)
        if rotary is not None:
            model.base_model.rotary_emb = type(rotary)(config=config)
    except Exception as error:  # as above
        raise refused(error) from error
    for layer in range(spec.num_layers):
        install(model, layer, NotInstalled(layer))
    return model.eval().requires_grad_(False)


def set_thresholds(spec: ModelSpec, model: Any, activation_field: str, set_activation: Place) -> None:
    """Put FATReLU into a dense model that was built with ReLU. Does nothing for a spec without thresholds.

    Its config then names the activation as the checkpoint does: a spec made from it has the thresholds too.
    """
    for layer, threshold in enumerate(spec.thresholds):
        set_activation(model, layer, FatReLU(threshold))
    if spec.thresholds:
        setattr(model.config, activation_field, spec.config[activation_field])


def refused(error: Exception) -> CheckpointError:
    """What to raise when transformers cannot build a model from the config."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return CheckpointError(f"config.json: transformers cannot build the model from it ({reason})")
