"""What a training run was asked for and what it chose by itself, while it is unfinished and when it is done."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.errors import PredictorError
from workbench.predictor.low_rank import CARD, Predictors
from workbench.training.state import write_atomic

CHOICE = "choice.json"


@dataclass(frozen=True)
class Choice:
    """What a run chose by the memory that it found: the dense model's dtype, windows of one forward, and the bytes for
    captured activations that these came from."""

    dtype: str
    micro_windows: int
    memory_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def partial_of(out: Path) -> Path:
    """OUT.partial."""
    return out.with_name(out.name + ".partial")


def finished(out: Path, request: dict[str, Any]) -> Predictors | None:
    """Predictors in OUT if they answer this request; None if there is no OUT. PredictorError if they do not."""
    if not out.exists():
        return None
    if not (out / CARD).is_file():
        raise PredictorError(f"{out}: exists and holds no predictors; choose another --out or delete it")
    found = Predictors.load(out)
    if found.card.get("request") != request:
        raise PredictorError(f"{out}: holds predictors of another request; choose another --out or delete it")
    shutil.rmtree(partial_of(out), ignore_errors=True)
    return found


def read_choice(partial: Path) -> Choice | None:
    """That of the run that was interrupted here; None when there is none, or it cannot be read."""
    try:
        return Choice(**json.loads((partial / CHOICE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_choice(partial: Path, choice: Choice) -> None:
    """Keep it for a run that goes on here."""
    write_atomic(partial / CHOICE, (json.dumps(choice.as_dict(), indent=1) + "\n").encode())
