"""Kernels on every machine: emulated here, compiled as CUDA where nvcc is, run as CUDA or on Metal where a GPU is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from workbench.cli import main
from workbench.errors import DeviceError
from workbench.kernels.ffn import sparse_ffn_reference as cpu_reference
from workbench.kernels.metal import emulator, mlx_machine, slots
from workbench.kernels.metal.cases import CASES, FfnCase, GemvCase, large_cases
from workbench.kernels.metal.emulator import Emulator
from workbench.kernels.metal.gemv import gemv
from workbench.kernels.metal.kernel import HERE, Kernel, Template
from workbench.kernels.metal.mlx_machine import MlxMachine
from workbench.kernels.metal.predictor import predict
from workbench.kernels.metal.rows import narrow, pack_rows, row_bytes, unpack_rows
from workbench.kernels.metal.source import as_cpp, as_cuda, cuda_unit
from workbench.kernels.metal.sparse_ffn import Record, Tiles, sparse_ffn, sparse_ffn_reference, tiles
from workbench.kernels.metal.verify import Case, launches, verify
from workbench.report.kernels import read_kernels


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels are shared by the tests of this file, and gone with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def every_case() -> list[Case]:
    return [case for make in CASES.values() for case in make()]


def test_every_kernel_holds_emulated() -> None:
    machine, cases = Emulator(seed=7), every_case()
    machine.prepare(launches(cases, machine))
    found = list(verify(machine, cases, seeds=2, seed=7))
    assert [finding for finding in found if not finding.ok] == []
    assert {finding.where for finding in found} == {"emulated"}
    assert {finding.dtype for finding in found} >= {"float32", "float16", "bfloat16", "int8"}


def test_a_changed_number_of_rows_is_data() -> None:
    machine = Emulator()
    case = FfnCase("sparse_ffn", "float32", 64, 30, 20)
    needed = [launches([replace(case, num_rows=n)], machine) for n in (0, 1, 20, 30)]
    assert all(launch == needed[0] for launch in needed)


def test_the_references_agree_with_the_cpu_kernels_reference() -> None:
    rng, d, n, gated = np.random.default_rng(3), 40, 25, True
    record = Record(d, "bfloat16", 3 * 80 + 16, gated)
    held = rng.integers(0, 256, (n, record.slot_bytes), np.uint8)
    held[:, :240] = pack_rows(rng.standard_normal((n * 3, d)), "bfloat16").reshape(n, 240)
    x, (bias, up_bias) = rng.standard_normal(d).astype(np.float32), rng.standard_normal((2, n)).astype(np.float32)
    rows = rng.permutation(n)[:19]
    out = np.zeros(d, np.float32)
    count = cpu_reference(
        x, held.reshape(-1), record.slot_bytes, rows.astype(np.int32), bias, "bfloat16", out, gated=gated,
        activation="relu2", threshold=0.5, up_bias=up_bias,
    )  # fmt: skip
    y, active = sparse_ffn_reference(
        record, held.reshape(-1), rows.astype(np.uint32), 19, x, bias, 0.5, activation="relu2", up_bias=up_bias
    )
    assert active == count
    np.testing.assert_allclose(y, out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_rows_are_what_their_layout_says(dtype: str, bits: int) -> None:
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((3, 128))
    packed = pack_rows(weights, dtype, bits)
    assert packed.shape == (3, row_bytes(128, dtype, bits))
    item = 4 if dtype == "float32" else 2
    values = 128 * bits // 8
    # The 70th weight of row 1, by hand: its value, then the scale and the bias of group 1.
    byte = int(packed[1, 70 * bits // 8])
    value = byte if bits == 8 else byte >> 4 * (70 % 2) & 15
    stored = packed[1, values : values + 4 * item].view(np.float32 if item == 4 else np.uint16)
    wide = narrowed(stored, dtype)
    unpacked = unpack_rows(packed, 128, dtype, bits)
    assert unpacked[1, 70] == wide[1] * value + wide[3]
    step = np.ptp(weights.reshape(3, 2, 64), axis=-1).max() / (2**bits - 1)
    assert np.abs(unpacked - weights).max() <= step * 0.75 + 0.02


def narrowed(stored: np.ndarray, dtype: str) -> np.ndarray:
    from workbench.kernels.storage import widen

    return widen(stored, dtype).astype(np.float64)


def test_rounding_is_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(narrow(values, "bfloat16"), expected)


def test_arguments_that_do_not_fit_are_named() -> None:
    machine = Emulator()
    f, u, b = np.zeros(4, np.float32), np.zeros(1, np.uint32), np.zeros(4 * 128, np.uint8)
    square = np.zeros((4, 4), np.int8)
    one, x, record = np.zeros(1, np.float32), np.zeros(16, np.float32), Record(16, "float32", 128)
    for problem, call in (
        ("d=4: the kernels need at least 8", lambda: Record(4, "float32", 32)),
        ("slot_bytes=100 does not hold 2 rows of 64", lambda: Record(16, "float32", 100)),
        ("slot_bytes=130 leaves", lambda: Record(16, "float32", 130)),
        ("d=96: quantized rows need a multiple of 64", lambda: Record(96, "float16", 4096, bits=4).row_bytes),
        ("bits=3", lambda: row_bytes(64, "float16", 3)),
        ("dtype='int4'", lambda: row_bytes(64, "int4")),
        ("activation='gelu'", lambda: sparse_ffn(machine, record, b, u, u, x, f, one, activation="gelu")),
        ("up_bias: records without a gate", lambda: sparse_ffn(machine, record, b, u, u, x, f, one, up_bias=f)),
        (r"x: shape \(4,\) is not \(16,\)", lambda: sparse_ffn(machine, record, b, u, u, f, f, one)),
        ("slots: 512 bytes do not hold the 16 slots", lambda: sparse_ffn(machine, record, b, u, u, x, x, one)),
        ("x: shape", lambda: gemv(machine, np.zeros((3, 16), np.float32), f, dtype="float32")),
        ("x: shape", lambda: gemv(machine, np.zeros((3, 16), np.float32), np.zeros((9, 16), "f4"), dtype="float32")),
        ("scale: int8 weights need one", lambda: gemv(machine, np.zeros((3, 16), np.int8), x, dtype="int8")),
        ("bias: 4 values, w has 3", lambda: gemv(machine, np.zeros((3, 16), "f4"), x, dtype="float32", bias=f)),
        ("do not fit each other", lambda: predict(machine, x, square, square[:2], f, one, dtype="int8")),
        ("staging: 512 bytes do not hold 5", lambda: slots.insert(machine, b, 128, b, np.zeros(5, "u4"), u)),
        ("source, target: 1 and 5", lambda: slots.move(machine, b, 128, u, np.zeros(5, "u4"), u)),
        ("at least 8 bytes", lambda: slots.insert(machine, b[:4], 4, b[:4], u, u)),
        ("slot_bytes=0", lambda: slots.insert(machine, b, 0, b, u, u)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            call()


def test_tiles_fit_every_geometry() -> None:
    machine = Emulator()
    for d in (8, 50, 77, 768, 2048, 4096, 8192, 16384):
        for dtype in ("float32", "float16"):
            cut = tiles(machine, Record(d, dtype, 2 * row_bytes(d, dtype)), 100)
            assert cut.threads % 32 == 0
            assert 32 <= cut.threads <= 256
            assert cut.rows >= cut.threads // 32 * cut.rows_at_once
            assert cut.batch >= 1 <= cut.unroll


def test_words_of_address_spaces_are_taken_out_and_nothing_else() -> None:
    text = (
        "threadgroup float h[A + 1]; // device\nconst device uchar* p; thread float* q; mem_flags::mem_device; threads"
    )
    assert " ".join(as_cuda(text).split()) == (
        "__shared__ float h[A + 1]; const uchar* p; float* q; mem_flags::mem_device; threads"
    )
    assert 'msl::Shared<float, (A + 1)> h("h")' in as_cpp(text)
    for path in HERE.glob("*.metal"):
        for text in (as_cuda(path.read_text()), as_cpp(path.read_text())):
            assert not {"threadgroup", "device", "constant", "thread"} & set(text.replace("(", " ").split())


def test_every_file_of_a_kernel_is_beside_the_package() -> None:
    files = {path.name for path in HERE.iterdir()}
    assert files >= {"common.metal", *emulator.SHIM, "msl_cuda.h", "sparse_ffn.metal", "ffn_sum.metal", "gemv.metal",
                     "predict_flags.metal", "compact.metal", "slot_insert.metal", "slot_move.metal"}  # fmt: skip


# --- as CUDA -------------------------------------------------------------------------------------
def cuda_units() -> dict[str, tuple[Kernel, list[Template]]]:
    found: dict[str, tuple[Kernel, list[Template]]] = {}
    for kernel, template in launches(every_case(), Emulator()):
        found.setdefault(kernel.name, (kernel, []))[1].append(template)
    return found


def nvcc(text: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("no nvcc here: the CUDA vocabulary is not compiled")
    (tmp_path / "unit.cu").write_text(text)
    done = subprocess.run(
        [compiler, "-arch=sm_90", "-cubin", "-std=c++17", "-Werror", "all-warnings", "unit.cu"], cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["gemv", "compact", "slot_move"])
def test_bodies_compile_as_cuda(name: str, tmp_path: Path) -> None:
    kernel, templates = cuda_units()[name]
    nvcc(cuda_unit(kernel, templates[:2]), tmp_path)


@pytest.mark.slow
def test_every_instance_compiles_as_cuda(tmp_path: Path) -> None:
    for kernel, templates in cuda_units().values():
        nvcc(cuda_unit(kernel, templates), tmp_path)
    machine = Emulator()
    machine.groups = mlx_machine.CUDA_GROUPS
    for kernel, template in launches(large_cases(), machine):
        nvcc(cuda_unit(kernel, [template]), tmp_path)


# --- MLX -----------------------------------------------------------------------------------------
class Fast:
    """Stands for mx.fast: keeps what kernels are made and called with."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []

    def cuda_kernel(self, **given: Any) -> Any:
        self.made.append(given)

        def call(**launch: Any) -> list[Any]:
            self.calls.append(launch)
            return [Array(np.zeros(shape, dtype)) for shape, dtype in
                    zip(launch["output_shapes"], launch["output_dtypes"], strict=True)]  # fmt: skip

        return call

    metal_kernel = cuda_kernel


