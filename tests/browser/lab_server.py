"""What a test knows of the `jupyter lab` that was started for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPLAINT = re.compile(r"^\[E |Traceback \(most recent call last\)|^\w*(Error|Exception):", re.MULTILINE)


@dataclass
class Lab:
    """A server: its address with the token, the folder that it serves, what it and its kernels have logged."""

    address: str
    token: str
    folder: Path
    log: Path
    console: list[str] = field(default_factory=list)

    def url(self, notebook: str) -> str:
        """Where a notebook opens."""
        return f"{self.address}/lab/tree/{notebook}?token={self.token}"

    def complaints(self) -> list[str]:
        """Errors that the server or a kernel has logged."""
        return [line for line in self.log.read_text().splitlines() if COMPLAINT.search(line)]


def until_connected(page: Any, patience: int) -> None:
    """Wait until the kernel has been idle for some seconds on end: it is shown as idle before it is connected, too, and
    what is run then is lost without a word."""
    idle, waited = 0, 0
    while idle < 5 and waited < patience:
        page.wait_for_timeout(1000)
        waited += 1000
        status = page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']")
        idle = idle + 1 if status.count() else 0
