"""Fields of config.json, checked before anything is built from them: CheckpointError names the field and its value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.errors import CheckpointError

MOST_LAYERS = 4096
"""A decoder of more layers is taken for a damaged config where something of that many parts would be built from it."""


def sizes(config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Each of `names` must be there and be a positive whole number."""
    for name in names:
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"config.json: {name} is {value!r}, not a positive whole number; see its card")


def optional_size(config: Mapping[str, Any], name: str, default: int) -> int:
    """A positive whole number; `default` where the field is absent or null."""
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {name} is {value!r}, not a positive whole number")
    return value


def switches(config: Mapping[str, Any], defaults: Mapping[str, bool]) -> None:
    """Each field that is there must be true or false."""
    for name, default in defaults.items():
        if type(config.get(name, default)) is not bool:
            raise CheckpointError(f"config.json: {name} is {config[name]!r}, not true or false; see its card")


def positive(config: Mapping[str, Any], name: str, default: float) -> float:
    """A positive number; `default` where the field is absent."""
    value = config.get(name, default)
    if not is_number(value) or not value > 0:
        raise CheckpointError(f"config.json: {name} is {value!r}, not a positive number; see its card")
    return float(value)


def multiple(one: str, value: int, other: str, divisor: int) -> None:
    """`value`, the field `one`, must be a multiple of `divisor`, the field `other`."""
    if value % divisor:
        raise CheckpointError(f"config.json: {one} {value} is not a multiple of {other} {divisor}")


def is_number(value: Any) -> bool:
    """Whether it is a finite JSON number; true and false are none."""
    return type(value) in (int, float) and abs(value) < float("inf")
