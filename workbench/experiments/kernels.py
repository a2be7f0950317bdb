"""`workbench kernels verify`: every GPU kernel against its reference, on each machine that is here."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from workbench.errors import DeviceError
from workbench.experiments.record import SCHEMA, commit, machine, this_command
from workbench.kernels.metal.cases import CASES, large_cases
from workbench.kernels.metal.emulator import Emulator, compiler
from workbench.kernels.metal.kernel import Machine
from workbench.kernels.metal.mlx_machine import MlxMachine, available
from workbench.kernels.metal.verify import Finding, launches, verify

On = Literal["auto", "emulated", "cuda", "metal"]
Progress = Callable[[str, int, int], None]


def machines(on: On) -> list[Machine]:
    """The machines to verify on. 'auto': emulated where there is a compiler, and the GPU where MLX has one.

    DeviceError when what was asked for is not here, or 'auto' finds nothing.
    """
    if on == "emulated":
        compiler()
        return [Emulator()]
    if on != "auto":
        return [MlxMachine(on)]
    found: list[Machine] = [MlxMachine(name) for name in available()]
    try:
        compiler()
    except DeviceError:
        if not found:
            raise
        return found
    return [Emulator(), *found]


def verify_kernels(
    on: On = "auto",
    *,
    kernels: list[str] | None = None,
    seeds: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """A record of kind kernels_verify: a row for each operation, machine, type and shape.

    kernels: names of CASES; all when None. seeds: inputs drawn for each. ValueError for another name; DeviceError
    when a machine is not here. A kernel that fails is a row that is not ok, not an error. On a GPU the sizes of 7B
    models are tried too, once.
    """
    wanted = list(CASES) if kernels is None else kernels
    for name in wanted:
        if name not in CASES:
            raise ValueError(f"{name!r} is not one of {', '.join(CASES)}")
    cases = [case for name in wanted for case in CASES[name]()]
    rows: list[Finding] = []
    chosen = machines(on)
    for each in chosen:
        if isinstance(each, Emulator):
            if progress:
                progress("compiling for the emulator", 0, len(cases))
            each.seed = seed
            each.prepare(launches(cases, each, seed))
        rows.extend(verify(each, cases, seeds=seeds, seed=seed, progress=progress))
        if isinstance(each, MlxMachine):
            operations = {case.operation for case in cases}
            large = [case for case in large_cases() if case.operation in operations]
            rows.extend(verify(each, large, seeds=1, seed=seed, progress=progress))
    return {
        "schema": SCHEMA,
        "kind": "kernels_verify",
        "machine": {**machine(Path.cwd()), "device": _device(chosen)},
        "run": {
            "seed": seed,
            "seeds": seeds,
            "commit": commit(),
            "versions": _versions(),
            "command": this_command(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        },
        "rows": [row.as_dict() for row in rows],
    }


def _device(chosen: list[Machine]) -> str:
    """The GPU that kernels ran on, or cpu."""
    return next((each.name for each in chosen if isinstance(each, MlxMachine)), "cpu")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("numpy", "mlx"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
