"""A second opinion on the bodies: clang, of which Apple's Metal compiler is a branch, reads them as C++14 with Metal's
address spaces and vector types, under the signatures that MLX generates.

No package has a front end for Metal itself. This one knows nothing of Metal's library: what bodies use of it is
declared here, with the types of Apple's specification.
"""

from __future__ import annotations

import pytest

from workbench.kernels.metal.cases import CASES
from workbench.kernels.metal.emulator import Emulator
from workbench.kernels.metal.kernel import Kernel, Template
from workbench.kernels.metal.source import CPP_TYPES, spelled
from workbench.kernels.metal.verify import launches

cindex = pytest.importorskip("clang.cindex", reason="libclang is not installed: pip install libclang")

LIBRARY = """
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline __attribute__((__always_inline__))
typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint; typedef unsigned long ulong;
typedef signed char int8_t; typedef _Float16 half; typedef __bf16 bfloat;
typedef uint uint2 __attribute__((ext_vector_type(2))); typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4))); typedef float float4 __attribute__((ext_vector_type(4)));
template <class To, class From> To as_type(From from) { return __builtin_bit_cast(To, from); }
namespace mem_flags { enum mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 }; }
void threadgroup_barrier(mem_flags::mem_flags); void simdgroup_barrier(mem_flags::mem_flags);
float simd_sum(float); uint simd_sum(uint); uint simd_prefix_exclusive_sum(uint); uint popcount(uint);
"""
ATTRIBUTES = {
    "simdgroup_index_in_threadgroup": "uint", "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint", "threadgroup_position_in_grid": "uint3", "threadgroups_per_grid": "uint3",
}  # fmt: skip
SMALL = ("num_rows", "threshold", "order", "after", "count")
"""Inputs of one element, which MLX passes in the constant address space; biases and scales too where there are none."""


def unit(kernel: Kernel, templates: list[Template], small: tuple[str, ...] = SMALL) -> str:
    words = {str: "typename", bool: "bool", int: "int"}

    def parameters(template: Template | None) -> str:
        def spell(kind: str) -> str:
            kept = template is None and kind in kernel.template
            return kind if kept or template is None else CPP_TYPES[kernel.type_of(kind, template)]

        made = [
            f"const {'constant' if name in small else 'device'} {CPP_TYPES.get(spell(kind), spell(kind))}* {name}"
            for name, kind in kernel.inputs
        ]
        made += [f"device {CPP_TYPES.get(spell(kind), spell(kind))}* {name}" for name, kind in kernel.outputs]
        made += [f"{word} {name}" for name, word in ATTRIBUTES.items() if name in kernel.body]
        return ", ".join(made)

    declared = ", ".join(f"{words[type(value)]} {name}" for name, value in templates[0].items())
    body = kernel.body
    parts = [LIBRARY, '\n#line 1 "common.metal"\n', kernel.header, f"\ntemplate <{declared}>\nvoid {kernel.name}(",
             parameters(None), f') {{\n#line 1 "{kernel.name}.metal"\n{body}\n}}\n']  # fmt: skip
    for template in templates:
        values = ", ".join(spelled(value, CPP_TYPES) for value in template.values())
        parts.append(f"template void {kernel.name}<{values}>({parameters(template)});\n")
    return "".join(parts)


def complaints(text: str) -> list[str]:
    read = cindex.Index.create().parse(
        "kernel.cpp", args=["-x", "c++", "-std=c++14", "-target", "x86_64-linux-gnu", "-nostdinc", "-Wall", "-Wextra",
                            "-Wno-unused-parameter", "-Wno-unused-variable", "-Wno-undefined-internal"],
        unsaved_files=[("kernel.cpp", text)],
    )  # fmt: skip
    return [str(diagnostic) for diagnostic in read.diagnostics]


def units() -> dict[str, tuple[Kernel, list[Template]]]:
    found: dict[str, tuple[Kernel, list[Template]]] = {}
    for kernel, template in launches([case for make in CASES.values() for case in make()], Emulator()):
        found.setdefault(kernel.name, (kernel, []))[1].append(template)
    return found


UNITS = units()


@pytest.mark.parametrize("name", UNITS)
def test_clang_reads_every_body_in_every_instance(name: str) -> None:
    assert complaints(unit(*UNITS[name])) == []


def test_absent_biases_and_scales_may_be_in_the_constant_address_space() -> None:
    assert complaints(unit(*UNITS["gemv"], small=("bias", "scale"))) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("const device float* x, uint lane", "const constant float* x, uint lane", "no matching function"),
        ("thread float* to) { to[0] = raw; }", "device float* to) { to[0] = raw; }", "cannot initialize"),
        ("if (c < chunks)", "if constexpr (WRONG)", "WRONG"),
        ("static constant constexpr const int WIDTH = 1;", "", "no member named 'WIDTH'"),
    ],
)
def test_what_metal_would_refuse_is_refused(old: str, new: str, expected: str) -> None:
    kernel, templates = UNITS["sparse_ffn"]
    text = unit(kernel, templates)
    assert old in text
    assert any(expected in line for line in complaints(text.replace(old, new)))
