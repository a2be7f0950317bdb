"""The notebooks, copied to a folder of the user's own, and JupyterLab opened on it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from workbench import assets
from workbench.errors import DeviceError, WorkbenchError

NOTED = ".workbench-notebooks.json"
"""In the copy's folder: SHA-256 of each notebook as it was copied."""


@dataclass(frozen=True)
class Copied:
    """What became of the notebook `name`: 'new', 'updated' (the user had not changed it), 'same', or 'kept' (the user
    had, and it is not what comes with this version)."""

    name: str
    action: str


def shipped() -> list[Path]:
    """The notebooks that come with the package, in order. DataError where the installation has none."""
    return sorted(assets.path("notebooks").glob("*.ipynb"))


def copy_notebooks(directory: str | Path) -> list[Copied]:
    """Copy the notebooks into `directory`, made where it is missing. A copy that was changed since is never touched.

    WorkbenchError where that cannot be written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        noted = _noted(folder)
        done = [_copy(path, folder, noted) for path in shipped()]
        (folder / NOTED).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise WorkbenchError(
            f"{folder}: the notebooks cannot be copied there ({error.strerror or error}); give another directory"
        ) from error
    return done


def _copy(source: Path, folder: Path, noted: dict[str, str]) -> Copied:
    target, digest = folder / source.name, _digest(source)
    action = "new"
    if target.exists():
        own = _digest(target)
        if own == digest:
            noted[source.name] = digest
            return Copied(source.name, "same")
        if noted.get(source.name) != own:
            return Copied(source.name, "kept")
        action = "updated"
    part = target.with_name(f".{target.name}.part")
    shutil.copyfile(source, part)
    os.replace(part, target)
    noted[source.name] = digest
    return Copied(source.name, action)


def _noted(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / NOTED).read_text(encoding="utf-8"))
        return {str(name): str(digest) for name, digest in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}  # then every copy that differs counts as the user's


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lab_command(directory: str | Path, *, port: int | None = None, browser: bool = True) -> list[str]:
    """What starts JupyterLab of this Python on a folder. DeviceError where it is not installed."""
    if importlib.util.find_spec("jupyterlab") is None or importlib.util.find_spec("ipywidgets") is None:
        raise DeviceError("lab: JupyterLab or ipywidgets is not installed; pip install 'flash-workbench[notebooks]'")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={Path(directory).resolve()}"]
    if hasattr(os, "getuid") and os.getuid() == 0:
        command.append("--allow-root")  # in a container: JupyterLab would only say that this flag is missing
    if port is not None:
        command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    return command if browser else [*command, "--no-browser"]
