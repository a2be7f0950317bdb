"""Ctrl-C at a moment of our choosing, so that what is saved is consistent."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While open, the first Ctrl-C only sets `pending`; a second one raises at once. Only acts in the main thread,
    since Python raises KeyboardInterrupt nowhere else."""

    def __init__(self) -> None:
        self.pending = False
        self._before: Any = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True

    def raise_pending(self) -> None:
        """KeyboardInterrupt, if one came since."""
        if self.pending:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
