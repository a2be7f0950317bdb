"""What the fields of a dataclass mean, for options and controls that are made from them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any


def field_help(kind: Any) -> dict[str, str]:
    """What each field of a dataclass means: its own `help`, else the sentences of the class's docstring that begin with
    `name:` or `name, name:`."""
    names = {f.name for f in dataclasses.fields(kind)}
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for clause in re.split(r"(?<=\.) (?=[a-z_]+(?:, [a-z_]+)*: )", " ".join((kind.__doc__ or "").split())):
        match = re.match(r"([a-z_]+(?:, [a-z_]+)*): (.*)", clause)
        if match and names.issuperset(match[1].split(", ")):
            current = [match[2]]
            found |= dict.fromkeys(match[1].split(", "), current)
        else:
            current.append(clause)
    said = {name: " ".join(words).strip().rstrip(".") for name, words in found.items()}
    return said | {f.name: f.metadata["help"] for f in dataclasses.fields(kind) if "help" in f.metadata}
