"""A fault planted in any kernel makes verification fail: a barrier removed, one off, a wrong type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from workbench.kernels.metal import gemv, predictor, slots, sparse_ffn
from workbench.kernels.metal.cases import SMALL, FfnCase, GemvCase, PredictorCase, SlotCase
from workbench.kernels.metal.emulator import Emulator
from workbench.kernels.metal.kernel import Kernel, Template
from workbench.kernels.metal.verify import Case, Finding, launches, relative_error, verify

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
KERNELS = {
    k.name: k for k in (
        sparse_ffn.ffn_kernel(), sparse_ffn.sum_kernel(), gemv.gemv_kernel(), predictor.flags_kernel(),
        predictor.compact_kernel(), slots.insert_kernel(), slots.move_kernel(),
    )
}  # fmt: skip
FFN = FfnCase("sparse_ffn", "float32", 96, 100, 83, cut=SMALL, pad=32)
GATED = replace(FFN, gated=True)
HALF = replace(FFN, dtype="float16")
QUANTIZED = FfnCase(
    "sparse_ffn_quantized", "float16", 128, 40, 33, bits=4, cut=replace(SMALL, threads=32, rows=8)
)  # fmt: skip
ONE_BY_ONE = replace(FFN, cut=replace(SMALL, batch=1))
MANY_GROUPS = replace(FFN, num_rows=100, cut=replace(SMALL, groups=40))
BYTES = replace(QUANTIZED, bits=8)
SPLIT = GemvCase("float32", 9, 160, bias="float32")
LIST = PredictorCase("float32", 203, 32, 64, 0.3)
FULL = replace(LIST, neurons=1100, share=1.0)
LONG = PredictorCase("bfloat16", 16500, 8, 16, 0.1)
INSERT, MOVE = SlotCase("slot_insert", 96, 40, 17, 11), SlotCase("slot_move", 96, 40, 17, 11)


@dataclass(frozen=True)
class Fault:
    """In the `which`-th place of `old` in the body, or in all of the header, `new` is written."""

    kernel: str
    kind: str
    old: str
    new: str
    case: Case
    which: int = 0

    def planted(self) -> Kernel:
        kernel = KERNELS[self.kernel]
        parts = kernel.body.split(self.old)
        if len(parts) > self.which + 1:
            before, after = self.old.join(parts[: self.which + 1]), self.old.join(parts[self.which + 1 :])
            return replace(kernel, body=before + self.new + after)
        assert self.old in kernel.header, f"{self.kernel} has no {self.old!r}"
        return replace(kernel, header=kernel.header.replace(self.old, self.new))


FAULTS = [
    *(Fault("sparse_ffn", "barrier", BARRIER, "", FFN, which) for which in range(3)),
    Fault("sparse_ffn", "barrier", BARRIER, "", QUANTIZED),
    Fault("sparse_ffn", "one off", "base + r < n", "base + r <= n", FFN),
    Fault("sparse_ffn", "one off", "r < per_block; r +=", "r + 1 < per_block; r +=", ONE_BY_ONE),
    Fault("sparse_ffn", "one off", "c < uint(CHUNKS)\n", "c + 1 < uint(CHUNKS)\n", FFN),
    Fault("sparse_ffn", "one off", "(GATED ? 2 : 1) * R::BYTES", "1 * R::BYTES", GATED),
    Fault("sparse_ffn", "one off", "c < chunks ? R", "c + 1 < chunks ? R", FFN),
    Fault("sparse_ffn", "one off", "scales[D / 64 + c / 4]", "scales[D / 64 + c / 4 - 1]", QUANTIZED),
    Fault("sparse_ffn", "wrong type", "as_type<half>(ushort(word &", "as_type<bfloat>(ushort(word &", HALF),
    Fault("sparse_ffn", "wrong type", "word << 16", "(word & 0xffffu) << 13", replace(FFN, dtype="bfloat16")),
    Fault("sparse_ffn", "wrong type", "threadgroup float value[ROWS]", "threadgroup bfloat value[ROWS]", FFN),
    Fault("sparse_ffn", "wrong type", "float((word >> (4 * i)) & 0xfu)", "float(int(word << (28 - 4 * i)) >> 28)",
          QUANTIZED),
    Fault("sparse_ffn", "wrong type", "float(word & 0xffu)", "float(int(word << 24) >> 24)", BYTES),
    Fault("ffn_sum", "barrier", BARRIER, "", FFN),
    Fault("ffn_sum", "one off", "g < used &&", "g + 1u < used &&", FFN),
    Fault("ffn_sum", "one off", "int s = 0; s < SIMDS", "int s = 0; s < SIMDS - 15", MANY_GROUPS),
    Fault("ffn_sum", "wrong type", "threadgroup float part", "threadgroup half part", FFN),
    Fault("gemv", "barrier", BARRIER, "", SPLIT),
    Fault("gemv", "one off", "s < SPLIT", "s + 1 < SPLIT", SPLIT),
    Fault("gemv", "one off", "row < uint(OUT)", "row + 1 < uint(OUT)", SPLIT),
    Fault("gemv", "one off", "< uint(OUT);", "<= uint(OUT);", replace(SPLIT, rows=9, columns=1056)),
    Fault("gemv", "wrong type", "threadgroup float part", "threadgroup bfloat part", SPLIT),
    Fault("gemv", "wrong type", "float(int(word << 24) >> 24)", "float(word & 0xffu)", replace(SPLIT, dtype="int8")),
    Fault("predict_flags", "one off", "neuron < uint(NEURONS)", "neuron + 1 < uint(NEURONS)", replace(LIST, share=1.0)),
    Fault("predict_flags", "one off", "bias[byte * 8u + uint(p)]", "bias[byte * 8u + uint(p) - 1u]", LIST),
    Fault("predict_flags", "wrong type", "float z = simd_sum", "int z = simd_sum", LIST),
    Fault("compact", "barrier", BARRIER, "", LIST),
    Fault("compact", "barrier", BARRIER, "", LONG, 1),
    Fault("compact", "one off", "byte + k < uint(BYTES)", "byte + k + 1u < uint(BYTES)", replace(LIST, share=1.0)),
    Fault("compact", "one off", "lane == 31u", "lane == 30u", LONG),
    Fault("compact", "wrong type", "threadgroup uint totals", "threadgroup uchar totals", FULL),
    *(
        fault
        for name, case in (("slot_insert", INSERT), ("slot_move", MOVE))
        for fault in (
            Fault(name, "one off", "i < n;", "i <= n;", case),
            Fault(name, "one off", "< uint(STRIDE / UNIT)) to", "< uint(STRIDE / UNIT) - 1u) to", case),
            Fault(name, "wrong type", "typedef uint4 Type;", "typedef uint2 Type;", case),
        )
    ),
]  # fmt: skip


class Planted:
    """The emulator, with one kernel exchanged."""

    where = "emulated"

    def __init__(self, machine: Emulator, kernel: Kernel | None = None) -> None:
        self.machine, self.kernel = machine, kernel
        self.groups, self.most_threads = machine.groups, machine.most_threads

    def array(self, values: Any, dtype: str) -> Any:
        return self.machine.array(values, dtype)

    def numpy(self, array: Any) -> Any:
        return self.machine.numpy(array)

    def run(self, kernel: Kernel, inputs: Sequence[Any], **given: Any) -> list[Any]:
        planted = self.kernel is not None and kernel.name == self.kernel.name
        return self.machine.run(self.kernel if planted and self.kernel else kernel, inputs, **given)


def needed(machine: Emulator) -> list[tuple[Kernel, Template]]:
    """Every kernel as it is and with each fault, under the template arguments of the fault's case."""
    found: list[tuple[Kernel, Template]] = []
    for fault in FAULTS:
        for kernel, template in launches([fault.case], machine):
            found.append((kernel, template))
            if kernel.name == fault.kernel:
                found.append((fault.planted(), template))
    return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    made = Emulator(cache=tmp_path_factory.mktemp("kernels"))
    made.prepare(needed(made))
    return made