class Array:
    """Stands for mx.array."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.size, self.ndim = values, values.shape, values.size, values.ndim
        self.dtype = values.dtype.type

    def view(self, dtype: Any) -> Array:
        return Array(self.values.view(dtype))


def fake_mlx(monkeypatch: pytest.MonkeyPatch, *, device: str, version: str = "0.32.4") -> ModuleType:
    core = ModuleType("mlx.core")
    package = ModuleType("mlx")
    members = {
        "fast": Fast(), "array": Array, "gpu": "gpu", "float32": np.float32, "float16": np.float16,
        "bfloat16": np.int16, "uint32": np.uint32, "uint16": np.uint16, "uint8": np.uint8, "int8": np.int8,
    }  # fmt: skip
    for name, value in members.items():
        setattr(core, name, value)
    for name in ("metal", "cuda"):
        backend = ModuleType(f"mlx.core.{name}")
        backend.is_available = lambda here=name == device: here  # type: ignore[attr-defined]
        setattr(core, name, backend)
    package.core = core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx", package)
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    return core


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_mlx_gets_each_kernel_once_and_counts_specialisations(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    core = fake_mlx(monkeypatch, device=device)
    machine = MlxMachine(device)
    assert machine.where == ("as CUDA" if device == "cuda" else "on Metal")
    for rows in (16, 16, 24):
        w = machine.array(np.zeros((rows, 32), np.uint16), "bfloat16")
        gemv(machine, w, machine.array(np.zeros(32, np.float32), "float32"), dtype="bfloat16")
    assert machine.compilations == 2
    (made,) = core.fast.made
    assert made["name"].startswith("gemv_")
    assert made["input_names"] == ["w", "x", "bias", "scale"]
    if device == "cuda":
        assert "const device" not in made["source"] + made["header"]
        assert "__shared__ float part" in made["source"]
    else:
        assert made["source"] == (HERE / "gemv.metal").read_text()
    assert core.fast.calls[0]["template"][:3] == [("T", np.int16), ("B", np.float32), ("IN", 32)]
    with pytest.raises(ValueError, match="w is not an array of"):
        gemv(machine, Array(np.zeros((4, 32), np.float32)), Array(np.zeros(32, np.float32)), dtype="bfloat16")


def test_what_mlx_lacks_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mlx(monkeypatch, device="none")
    with pytest.raises(DeviceError, match=r"no Metal device here; .*Apple silicon"):
        MlxMachine("metal")
    with pytest.raises(DeviceError, match=r"no CUDA device here; .*pip install 'flash-workbench\[mlx-cuda\]'"):
        MlxMachine("cuda")
    assert mlx_machine.available() == []
    with pytest.raises(ValueError, match="device='cpu'"):
        MlxMachine("cpu")  # type: ignore[arg-type]
    fake_mlx(monkeypatch, device="cuda", version="0.29.1")
    with pytest.raises(DeviceError, match=r"MLX 0\.29\.1 is too old .*mlx>=0\.30"):
        MlxMachine("cuda")
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(DeviceError, match=r"MLX is not installed; pip install 'flash-workbench\[mlx\]'"):
        MlxMachine("cuda")


@pytest.mark.device
def test_every_kernel_holds_on_the_gpu() -> None:
    found = mlx_machine.available()
    if not found:
        pytest.skip("MLX has no GPU here")
    machine = MlxMachine(found[0])
    assert [finding for finding in verify(machine, every_case()) if not finding.ok] == []
    assert [finding for finding in verify(machine, large_cases(), seeds=1) if not finding.ok] == []
    before = machine.compilations
    for rows in (0, 3, 17, 60):
        FfnCase("sparse_ffn", "bfloat16", 256, 64, rows).run(machine, np.random.default_rng(rows))
    assert machine.compilations == before + 2


# --- the command ---------------------------------------------------------------------------------
def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["workbench", "kernels", "verify", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_the_command_prints_where_and_writes_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.json"
    arguments = ["--on", "emulated", "--kernel", "slots", "--kernel", "gemv", "--seeds", "1", "--json", str(path)]
    assert command(monkeypatch, *arguments) == 0
    shown = capsys.readouterr().out
    assert "emulated" in shown
    assert "Not run: as CUDA, on Metal." in shown
    record = read_kernels(path)
    assert {row.kernel for row in record.rows} == {"gemv", "slot_insert", "slot_move"}
    assert all(row.ok and row.where == "emulated" for row in record.rows)
    assert json.loads(path.read_text())["run"]["seed"] == 0


def test_the_command_fails_where_a_kernel_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Any, kernel: Kernel, inputs: Sequence[Any], **given: Any) -> list[Any]:
        shapes = given["output_shapes"]
        return [np.zeros(shape, np.float32) for shape in shapes]

    monkeypatch.setattr(Emulator, "run", broken)
    monkeypatch.setattr(Emulator, "prepare", lambda self, wanted: None)
    assert command(monkeypatch, "--on", "emulated", "--kernel", "gemv", "--seeds", "1") == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_command_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_mlx(monkeypatch, device="none")
    assert command(monkeypatch, "--on", "cuda") == 1
    assert "no CUDA device here" in capsys.readouterr().err
    assert command(monkeypatch, "--kernel", "nope") == 2
    assert GemvCase("float32", 1, 8).shape == "1 x 8, 1 token"


def test_narrow_and_constant_groups_are_packed_exactly_enough() -> None:
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float16", "bfloat16"):
        for bits in (4, 8):
            rows = np.stack([np.full(64, 0.25), np.zeros(64), 0.25 + 5e-6 * rng.random(64)]).astype(np.float32)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                back = unpack_rows(pack_rows(rows, dtype, bits), 64, dtype, bits)
            assert np.abs(back[:2] - rows[:2]).max() == 0
            assert np.abs(back[2] - rows[2]).max() <= {4: 5e-7, 8: 1e-7}[bits] + np.abs(rows[2] - 0.25).max() * (
                dtype == "bfloat16"
            )


def test_tiles_that_cannot_be_are_refused() -> None:
    for wrong in ({"rows": 0}, {"batch": 0}, {"unroll": 0}, {"rows_at_once": 0}, {"threads": 40}, {"threads": 2048}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Tiles(**wrong)


def test_a_damaged_cache_is_compiled_again_and_a_wrong_compiler_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, x = np.ones((4, 8), np.float32), np.ones(8, np.float32)
    assert np.array_equal(gemv(Emulator(cache=tmp_path), w, x, dtype="float32"), [8, 8, 8, 8])
    (made,) = tmp_path.glob("*.so")
    whole = made.read_bytes()
    for damaged in (whole[:3000], b""):
        made.unlink()
        made.write_bytes(damaged)
        assert np.array_equal(gemv(Emulator(cache=tmp_path), w, x, dtype="float32"), [8, 8, 8, 8])
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(DeviceError, match="CXX='/nonexistent/g\\+\\+' is no program"):
        gemv(Emulator(cache=tmp_path / "other"), w, x, dtype="float32")
