"""Architectures: one module for each `model_type`, and the checkpoints they are read from."""

from __future__ import annotations

from workbench.errors import CheckpointError
from workbench.models import opt
from workbench.models.family import Family

_FAMILIES: dict[str, Family] = {opt.MODEL_TYPE: opt}


def supported() -> tuple[str, ...]:
    """The model types that can be converted and run."""
    return tuple(sorted(_FAMILIES))


def family(model_type: str) -> Family:
    """The module of an architecture. CheckpointError, with the supported ones, when there is none."""
    if model_type not in _FAMILIES:
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported: {', '.join(supported())}")
    return _FAMILIES[model_type]
