"""Metal text as C++ and as CUDA: address-space words, generated signatures."""

from __future__ import annotations

import re

from workbench.kernels.metal.kernel import Kernel, Template, text_of

CPP_TYPES = {
    "float32": "float", "float16": "half", "bfloat16": "bfloat", "uint32": "uint", "uint8": "uchar", "int8": "int8_t",
}  # fmt: skip
CUDA_TYPES = {
    "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "uint32": "uint32_t", "uint8": "uint8_t",
    "int8": "int8_t",
}  # fmt: skip
_SHARED = re.compile(r"\bthreadgroup\s+([\w:]+)\s+(\w+)\s*\[([^\]]+)\]\s*;")
_SPACE = re.compile(r"\b(?:device|constant|thread)\b(?!\s*\()")
_COMMENT = re.compile(r"//[^\n]*")


def as_cuda(text: str) -> str:
    """The text without address-space words; threadgroup arrays as __shared__."""
    return _plain(text, r"__shared__ \1 \2[\3];")


def as_cpp(text: str) -> str:
    """The text for the emulator, whose threadgroup arrays are objects that watch over their use."""
    return _plain(text, r'static msl::Shared<\1, (\3)> \2("\2"); msl::declared(\2);')


def _plain(text: str, shared: str) -> str:
    return _SPACE.sub("", _SHARED.sub(shared, _COMMENT.sub("", text)))


def spelled(value: str | int | bool, types: dict[str, str]) -> str:
    """A template argument in C++."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return types[value] if isinstance(value, str) else str(value)


def cuda_header(kernel: Kernel) -> str:
    """What mx.fast.cuda_kernel gets as header: the vocabulary, then the helpers."""
    return text_of("msl_cuda.h").replace("#pragma once\n", "") + as_cuda(kernel.header)


def cuda_unit(kernel: Kernel, templates: list[Template]) -> str:
    """A CUDA file with this kernel under each of the template arguments, with the signatures that MLX generates."""
    parts = ["#include <cstdint>\n", cuda_header(kernel), "namespace mlx::core::cu {\n"]
    for number, template in enumerate(templates):
        parameters = [f"const {CUDA_TYPES[kernel.type_of(kind, template)]}* {name}" for name, kind in kernel.inputs]
        parameters += [f"{CUDA_TYPES[kernel.type_of(kind, template)]}* {name}" for name, kind in kernel.outputs]
        parts.append(f"__global__ void {kernel.name}_{number}({', '.join(parameters)}) {{\n")
        for name, value in template.items():
            word = "bool" if isinstance(value, bool) else "int"
            parts.append(
                f"  using {name} = {CUDA_TYPES[value]};\n" if isinstance(value, str)
                else f"  constexpr {word} {name} = {spelled(value, CUDA_TYPES)};\n"
            )  # fmt: skip
        parts.append(f"{as_cuda(kernel.body)}\n}}\n")
    return "".join([*parts, "}\n"])


def emulated_unit(kernel: Kernel, templates: list[Template]) -> str:
    """A C++ file with this kernel under each of the template arguments; run_N runs the N-th."""
    words = {str: "typename", bool: "bool", int: "int"}
    declared = ", ".join(f"{words[type(value)]} {name}" for name, value in templates[0].items())

    def parameter(name: str, kind: str, const: str) -> str:
        return f"{const}{kind if kind in kernel.template else CPP_TYPES[kind]}* {name}"

    parameters = [parameter(name, kind, "const ") for name, kind in kernel.inputs]
    parameters += [parameter(name, kind, "") for name, kind in kernel.outputs]
    parts = [
        '#include "emulator.h"\n#line 1 "common.metal"\n', as_cpp(kernel.header),
        f"\ntemplate <{declared}>\n" if declared else "\n",
        f'static void body({", ".join(parameters)}) {{\n#line 1 "{kernel.name}.metal"\n{as_cpp(kernel.body)}\n}}\n',
    ]  # fmt: skip
    for number, template in enumerate(templates):
        values = ", ".join(spelled(value, CPP_TYPES) for value in template.values())
        arguments = ", ".join(
            f"({const}{CPP_TYPES[kernel.type_of(kind, template)]}*)b[{i}].data"
            for i, (kind, const) in enumerate(
                [(kind, "const ") for _, kind in kernel.inputs] + [(kind, "") for _, kind in kernel.outputs]
            )
        )
        parts.append(
            f"static msl::Launch launch_{number};\n"
            f"static void call_{number}(msl::Buffer* b) {{ body{f'<{values}>' if values else ''}({arguments}); }}\n"
            f'extern "C" int run_{number}(msl::Buffer* b, uint n, const uint* grid, uint64_t seed, char* m, size_t s) '
            f"{{ return msl::launch(call_{number}, &launch_{number}, b, n, grid, seed, m, s); }}\n"
        )
    return "".join(parts)
