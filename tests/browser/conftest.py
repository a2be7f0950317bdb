"""A real `jupyter lab` on a free loopback port, and a real browser: started for a test, stopped after it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_server import Lab

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NOTIFICATIONS = "@jupyterlab/apputils-extension/notification.jupyterlab-settings"
START_SECONDS = 90


def chromium() -> str:
    """The browser's path. Skips, with the reason, where there is none."""
    given = os.environ.get("WORKBENCH_CHROMIUM")
    found = given or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium on the path; install it, or set WORKBENCH_CHROMIUM to its program")
    return found


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """jupyter lab on copies of the notebooks, with settings and state of its own."""
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed; pip install 'flash-workbench[notebooks]'")
    folder, settings = tmp_path / "notebooks", tmp_path / "settings"
    folder.mkdir()
    for notebook in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(notebook, folder)
    (settings / NOTIFICATIONS).parent.mkdir(parents=True)
    (settings / NOTIFICATIONS).write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    own = {name: str(tmp_path / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")}
    options = {
        "ServerApp.ip": "127.0.0.1", "ServerApp.port": port, "ServerApp.port_retries": 0,
        "ServerApp.root_dir": folder, "ServerApp.open_browser": False, "ServerApp.allow_root": True,
        "IdentityProvider.token": token, "LabApp.extension_manager": "readonly",
    }  # fmt: skip
    found = Lab(f"http://127.0.0.1:{port}", token, folder, tmp_path / "lab.log")
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    with open(found.log, "wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **own}, start_new_session=True
        )
    try:
        _until_up(server, found)
        yield found
    finally:
        server.terminate()  # it shuts its kernels down first
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _until_up(server: subprocess.Popen[bytes], lab: Lab) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{lab.address}/api/status?token={lab.token}", timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"jupyter lab did not start:\n{lab.log.read_text()[-2000:]}")


@pytest.fixture
def lab_page(lab: Lab) -> Iterator[Any]:
    """A page of chromium, whose console errors are kept in `lab.console`."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
    program = chromium()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1440, "height": 1700})
        shown.on("console", lambda m: lab.console.append(m.text) if m.type == "error" else None)
        shown.on("pageerror", lambda error: lab.console.append(str(error)))
        yield shown
        browser.close()