def outcome(machine: Emulator, case: Case, kernel: Kernel | None) -> Finding:
    (finding,) = verify(Planted(machine, kernel), [case], seeds=4)
    return finding


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kernel}: {f.kind}, {f.new[:24]}")
def test_a_planted_fault_is_found(machine: Emulator, fault: Fault) -> None:
    assert outcome(machine, fault.case, None).ok
    found = outcome(machine, fault.case, fault.planted())
    assert not found.ok, found
    assert "does not compile" not in found.fault
    if fault.kind == "barrier":
        assert "no barrier between" in found.fault or "no thread has written" in found.fault


def test_every_kernel_has_every_fault_that_it_can_have() -> None:
    planted = {(fault.kernel, fault.kind) for fault in FAULTS}
    for name, kernel in KERNELS.items():
        kinds = {"one off", "wrong type"} | ({"barrier"} if BARRIER in kernel.body else set())
        assert {(name, kind) for kind in kinds} <= planted


def test_what_is_not_a_number_is_not_within_a_limit() -> None:
    wrong = Finding("gemv", "emulated", "float32", "", 1, float("nan"), 1e-5)
    assert not wrong.ok
    assert wrong.as_dict()["worst"] is None
    assert relative_error(np.array([np.nan]), np.array([1.0])) == float("inf")
    assert relative_error(np.zeros(2), np.zeros(3)) == float("inf")
    assert relative_error(np.array([0.5]), np.zeros(1)) == 0.5
    assert relative_error(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == 0.5
