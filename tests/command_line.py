"""The command line in this process: a process of its own for each command would spend its time importing."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from workbench.cli import main


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`workbench ARGUMENTS`: what it wrote, and its exit status. Whatever is no named failure is raised."""
    command, out, err = ["workbench", *map(str, arguments)], io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or os.getcwd()),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def fails(*arguments: str | Path) -> str:
    """Run what must fail by name; returns its one line."""
    done = run(*arguments)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("workbench: ")
    return last
