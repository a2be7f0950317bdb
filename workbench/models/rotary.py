"""Rotary position settings of config.json, in the old spelling (`rope_theta`, `rope_scaling`) and the new
(`rope_parameters`), checked without transformers. transformers itself computes the frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.errors import CheckpointError
from workbench.models.fields import is_number

_MOST_WIDTH = 1 << 16


def check_rotary(config: Mapping[str, Any], head_width: int, partial: float | None = None) -> None:
    """CheckpointError where the settings are damaged or of a kind that is not known.

    `head_width`: values of an attention head. `partial`: the share of it that is rotated when the config does not
    say; None for architectures that always rotate all of it.
    """
    # transformers reads rope_scaling first, and falls back on rope_parameters.
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(field)
    if given is not None and not isinstance(given, dict):
        raise CheckpointError(f"config.json: {field} is {given!r}, not a table; see its card")
    rope: dict[str, Any] = {
        **{name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None},
        **(given or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise CheckpointError(f"config.json: {field} of type {kind!r} is not known; known: {', '.join(_NEEDED)}")
    _numbers(field, rope, {"rope_theta": _positive, "partial_rotary_factor": _share}, required=False)
    share = rope.get("partial_rotary_factor")
    if partial is None and share not in (None, 1) and kind not in ("default", "proportional"):
        raise CheckpointError(f"config.json: {field} of type {kind!r} cannot be with a partial_rotary_factor here")
    width = head_width if partial is None else int(head_width * (share or partial))
    if not 2 <= width <= _MOST_WIDTH or width % 2:
        raise CheckpointError(
            f"config.json: {width} of the {head_width} values of an attention head would be rotated, which must be "
            f"even; see partial_rotary_factor and the number of heads"
        )
    _numbers(field, rope, _NEEDED[kind], required=True)
    _numbers(field, rope, {"original_max_position_embeddings": _whole}, required=False)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            if len(rope[name]) != width // 2:
                raise CheckpointError(
                    f"config.json: {field}: {name} has {len(rope[name])} numbers, a head has {width // 2} frequencies"
                )
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise CheckpointError(f"config.json: {field}: high_freq_factor is not above low_freq_factor; see its card")


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _share(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1


def _factor(value: Any) -> bool:
    return is_number(value) and value >= 1


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def _factors(value: Any) -> bool:
    return isinstance(value, list) and all(_positive(one) for one in value)


_Check = Callable[[Any], bool]
_Checks = Mapping[str, _Check]
_NEEDED: dict[str, _Checks] = {
    "default": {},
    "linear": {"factor": _factor},
    "dynamic": {"factor": _factor},
    "yarn": {"factor": _factor},
    "longrope": {"short_factor": _factors, "long_factor": _factors},
    "llama3": {"factor": _factor, "low_freq_factor": _positive, "high_freq_factor": _positive},
    "proportional": {},
}
"""Kinds of rotary positions that transformers has, and what each needs."""
_WORDS: dict[_Check, str] = {
    _positive: "a positive number",
    _share: "a number above 0, at most 1",
    _factor: "a number of at least 1",
    _whole: "a positive whole number",
    _factors: "a list of positive numbers",
}


def _numbers(field: str, rope: Mapping[str, Any], checks: _Checks, *, required: bool) -> None:
    for name, holds in checks.items():
        if (required or rope.get(name) is not None) and not holds(rope.get(name)):
            raise CheckpointError(
                f"config.json: {field}: {name} is {rope.get(name)!r}, not {_WORDS[holds]}; see its card"
            )
