"""What is kept of an unfinished evaluation, so that the same request goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.experiments.record import write_json


class Measured:
    """Finished parts of rows, and the answers of a task that was interrupted, in a file; what belongs to another
    request is not taken over."""

    def __init__(self, path: Path | None, request: str) -> None:
        self.path, self.request = path, request
        self.rows: dict[str, dict[str, Any]] = {}
        self.pending: dict[str, dict[str, list[Any]]] = {}
        if path is not None and path.exists():
            try:
                found = json.loads(path.read_text())
                if found["request"] == request:
                    self.rows, self.pending = dict(found["rows"]), dict(found["pending"])
            except (OSError, ValueError, KeyError, TypeError):
                pass  # half a file of an earlier version: its parts are measured again

    def get(self, row: str, part: str) -> dict[str, Any] | None:
        """A finished part, or None."""
        return self.rows.get(row, {}).get(part)

    def put(self, row: str, part: str, found: dict[str, Any]) -> None:
        """Keep a finished part, on file at once."""
        self.rows.setdefault(row, {})[part] = found
        self.write()

    def write(self) -> None:
        """Write all of it, answers of the task that runs too."""
        if self.path is not None:
            write_json(self.path, {"request": self.request, "rows": self.rows, "pending": self.pending})

    def answers(self, row: str, task: str) -> Answers:
        """A task's answers so far, as a context that keeps them when it is left by an exception."""
        return Answers(self, f"{row}: {task}")


class Answers:
    """A task's answers so far; written when it is interrupted, dropped when it is finished."""

    def __init__(self, measured: Measured, key: str) -> None:
        self.measured, self.key = measured, key

    def __enter__(self) -> dict[str, list[Any]]:
        return self.measured.pending.setdefault(self.key, {})

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.measured.pending.pop(self.key)
        else:
            self.measured.write()
