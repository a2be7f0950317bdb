"""The command line: parse, call, show. Everything it does, the package does without it."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130
KEEP_NOTHING = {"verify", "generate", "bench", "lab", "kernels", "plan"}
"""Commands that begin anew."""


def main() -> None:
    """Entry point of `workbench`. Exit status: 0 done, 1 a named failure, 2 wrong usage, 130 interrupted."""
    from workbench.cli.app import app
    from workbench.errors import WorkbenchError

    try:
        app(standalone_mode=True)
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer makes this of Ctrl-C
            _interrupted()
        raise


def _interrupted() -> NoReturn:
    saves = not KEEP_NOTHING & set(sys.argv[1:2])
    print("workbench: interrupted" + "; the same command goes on from what was saved" * saves, file=sys.stderr)
    raise SystemExit(INTERRUPTED)
