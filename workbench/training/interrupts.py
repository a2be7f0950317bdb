"""Ctrl-C at a moment of our choosing, so that what is saved is consistent."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While open, the first Ctrl-C (or SIGTERM) only sets `pending`; a second Ctrl-C raises at once.

    Signals within `grace` seconds of the first count as the same one: a launcher of several processes passes Ctrl-C on
    to processes that the terminal has told already. Only acts in the main thread, since Python raises
    KeyboardInterrupt nowhere else.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self.pending = False
        self._grace, self._since = grace, 0.0
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            if number == signal.SIGINT and time.monotonic() - self._since >= self._grace:
                raise KeyboardInterrupt
            return
        self.pending, self._since = True, time.monotonic()

    def stop(self) -> None:
        """As the first Ctrl-C does, from any thread."""
        self.pending, self._since = True, time.monotonic()

    def raise_pending(self) -> None:
        """KeyboardInterrupt, if one came since."""
        if self.pending:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
