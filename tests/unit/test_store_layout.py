"""The arithmetic of the store's layout, against brute force and against the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from workbench.flash.layout import ALIGNMENT, PAD_PREFIX, RecordLayout, plan_resident, record_stride, round_up
from workbench.flash.manifest import file_sizes, layer_regions
from workbench.spec import ITEMSIZE, ModelSpec
from workbench.tensorfile import read_header

SIZES = [64, 100, 128, 256, 512, 1000, 1024, 1536, 2048, 3072, 4096, 4160, 5120, 6144, 8192, 8256, 9216, 16384, 20480]


def spec(d_model: int = 64, d_ff: int = 250, parts: int = 2) -> ModelSpec:
    return ModelSpec("opt", 3, d_model, d_ff, 100, "relu", 32, parts)


def touched(nbytes: int, stride: int) -> int:
    """The most alignment units that any of many records touches."""
    starts = (i * stride for i in range(ALIGNMENT // 64))
    return max((start + nbytes - 1) // ALIGNMENT - start // ALIGNMENT + 1 for start in starts)


@pytest.mark.parametrize("nbytes", SIZES)
def test_stride_is_the_least_that_straddles_no_more_than_it_must(nbytes: int) -> None:
    must = -(-nbytes // ALIGNMENT)
    fits = [s for s in range(round_up(nbytes, 64), 2 * ALIGNMENT * must, 64) if touched(nbytes, s) == must]
    assert record_stride(nbytes) == fits[0]


def test_strides_of_published_geometries() -> None:
    wide = spec(d_model=2048, d_ff=8192)
    assert RecordLayout.of(wide, "float32") == RecordLayout(2, 8192, 16384, 16384, 8192)
    odd = RecordLayout.of(spec(d_model=768), "float16")
    assert (odd.row_bytes, odd.row_stride, odd.record_bytes, odd.bundle_stride) == (1536, 2048, 3072, 4096)


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("parts", [2, 3])
def test_regions_are_aligned_and_cover_the_files(dtype: str, parts: int) -> None:
    model = spec(d_model=72, parts=parts)
    layout = RecordLayout.of(model, dtype)
    assert layout.record_bytes == parts * 72 * ITEMSIZE[dtype]
    sizes, bundled_end, split_end = file_sizes(model, layout, 0), 0, 0
    for layer in range(model.num_layers):
        found = layer_regions(model, layout, layer)
        assert found["bundled"]["offset"] == bundled_end
        bundled_end += found["bundled"]["nbytes"]
        assert bundled_end % ALIGNMENT == 0
        assert [entry["part"] for entry in found["split"]] == ["up", "down", "gate"][:parts]
        for entry in found["split"]:
            assert entry["offset"] == split_end
            assert entry["nbytes"] >= model.d_ff * layout.row_stride
            split_end += entry["nbytes"]
    assert (sizes["ffn.bundled"], sizes["ffn.split"]) == (bundled_end, split_end)
    assert sorted(layout.record_order()) == list(range(parts))
    assert (layout.record_order()[0], layout.record_order()[-1]) == (0, 1)


def planned(dtype: str) -> tuple[bytes, tuple, list]:  # type: ignore[type-arg]
    layers = [(f"layer.{i}", {f"l{i}.w": (5, 7), f"l{i}.b": (3,)}) for i in range(3)]
    groups = [("embed", {"e": (11, 5), "p": (1, 1)}), *layers, ("head", {})]
    return *plan_resident(groups, dtype), groups


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_resident_groups_are_aligned_and_layers_alike(dtype: str) -> None:
    header, groups, shapes = planned(dtype)
    assert len(header) % ALIGNMENT == 0
    position = len(header)
    for group, (name, tensors) in zip(groups, shapes, strict=True):
        assert (group.name, group.offset) == (name, position)
        assert group.nbytes % ALIGNMENT == 0
        assert group.nbytes >= ALIGNMENT
        assert {n: s.shape for n, s in group.tensors.items()} == tensors
        assert all(slot.offset % 64 == 0 for slot in group.tensors.values())
        position += group.nbytes
    inner = [(g.nbytes, [(s.shape, s.offset) for s in g.tensors.values()]) for g in groups[1:-1]]
    assert inner[0] == inner[1] == inner[2]


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_resident_header_loads_with_the_safetensors_library(dtype: str, tmp_path: Path) -> None:
    header, groups, shapes = planned(dtype)
    file = tmp_path / "resident.safetensors"
    file.write_bytes(header + bytes(groups[-1].offset + groups[-1].nbytes - len(header)))
    wanted = {name: shape for _, tensors in shapes for name, shape in tensors.items()}
    with safe_open(file, "np") as opened:
        found = {name: opened.get_slice(name) for name in opened.keys() if not name.startswith(PAD_PREFIX)}  # noqa: SIM118
        assert {name: tuple(s.get_shape()) for name, s in found.items()} == wanted
    own = read_header(file)
    assert own.data_start == len(header)
    absolute = {name: g.offset + slot.offset for g in groups for name, slot in g.tensors.items()}
    assert {name: own.entries[name].start for name in wanted} == absolute
