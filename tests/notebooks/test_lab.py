"""`workbench lab`: notebooks copied from a checkout and from a wheel, a user's changes kept, a server that answers."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import DeviceError, WorkbenchError
from workbench.experiments.lab import Copied, copy_notebooks, lab_command, shipped

ROOT = Path(__file__).parents[2]


def actions(done: list[Copied]) -> set[str]:
    return {copied.action for copied in done}


def test_notebooks_are_copied_whole(tmp_path: Path) -> None:
    done = copy_notebooks(tmp_path / "deep" / "lab")
    assert actions(done) == {"new"}
    assert [copied.name for copied in done] == [path.name for path in shipped()]
    for path in shipped():
        assert (tmp_path / "deep" / "lab" / path.name).read_bytes() == path.read_bytes()
    assert actions(copy_notebooks(tmp_path / "deep" / "lab")) == {"same"}


def test_a_changed_copy_is_kept_and_an_old_one_renewed(tmp_path: Path) -> None:
    copy_notebooks(tmp_path)
    mine, old = tmp_path / shipped()[0].name, tmp_path / shipped()[1].name
    mine.write_text("{}")
    noted = tmp_path / ".workbench-notebooks.json"
    old.write_text("an earlier version's")
    digests = json.loads(noted.read_text())
    digests[old.name] = "ee3ae7a4f5e2a5a5"  # not what lies there: the user's
    noted.write_text(json.dumps(digests))
    found = {copied.name: copied.action for copied in copy_notebooks(tmp_path)}
    assert found.pop(mine.name) == "kept"
    assert found.pop(old.name) == "kept"
    assert set(found.values()) == {"same"}
    assert mine.read_text() == "{}"
    digests[old.name] = hashlib.sha256(old.read_bytes()).hexdigest()  # as it was copied: not changed since
    noted.write_text(json.dumps(digests))
    found = {copied.name: copied.action for copied in copy_notebooks(tmp_path)}
    assert found[old.name] == "updated"
    assert old.read_bytes() == shipped()[1].read_bytes()
    assert mine.read_text() == "{}"


def test_a_note_that_cannot_be_read_makes_every_difference_the_users(tmp_path: Path) -> None:
    copy_notebooks(tmp_path)
    (tmp_path / ".workbench-notebooks.json").write_text("[1")
    mine = tmp_path / shipped()[0].name
    mine.write_text("{}")
    assert actions(copy_notebooks(tmp_path)) == {"kept", "same"}
    assert mine.read_text() == "{}"


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match="cannot be copied there"):
        copy_notebooks(tmp_path / "file" / "lab")


def test_a_missing_jupyterlab_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"pip install 'flash-workbench\[notebooks\]'"):
        lab_command(tmp_path)


@pytest.mark.slow
def test_the_wheel_brings_the_notebooks(tmp_path: Path) -> None:
    """Built apart from the checkout's build folder. -S: an editable installation would be found before the wheel."""
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
         str(tmp_path), f"--config-settings=build-dir={tmp_path / 'build'}", str(ROOT)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        inside = [name for name in wheel.namelist() if name.startswith("workbench/assets/notebooks/")]
        wheel.extractall(tmp_path / "installed")
    assert sorted(Path(name).name for name in inside) == [path.name for path in shipped()]
    copied = subprocess.run(
        [sys.executable, "-S", "-c", "from workbench.experiments.lab import copy_notebooks, shipped;"
         "print(len(copy_notebooks('lab')), shipped()[0].parent)"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'installed'}{os.pathsep}{sysconfig.get_path('platlib')}"},
    )  # fmt: skip
    count, where = copied.stdout.split(maxsplit=1)
    assert int(count) == len(inside)
    assert Path(where.strip()).is_relative_to(tmp_path / "installed")


def test_the_server_opens_on_the_copy(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = "a-token-for-this-test"
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "workbench", "lab", "mine", "--no-browser", "--port", str(port)],
            cwd=tmp_path, stdout=log, stderr=log,
            env={**os.environ, "JUPYTER_TOKEN": token, "JUPYTER_CONFIG_DIR": str(tmp_path / "config")},
        )  # fmt: skip
    try:
        listing = _get(f"http://127.0.0.1:{port}/api/contents?token={token}", server, tmp_path / "log")
        names = {entry["name"] for entry in listing["content"]}
        assert {path.name for path in shipped()} <= names
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def _get(url: str, server: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no answer in two minutes: {log.read_text()}")
