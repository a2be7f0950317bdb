"""Shapes of common parts of a decoder, by tensor name, and what all decoders' names have in common."""

from __future__ import annotations

import re
from collections.abc import Sequence

Shapes = dict[str, tuple[int, ...]]


def linear(name: str, out: int, inner: int, bias: bool) -> Shapes:
    """A linear layer: weight [out, inner], and bias [out]."""
    return {name + ".weight": (out, inner)} | ({name + ".bias": (out,)} if bias else {})


def norm(name: str, width: int, bias: bool = True) -> Shapes:
    """A norm: weight [width], and bias [width] where it is a layer norm."""
    return {name + ".weight": (width,)} | ({name + ".bias": (width,)} if bias else {})


def canonical(name: str, prefix: str, parts: Sequence[str]) -> str | None:
    """`name`, with `prefix` where a checkpoint of the bare decoder lacks it; None for rotary frequencies.

    `parts`: first components of the decoder's own names. The frequencies, which checkpoints of 2023 hold for every
    layer, follow from the config.
    """
    if re.search(r"\.(rotary|rotary_emb|maybe_rotary)\.inv_freq$", name):
        return None
    return prefix + name if name.split(".", 1)[0] in parts else name


def number_after(prefix: str, name: str) -> int | None:
    """The layer N of a name that starts with `prefix` + 'N.'; None for other names."""
    number, dot, _ = name.removeprefix(prefix).partition(".")
    return int(number) if name.startswith(prefix) and dot and number.isdecimal() else None
