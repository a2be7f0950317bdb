"""Every kernel against its reference in float64: which cases, and how far apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from workbench.errors import KernelFault
from workbench.kernels.metal.kernel import Kernel, Machine, Template

LIMITS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2, "int8": 1e-5}
"""Largest relative error, max|y - reference| / max|reference|, by the type of the weights."""
Progress = Callable[[str, int, int], None]


class Case(Protocol):
    """One call of one operation, on inputs that it draws itself. `operation`, `dtype` and `shape` name it; `exact`:
    what it copies or lists has to be equal."""

    @property
    def operation(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> str: ...
    @property
    def exact(self) -> bool: ...

    def run(self, machine: Machine, rng: np.random.Generator) -> float:
        """The relative error to the reference; infinite where something exact is not."""
        ...


@dataclass(frozen=True)
class Finding:
    """One line of the table: an operation on a machine, for a type and a shape, over `cases` seeds.

    where: 'emulated', 'as CUDA' or 'on Metal'. worst: the largest relative error. fault: what the machine caught.
    """

    kernel: str
    where: str
    dtype: str
    shape: str
    cases: int
    worst: float
    limit: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether every case stayed within the limit."""
        return not self.fault and bool(self.worst <= self.limit)

    def as_dict(self) -> dict[str, Any]:
        """The fields as records have them; an error that is not finite as null."""
        worst = self.worst if np.isfinite(self.worst) else None
        return {**asdict(self), "worst": worst, "ok": self.ok}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """max|found - expected| / max|expected|; NaN anywhere counts as infinite. The absolute error where all is zero."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    difference = float(np.abs(found - expected).max(initial=0.0))
    scale = float(np.abs(expected).max(initial=0.0))
    return difference / scale if scale else difference


class Asked:
    """A machine that runs nothing: it takes down which kernels an operation would launch, so that they can be compiled
    together."""

    where = "asked"

    def __init__(self, machine: Machine) -> None:
        self.groups, self.most_threads = machine.groups, machine.most_threads
        self.launches: list[tuple[Kernel, Template]] = []
        self._machine = machine

    def array(self, values: Any, dtype: str) -> Any:
        """As the machine asked for."""
        return self._machine.array(values, dtype)

    def numpy(self, array: Any) -> Any:
        """As the machine asked for."""
        return self._machine.numpy(array)

    def run(self, kernel: Kernel, inputs: Any, *, template: Template, output_shapes: Any, **_: Any) -> list[Any]:
        """Zeros."""
        self.launches.append((kernel, template))
        kinds = [kernel.type_of(kind, template) for _, kind in kernel.outputs]
        stored = {"float16": "u2", "bfloat16": "u2"}
        return [self._machine.array(np.zeros(shape, stored.get(kind, kind)), kind)
                for kind, shape in zip(kinds, output_shapes, strict=True)]  # fmt: skip


def launches(cases: list[Case], machine: Machine, seed: int = 0) -> list[tuple[Kernel, Template]]:
    """The kernels and template arguments that these cases launch on this machine, each once."""
    asked = Asked(machine)
    for case in cases:
        case.run(asked, np.random.default_rng(seed))
    unique: list[tuple[Kernel, Template]] = []
    for launch in asked.launches:
        if launch not in unique:
            unique.append(launch)
    return unique


def verify(
    machine: Machine, cases: list[Case], *, seeds: int = 3, seed: int = 0, progress: Progress | None = None
) -> Iterator[Finding]:
    """Findings in the order of `cases`, each over `seeds` seeds."""
    for done, case in enumerate(cases):
        if progress:
            progress(f"{case.operation} {machine.where}", done, len(cases))
        worst, fault = 0.0, ""
        for number in range(seeds):
            try:
                worst = max(worst, case.run(machine, np.random.default_rng([seed, number, done])))
            except KernelFault as error:
                worst, fault = float("inf"), str(error)
                break
        limit = 0.0 if case.exact else LIMITS[case.dtype]
        yield Finding(case.operation, machine.where, case.dtype, case.shape, seeds, worst, limit, fault)
    if progress:
        progress("done", len(cases), len(cases))
