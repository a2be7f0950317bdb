"""A kernel: a Metal body with the names and types of what it reads and writes."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).parent
SIMD_LANES = 32
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "uint8": 1, "int8": 1}
"""The types that arrays of kernels have."""

Template = Mapping[str, str | int | bool]
"""Template arguments by name: a type of ITEM_BYTES, a number or a truth value."""


def size_of(array: Any) -> int:
    """Elements of any machine's array."""
    return math.prod(array.shape)


@functools.cache
def text_of(file: str) -> str:
    """The text of a file beside this module."""
    return (HERE / file).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Kernel:
    """A kernel as `mx.fast.metal_kernel` takes it.

    inputs, outputs: (name, type) each; a type is one of ITEM_BYTES, or the name of a template argument that is a type.
    template: the names of the template arguments, in order. body: the text of the function. header: the text before it.
    in_place: inputs that the body writes to, although MLX regards arrays as constant. Who uses such a kernel keeps the
    only reference to that array's memory, and orders reads and writes by passing the kernel's output on as an input.
    """

    name: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    template: tuple[str, ...]
    body: str
    header: str
    in_place: tuple[str, ...] = ()

    @classmethod
    def from_file(
        cls,
        name: str,
        *,
        inputs: Sequence[tuple[str, str]],
        outputs: Sequence[tuple[str, str]],
        template: Sequence[str],
        in_place: Sequence[str] = (),
    ) -> Kernel:
        """The kernel whose body is NAME.metal beside this module, with the helpers of common.metal."""
        return cls(
            name, tuple(inputs), tuple(outputs), tuple(template), text_of(f"{name}.metal"), text_of("common.metal"),
            tuple(in_place),
        )  # fmt: skip

    @functools.cached_property
    def digest(self) -> str:
        """Tells one text of the kernel from another."""
        return hashlib.sha256(f"{self.header}\0{self.body}".encode()).hexdigest()[:12]

    def type_of(self, kind: str, template: Template) -> str:
        """The array type that `kind` stands for under these template arguments."""
        found = template.get(kind, kind)
        if not isinstance(found, str) or found not in ITEM_BYTES:
            raise ValueError(f"{self.name}: {kind}={found!r} is not a type of arrays; one of {', '.join(ITEM_BYTES)}")
        return found

    def check(self, inputs: int, template: Template, grid: int, threadgroup: int) -> None:
        """ValueError when a launch does not fit this kernel, or is not the same on every machine."""
        if inputs != len(self.inputs):
            raise ValueError(f"{self.name}: takes {len(self.inputs)} inputs, not {inputs}")
        if tuple(template) != self.template:
            raise ValueError(f"{self.name}: template arguments {tuple(template)} are not {self.template}")
        if not 0 < threadgroup <= 1024 or threadgroup % SIMD_LANES:
            raise ValueError(f"{self.name}: threadgroup={threadgroup} is not a multiple of 32 up to 1024")
        if grid < 1 or grid % threadgroup:
            raise ValueError(f"{self.name}: grid={grid} is not a positive multiple of threadgroup={threadgroup}")


class Machine(Protocol):
    """Runs kernels. Arrays are the machine's own: `array` makes them, `numpy` reads them."""

    @property
    def where(self) -> str:
        """'emulated', 'as CUDA' or 'on Metal'."""
        ...

    @property
    def groups(self) -> int:
        """How many threadgroups of 256 threads keep this machine busy."""
        ...

    @property
    def most_threads(self) -> int:
        """Threads of a threadgroup, at most, that a kernel with many values in registers should have."""
        ...

    def array(self, values: Any, dtype: str) -> Any:
        """An array of `dtype` (ITEM_BYTES) from a numpy array that holds it; 16-bit floats may come as uint16."""
        ...

    def numpy(self, array: Any) -> Any:
        """Its values as numpy; bfloat16 as uint16."""
        ...

    def run(
        self,
        kernel: Kernel,
        inputs: Sequence[Any],
        *,
        template: Template,
        grid: int,
        threadgroup: int,
        output_shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        """The outputs. grid: threads in all. Machines may return before the work is done."""
        ...
