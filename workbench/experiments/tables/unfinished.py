"""Parts that are measured, kept until all tables of a request are written, so that an interrupted run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.experiments.record import write_json
from workbench.experiments.tables.parts import PARTS
from workbench.experiments.tables.subject import Progress, Subject


class Parts:
    """The parts of one request, each measured once, in `folder`/.unfinished; parts of another request are dropped.

    RecordError where the folder cannot be written; what a part's own experiment raises.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder = subject, folder / ".unfinished"
        mark = self.folder / "request"
        if self.folder.is_dir() and not (mark.is_file() and mark.read_text(encoding="utf-8") == subject.request):
            shutil.rmtree(self.folder)
        write_json(self.folder / "about.json", {"what": "parts of `workbench tables` that are measured already"})
        mark.write_text(subject.request, encoding="utf-8")
        self.known: dict[str, dict[str, Any]] = {}

    def get(self, name: str, stage: Callable[[str], Progress | None]) -> dict[str, Any]:
        """A part's record, from the file of an interrupted run or measured now; `stage(title)` gives its progress."""
        path = self.folder / f"{name}.json"
        if name not in self.known:
            self.known[name] = _load(path) or self._measure(name, path, stage)
        return self.known[name]

    def _measure(self, name: str, path: Path, stage: Callable[[str], Progress | None]) -> dict[str, Any]:
        partial = self.folder / f"{name}.partial"
        record = PARTS[name](self.subject, partial, stage(name.replace("_", " ")))
        write_json(path, record)
        if partial.is_file():
            partial.unlink()
        return record

    def discard(self) -> None:
        """Remove what was kept: every table is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _load(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None  # half a file: measured again
