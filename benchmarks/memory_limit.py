"""A memory cgroup for one process at a time: what it may take, page cache included, and what it took at most."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

CONTROLLER = Path("/sys/fs/cgroup/memory")
NEEDED = "a memory limit needs root and the kernel's version 1 memory controller at /sys/fs/cgroup/memory; run it there"


class NoMemoryLimit(Exception):
    """This machine or this user cannot limit memory; one line."""


class MemoryLimit:
    """A new cgroup below this process's, gone at the end of `with`. `limit`: bytes, None for none."""

    def __init__(self, name: str, limit: int | None) -> None:
        self._name, self._limit = name, limit

    def __enter__(self) -> Self:
        try:
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            where = next(line.split(":", 2)[2] for line in lines if "memory" in line.split(":", 2)[1].split(","))
            self.path = CONTROLLER / where.lstrip("/") / f"{self._name}-{os.getpid()}"
            self.path.mkdir()
        except (OSError, StopIteration) as error:
            raise NoMemoryLimit(NEEDED) from error
        try:
            if self._limit is not None:
                (self.path / "memory.limit_in_bytes").write_text(str(self._limit))
            elif not (self.path / "memory.limit_in_bytes").exists():
                raise OSError
        except OSError as error:
            self.path.rmdir()
            raise NoMemoryLimit(NEEDED) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for _ in range(50):  # the kernel lets go of a cgroup a moment after its last process
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)

    def run(self, command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
        """A command inside; it joins before it begins, so that all it takes is counted. TimeoutExpired after
        `seconds`."""
        join = f'echo $$ > {self.path}/cgroup.procs && exec "$@"'
        return subprocess.run(
            ["sh", "-c", join, "sh", *command], capture_output=True, text=True, timeout=seconds, check=False
        )

    def peak(self) -> int:
        """Bytes that were taken at most, page cache included."""
        return int((self.path / "memory.max_usage_in_bytes").read_text())

    def reclaims(self) -> int:
        """How often the limit was met."""
        return int((self.path / "memory.failcnt").read_text())


def drop_page_cache() -> None:
    """Nothing of any file stays in memory. NoMemoryLimit where that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise NoMemoryLimit(f"the page cache cannot be dropped ({error.strerror}); run as root") from error
