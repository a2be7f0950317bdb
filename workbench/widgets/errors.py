"""Failures in a notebook's cell: one line that says what, where and what to do, as on the command line."""

from __future__ import annotations

import sys
from typing import Any

from workbench.errors import DeviceError, WorkbenchError


def notebook_setup() -> None:
    """From now on a WorkbenchError that a cell raises is shown as one line, not as a traceback. The cell still fails,
    so that 'run all' stops there. Does nothing outside IPython; calling it twice is harmless."""
    shell = _shell()
    if shell is not None:
        shell.set_custom_exc((WorkbenchError,), show_line)


def show_line(
    shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: int | None = None
) -> list[str]:
    """IPython's handler: writes the line, and hands it to the frontend as the whole traceback."""
    line = f"{kind.__name__}: {error}"
    send = getattr(shell, "_showtraceback", None)
    if send is not None:
        send(kind, str(error), [line])
    else:
        print(line, file=sys.stderr)
    return [line]


def _shell() -> Any:
    if "IPython" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def widgets_module() -> Any:
    """ipywidgets. DeviceError, saying how to install it, where it is missing."""
    try:
        import ipywidgets
    except ImportError:
        raise DeviceError("ipywidgets is not installed; pip install 'flash-workbench[notebooks]'") from None
    return ipywidgets
