"""Kernel bodies on the CPU, through a C++ shim that is compiled when it is first needed."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import DeviceError, KernelFault
from workbench.kernels.metal.kernel import HERE, Kernel, Template, text_of
from workbench.kernels.metal.source import emulated_unit

FLAGS = ("-std=c++20", "-Og", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off",
         "-U_FORTIFY_SOURCE", "-w")  # fmt: skip
SHIM = ("emulator.h", "emulator_fibers.h", "emulator_types.h")
MESSAGE_BYTES = 512
_RUNNING = threading.Lock()
"""A compiled kernel keeps its threads' stacks: one run at a time in a process, whoever loaded it."""
_INPUT, _IN_PLACE, _OUTPUT = 0, 1, 2
_STORED = {"float32": "f4", "float16": "u2", "bfloat16": "u2", "uint32": "u4", "uint8": "u1", "int8": "i1"}


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("mapped", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("span", ctypes.c_uint64),
    )


def compiler() -> str:
    """The machine's C++ compiler: $CXX, or the first of c++, g++, clang++. DeviceError when there is none."""
    if named := os.environ.get("CXX"):
        if found := shutil.which(named):
            return found
        raise DeviceError(
            f"emulated kernels: CXX={named!r} is no program; name a C++ compiler, without options, or unset it"
        )
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise DeviceError("emulated kernels: no C++ compiler found; install g++ or clang++, or name one in CXX")


def cache_directory() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME, or the platform's place for caches."""
    home = os.environ.get("XDG_CACHE_HOME")
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return (Path(home) if home else default) / "flash-workbench" / "kernels"


