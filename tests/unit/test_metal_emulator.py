"""The emulator catches what a GPU would let pass, each in one line that names the place."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.errors import DeviceError, KernelFault
from workbench.kernels.metal import emulator
from workbench.kernels.metal.emulator import Emulator
from workbench.kernels.metal.kernel import Kernel

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    made = Emulator(cache=tmp_path_factory.mktemp("kernels"))
    made.prepare([(kernel(body), {"N": 64}) for body, _ in FAULTS.values()])
    return made


def kernel(body: str, in_place: Sequence[str] = ()) -> Kernel:
    inputs, outputs = (("a", "float32"), ("n", "uint32")), (("y", "float32"),)
    return Kernel("probe", inputs, outputs, ("N",), body, "", tuple(in_place))


def run(machine: Emulator, probe: Kernel, n: int = 64, groups: int = 1, size: int = 64) -> np.ndarray:
    a = np.arange(size, dtype=np.float32)
    (y,) = machine.run(
        probe, [a, np.array([n], np.uint32)], template={"N": 64}, grid=64 * groups, threadgroup=64,
        output_shapes=[(size,)],
    )  # fmt: skip
    return y


def twice(machine: Emulator, probe: Kernel) -> None:
    """With data against the end of its pages, and against their beginning."""
    run(machine, probe, groups=3)
    run(machine, probe, groups=3)


FAULTS = {
    "reads past an input": ("y[0] = a[n[0] + 1];", r"accesses byte 260 of a, which has 256"),
    "reads before an input": ("y[0] = a[int(n[0]) - 65];", r"accesses byte -4 of a, which has 256"),
    "writes past an output": ("y[n[0] + 1] = 1.0f;", r"(accesses|writes) byte 26\d of y, which has 256"),
    "writes an input": ("((device float*)a)[3] = 1.0f;", r"writes a, which is an input"),
    "no such address": ("y[0] = *(const device float*)(ulong(n[0]));", "memory that is no buffer's"),
    "past a threadgroup array": ("threadgroup float h[N]; h[n[0]] = 1.0f;", r"uses h\[64\], which has 64 elements"),
    "unwritten": (
        "threadgroup float h[N]; y[thread_index_in_threadgroup] = h[thread_index_in_threadgroup];",
        r"reads h\[\d+\], which no thread has written",
    ),
    "unwritten by this threadgroup": (
        "threadgroup float h[N]; uint i = thread_index_in_threadgroup;\n"
        "if (threadgroup_position_in_grid.x == 0) h[i] = 1.0f;\n" + BARRIER + "y[i] = h[i];",
        r"threadgroup [12], thread \d+ reads h\[\d+\], which no thread has written",
    ),
    "read before a write": (
        "threadgroup float h[N]; uint i = thread_index_in_threadgroup; h[i] = 1.0f;\n"
        + BARRIER + "y[i] = h[(i + 1) % N]; h[i] = 2.0f;",
        "no barrier between",
    ),
    "write before a read": (
        "threadgroup float h[N]; uint i = thread_index_in_threadgroup; h[i] = 1.0f; y[i] = h[(i + 32) % N];",
        "(no thread has written|no barrier between)",
    ),
    "two writers": ("threadgroup float h[N]; h[0] = 1.0f;", r"writes h\[0\], which another thread used .*race"),
    "barrier that orders no memory": (
        "threadgroup float h[N]; uint i = thread_index_in_threadgroup; h[i] = 1.0f;\n"
        "threadgroup_barrier(mem_flags::mem_none); y[i] = h[(i + 1) % N];",
        "no barrier between",
    ),
    "SIMD barrier across SIMD groups": (
        "threadgroup float h[N]; uint i = thread_index_in_threadgroup; h[i] = 1.0f;\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = h[(i + 32) % N];",
        "(no thread has written|no barrier between)",
    ),
    "divergent barrier": (
        "if (thread_index_in_threadgroup < 40)\n" + BARRIER,
        r"thread \d+ waits at threadgroup_barrier of line 2, .*divergent: 40 wait, 24 ended",
    ),
    "two barriers at once": (
        "if (thread_index_in_threadgroup < 40)\n" + BARRIER + "else\n" + BARRIER,
        r"is at the threadgroup_barrier of line [24] while others wait at that of line [24]",
    ),
    "divergent SIMD operation": (
        "if (thread_index_in_simdgroup < 7) y[0] = simd_sum(a[0]);", r"waits at simd_sum of line 1, .*14 wait, 50 ended"
    ),
    "two SIMD operations at once": (
        "float s = 0;\nif (thread_index_in_simdgroup < 7) s = simd_sum(a[0]);\nelse s = simd_sum(a[1]);",
        r"is at simd_sum of line [23] while thread \d+ of its SIMD group waits at simd_sum of line [23]",
    ),
    "more threadgroup memory than Metal has": (
        "threadgroup float h[8000];\nthreadgroup float g[200];", "32800 bytes; Metal allows 32768"
    ),
    "endless recursion": (
        "struct R { static float f(float x) { volatile float v[64]; v[0] = x; return x > 0 ? f(x) + v[0] : 0; } };\n"
        "y[0] = R::f(1.0f);",
        "overflows its stack",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_that_names_the_place(machine: Emulator, name: str) -> None:
    if name == "endless recursion" and sys.platform != "linux":
        pytest.skip("a full stack ends the process where handlers cannot leave their stack")
    body, expected = FAULTS[name]
    for _ in range(2):
        with pytest.raises(KernelFault) as caught:
            twice(machine, kernel(body))
        text = str(caught.value)
        assert "\n" not in text
        assert re.match(r"probe: threadgroup \d+, thread \d+ .*|probe: writes byte.*", text)
        assert re.search(expected, text), text
        assert "emulated, seed" in text


def test_it_goes_on_after_a_fault(machine: Emulator) -> None:
    with pytest.raises(KernelFault):
        run(machine, kernel(FAULTS["divergent barrier"][0]))
    sums = run(machine, kernel("uint i = thread_index_in_threadgroup; y[i] = simd_sum(a[i]);"))
    np.testing.assert_array_equal(sums, np.repeat([np.arange(32).sum(), np.arange(32, 64).sum()], 32))


def test_barriers_order_what_they_should(machine: Emulator) -> None:
    body = (
        "threadgroup float h[N]; uint i = thread_index_in_threadgroup; h[i] = a[i];\n" + BARRIER
        + "float v = h[(i + 1) % N];\n" + BARRIER + "h[i] = v;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "y[i] = h[i / 32 * 32 + (i + 1) % 32];"
    )  # fmt: skip
    lane = np.arange(64)
    np.testing.assert_array_equal(run(machine, kernel(body)), (lane // 32 * 32 + (lane + 1) % 32 + 1) % 64)


def test_simd_operations(machine: Emulator) -> None:
    body = (
        "uint i = thread_index_in_threadgroup; float p = simd_prefix_exclusive_sum(a[i]);\n"
        "y[i] = p + 1000.0f * simd_broadcast(a[i], 3) + 100000.0f * simd_shuffle_xor(a[i], 1);"
    )
    a = np.arange(64, dtype=np.float32)
    prefix = np.concatenate([np.cumsum(half) - half for half in (a[:32], a[32:])])
    expected = prefix + 1000 * np.repeat([3, 35], 32) + 100000 * (np.arange(64) ^ 1)
    np.testing.assert_array_equal(run(machine, kernel(body)), expected)


def test_the_order_of_threads_is_drawn_from_the_seed(machine: Emulator) -> None:
    # Threads that count up without atomics: each keeps the number it found.
    probe = kernel(
        "device uint* seen = (device uint*)n; uint i = thread_position_in_grid.x; y[i] = float(seen[0]); seen[0] += 1;",
        in_place=["n"],
    )

    def order(seed: int) -> list[float]:
        machine.seed = seed
        counter = np.zeros(1, np.uint32)
        (y,) = machine.run(
            probe, [np.zeros(1, np.float32), counter], template={"N": 64}, grid=128, threadgroup=64,
            output_shapes=[(128,)],
        )  # fmt: skip
        assert counter[0] == 128
        return y.tolist()

    assert sorted(order(1)) == list(range(128))
    assert order(1) == order(1) != list(range(128))
    assert len({tuple(order(seed)) for seed in range(8)}) == 8
    assert {int(np.argmin(order(seed))) // 64 for seed in range(8)} == {0, 1}  # threadgroups too


@pytest.mark.parametrize(("name", "dtype"), [("half", np.float16), ("bfloat", None)])
def test_16_bit_types_convert_as_ieee(machine: Emulator, name: str, dtype: Any) -> None:
    body = f"uint i = thread_position_in_grid.x; y[i] = float({name}(a[i]));"
    probe = kernel(body)
    patterns = np.arange(0, 1 << 32, 65521, dtype=np.uint64).astype(np.uint32)  # every exponent, both signs
    patterns = patterns[: len(patterns) // 64 * 64]
    a = patterns.view(np.float32)
    (y,) = machine.run(
        probe, [a, np.zeros(1, np.uint32)], template={"N": 64}, grid=len(a), threadgroup=64, output_shapes=[a.shape]
    )
    if dtype is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            expected = a.astype(dtype).astype(np.float32)
    else:
        import torch

        expected = torch.from_numpy(a.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(y, expected)


def test_launches_that_differ_between_machines_are_refused(machine: Emulator) -> None:
    probe = kernel("y[0] = a[0];")
    good: dict[str, Any] = {"template": {"N": 64}, "grid": 64, "threadgroup": 64, "output_shapes": [(1,)]}
    arrays = [np.zeros(4, np.float32), np.zeros(1, np.uint32)]
    for changed, expected in (
        ({"grid": 65}, "grid=65"), ({"threadgroup": 48, "grid": 48}, "threadgroup=48"), ({"template": {}}, "template"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=expected):
            machine.run(probe, arrays, **{**good, **changed})
    with pytest.raises(ValueError, match="takes 2 inputs, not 1"):
        machine.run(probe, arrays[:1], **good)
    with pytest.raises(ValueError, match="a is not a contiguous array of float32"):
        machine.run(probe, [np.zeros(4), arrays[1]], **good)
    with pytest.raises(ValueError, match="does not hold"):
        machine.array(np.zeros(4), "bfloat16")


def test_text_that_does_not_compile_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(KernelFault) as caught:
        run(Emulator(cache=tmp_path), kernel("y[0] = nothing_here;"))
    assert "nothing_here" in str(caught.value)
    assert "probe.metal:1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())  # nothing half made is kept


def test_compiled_kernels_are_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Emulator(cache=tmp_path), kernel("y[0] = a[0];"))
    kept = set(tmp_path.iterdir())
    assert {path.suffix for path in kept} == {".so", ".sha256"}
    monkeypatch.setattr(Emulator, "_compile", None)  # the second time nothing is compiled
    run(Emulator(cache=tmp_path), kernel("y[0] = a[0];"))
    assert set(tmp_path.iterdir()) == kept
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert emulator.cache_directory() == tmp_path / "flash-workbench" / "kernels"


def test_no_compiler_and_no_place_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(DeviceError, match="set XDG_CACHE_HOME to a writable directory"):
        run(Emulator(cache=blocked / "kernels"), kernel("y[0] = a[0];"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler found; install"):
        emulator.compiler()
