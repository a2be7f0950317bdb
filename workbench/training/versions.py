"""What a card says it was made with."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide a training run's result."""
    found = {"python": platform.python_version()}
    for package in ("flash-workbench", "torch", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
