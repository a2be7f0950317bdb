"""What every record says of where it comes from, and how records are written."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import RecordError
from workbench.flash.store import Store
from workbench.spec import ModelSpec

SCHEMA = 1
PACKAGES = ("torch", "transformers", "numpy", "safetensors")


def machine(path: Path, device: str = "cpu") -> dict[str, Any]:
    """This machine, and the disk that `path` is on, as records name them. device: what computed."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": f"{platform.system()} {platform.release()}",
        "device": device,
        "disk": _disk(path),
    }


def _cpu() -> str:
    if sys.platform == "darwin":
        return subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        ).stdout.strip()
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _disk(path: Path) -> str:
    """The file system and block device under `path`, such as 'ext4 on vda'; 'unknown' where it cannot be told."""
    try:
        where = os.path.realpath(path)
        with open("/proc/mounts") as file:
            mounts = [line.split()[:3] for line in file]
    except OSError:
        return "unknown"
    fitting = [m for m in mounts if where == m[1] or where.startswith(m[1].rstrip("/") + "/")]
    if not fitting:
        return "unknown"
    source, _, kind = max(fitting, key=lambda m: len(m[1]))
    return f"{kind} on {os.path.basename(source)}"


def commit() -> str:
    """The commit of the checkout that runs, with '+' when it has changes; the version for an installed wheel."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        try:
            found = subprocess.run(
                ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
                capture_output=True, text=True, check=True, timeout=10,
            )  # fmt: skip
            return found.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    from workbench import __version__

    return f"version {__version__}"


def geometry(spec: ModelSpec) -> dict[str, int]:
    """The sizes that decide a model's speed."""
    return {"layers": spec.num_layers, "d_model": spec.d_model, "d_ff": spec.d_ff, "vocab": spec.vocab_size}


def run_info(
    model: str,
    spec: ModelSpec,
    dtype: str,
    *,
    tokens: int,
    io: str,
    window: int | None = None,
    dram: str = "",
    seed: int | None = None,
    predictors: str = "",
    command: str | None = None,
    data: Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> dict[str, Any]:
    """The `run` part of a record. `data`: the card of the text that was read (`DataCard.as_dict()`). `backend`: of the
    engine, where one ran; MLX's version is then among the versions."""
    packages = [*PACKAGES, *(["mlx"] if backend and backend.startswith("mlx") else [])]
    return {
        "model": model,
        "geometry": geometry(spec),
        "dtype": dtype,
        "tokens": tokens,
        "window": window,
        "dram": dram,
        "seed": seed,
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "io": io,
        "command": command or this_command(),
        "synthetic": bool(spec.config.get("synthetic", False)),
        "predictors": predictors,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **({"data": dict(data)} if data is not None else {}),
        **({"backend": backend} if backend is not None else {}),
    }


def model_name(store: Store) -> str:
    """What the model is called: the name of the checkpoint that the store was made from."""
    return str(store.manifest["source"].get("name") or store.path.name)


def this_command() -> str:
    """The command line that runs, as it could be typed again."""
    name = Path(sys.argv[0]).name
    return shlex.join(["workbench" if name in ("__main__.py", "workbench") else name, *sys.argv[1:]])


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """Write a record whole, or not at all. RecordError when it cannot be written."""
    target = Path(os.path.realpath(path))  # through a link, which stays one
    if target.exists() and not target.is_file():
        raise RecordError(f"{target}: is not a regular file; choose another path")
    partial = target.with_name(target.name + ".writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        raise RecordError(f"{target}: cannot be written ({error.strerror}); choose another path") from error
