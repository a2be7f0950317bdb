"""Where the data that comes with the package lies: in a wheel beside the code, in a checkout at its top."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import DataError

_PACKAGED = Path(__file__).parent / "assets"
_CHECKOUT = Path(__file__).parent.parent


def path(name: str) -> Path:
    """A file or folder of data/, predictors/ or notebooks/, such as 'data/demo-model'. DataError when it is missing."""
    for root in (_PACKAGED, _CHECKOUT):
        if (root / name).exists():
            return root / name
    raise DataError(f"{name}: not part of this installation; install the package again from a complete checkout")
