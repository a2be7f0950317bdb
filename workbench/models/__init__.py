"""Architectures: one module for each `model_type`, and the checkpoints they are read from."""

from __future__ import annotations

from typing import Any

from workbench.errors import CheckpointError
from workbench.models import falcon, llama, opt, persimmon, phi
from workbench.models.family import Family

_MODULES: tuple[Family, ...] = (falcon, llama, opt, persimmon, phi)
_FAMILIES: dict[str, Family] = {name: module for module in _MODULES for name in (module.MODEL_TYPE, *module.ALIASES)}


def supported() -> tuple[str, ...]:
    """The model types that can be converted and run, by transformers' names."""
    return tuple(module.MODEL_TYPE for module in _MODULES)


def family(model_type: str) -> Family:
    """The module of an architecture. CheckpointError, with the supported ones, when there is none."""
    if model_type not in _FAMILIES:
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported: {', '.join(supported())}")
    return _FAMILIES[model_type]


def code_of_its_own(config: dict[str, Any]) -> bool:
    """Whether a checkpoint can only be run by code that comes with it (`auto_map`): no module here knows its type."""
    return config["model_type"] not in _FAMILIES and bool(config.get("auto_map"))


def family_of(config: dict[str, Any]) -> Family:
    """The module of a checkpoint's architecture. CheckpointError where there is none.

    Where there is one, code that the checkpoint brings along is not needed, and is not run.
    """
    if code_of_its_own(config):
        raise CheckpointError(
            f"config.json: model_type {config['model_type']!r} has code of its own (auto_map), which does not say what "
            f"its neurons are; supported: {', '.join(supported())}"
        )
    return family(config["model_type"])