class Emulator:
    """Runs kernels on this CPU, one threadgroup at a time. Arrays are numpy; 16-bit floats are uint16.

    The order in which threads and threadgroups go on is drawn from `seed`, anew for each run. KernelFault where a
    kernel leaves its arrays, reads threadgroup memory that nobody wrote, races for it, or waits where not all threads
    come. One run at a time.
    """

    where = "emulated"
    groups = 3
    most_threads = 256

    def __init__(self, seed: int = 0, cache: Path | None = None) -> None:
        self.seed = seed
        self.cache = cache_directory() if cache is None else cache
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._compiler: str | None = None

    def array(self, values: Any, dtype: str) -> np.ndarray:
        """A numpy array as this machine takes it; values of 16-bit floats may come as uint16 or float16."""
        given = np.asarray(values)
        if dtype == "float16" and given.dtype == np.float16:
            given = given.view(np.uint16)
        if given.dtype != np.dtype(_STORED[dtype]):
            raise ValueError(f"an array of {given.dtype} does not hold {dtype}")
        return np.ascontiguousarray(given)

    def numpy(self, array: Any) -> np.ndarray:
        """The array itself."""
        return array

    def prepare(self, wanted: Iterable[tuple[Kernel, Template]]) -> None:
        """Compile what `run` will need: one file a kernel with all its template arguments, two compilers at a time."""
        units: dict[tuple[str, str], tuple[Kernel, list[Template]]] = {}
        for kernel, template in wanted:
            kernel.check(len(kernel.inputs), template, 32, 32)
            _, templates = units.setdefault((kernel.name, kernel.digest), (kernel, []))
            if _key(kernel, template) not in self._functions and template not in templates:
                templates.append(template)
        missing = [(kernel, templates) for kernel, templates in units.values() if templates]
        with ThreadPoolExecutor(2) as pool:
            for functions in list(pool.map(lambda unit: self._build(*unit), missing)):
                self._functions.update(functions)

    def run(
        self,
        kernel: Kernel,
        inputs: Sequence[np.ndarray],
        *,
        template: Template,
        grid: int,
        threadgroup: int,
        output_shapes: Sequence[tuple[int, ...]],
    ) -> list[np.ndarray]:
        """The outputs; inputs that are changed in place are changed. Elements never written are all ones in binary."""
        kernel.check(len(inputs), template, grid, threadgroup)
        self.prepare([(kernel, template)])
        given = [self._checked(kernel, name, kind, template, value)
                 for (name, kind), value in zip(kernel.inputs, inputs, strict=True)]  # fmt: skip
        outputs = [np.empty(shape, _STORED[kernel.type_of(kind, template)])
                   for (_, kind), shape in zip(kernel.outputs, output_shapes, strict=True)]  # fmt: skip
        modes = [_IN_PLACE if name in kernel.in_place else _INPUT for name, _ in kernel.inputs]
        modes += [_OUTPUT] * len(outputs)
        names = [name for name, _ in (*kernel.inputs, *kernel.outputs)]
        buffers = (_Buffer * len(names))(*(
            _Buffer(name.encode(), array.ctypes.data, array.nbytes, mode)
            for name, array, mode in zip(names, [*given, *outputs], modes, strict=True)
        ))  # fmt: skip
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        sizes = (ctypes.c_uint32 * 2)(grid // threadgroup, threadgroup)
        with _RUNNING:
            self.seed += 1
            result = self._functions[_key(kernel, template)](
                buffers, len(names), sizes, ctypes.c_uint64(self.seed), message, MESSAGE_BYTES
            )
        if result == 2:
            raise DeviceError(f"{kernel.name}: not enough memory to emulate it; use smaller arrays")
        if result:
            raise KernelFault(f"{kernel.name}: {message.value.decode(errors='replace')} (emulated, seed {self.seed})")
        return outputs

    def _checked(self, kernel: Kernel, name: str, kind: str, template: Template, value: np.ndarray) -> np.ndarray:
        dtype = kernel.type_of(kind, template)
        fits = isinstance(value, np.ndarray) and value.dtype == np.dtype(_STORED[dtype])
        if not fits or not value.flags.c_contiguous or (name in kernel.in_place and not value.flags.writeable):
            raise ValueError(f"{kernel.name}: {name} is not a contiguous array of {dtype}")
        return value

    def _build(self, kernel: Kernel, templates: list[Template]) -> dict[tuple[Any, ...], Any]:
        """The functions of one compiled file, from the cache where it has them."""
        text = emulated_unit(kernel, templates)
        if self._compiler is None:
            self._compiler = compiler()
        key = "\0".join((text, *map(text_of, SHIM), self._compiler, *FLAGS))
        path = self.cache / f"{kernel.name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
        try:
            if not _whole(path):
                self.cache.mkdir(parents=True, exist_ok=True)
                self._compile(kernel, text, path)
            library = ctypes.CDLL(str(path))
        except OSError as error:
            what = error.strerror or error
            raise DeviceError(f"{path}: {what}; set XDG_CACHE_HOME to a writable directory") from None
        return {_key(kernel, template): getattr(library, f"run_{i}") for i, template in enumerate(templates)}

    def _compile(self, kernel: Kernel, text: str, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self.cache) as directory:
            source, made = Path(directory) / "unit.cpp", Path(directory) / "unit.so"
            source.write_text(text, encoding="utf-8")
            done = subprocess.run(
                [str(self._compiler), *FLAGS, f"-I{HERE}", str(source), "-o", str(made)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                what = (lines or ["no message"])[0]
                raise KernelFault(f"{kernel.name}: {self._compiler} does not compile it: {what}")
            noted = Path(directory) / "unit.sha256"
            noted.write_text(_digest(made))
            os.replace(made, path)
            os.replace(noted, path.with_suffix(".sha256"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _whole(path: Path) -> bool:
    """Whether a compiled file is there as it was written: to load a damaged one can end the process."""
    try:
        return path.with_suffix(".sha256").read_text() == _digest(path)
    except FileNotFoundError:
        return False


def _key(kernel: Kernel, template: Template) -> tuple[Any, ...]:
    return (kernel.name, kernel.digest, *((type(value), value) for value in template.values()))
