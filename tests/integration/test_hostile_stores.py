"""Damaged, truncated and lying stores: StoreError, one line, that names the file, the place and what to do."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import StoreError
from workbench.experiments.convert import convert, verify
from workbench.flash.manifest import seal
from workbench.flash.store import Store, regions

Change = Callable[[dict[str, Any]], Any]
WEIGHTS = ("resident.safetensors", "ffn.bundled", "ffn.split")


@pytest.fixture(scope="module")
def whole(tiny_opt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole store. Do not change it."""
    return convert(tiny_opt, tmp_path_factory.mktemp("stores") / "whole").path


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "store"))


def refused(action: Callable[[Path], object], store: Path, match: str) -> None:
    with pytest.raises(StoreError, match=match) as caught:
        action(store)
    assert "\n" not in str(caught.value)


def edit(store: Path, change: Change) -> None:
    file = store / "store.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_bytes(seal(manifest))


def test_not_a_store(tmp_path: Path) -> None:
    refused(Store.open, tmp_path / "absent", "no such directory; make a store with `workbench convert")
    refused(Store.open, tmp_path, r"no store\.json, so not a flash store")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_manifest_that_is_not_one(store: Path, content: bytes) -> None:
    (store / "store.json").write_bytes(content)
    refused(Store.open, store, r"store\.json: (not JSON|the file is not a JSON object|field format is missing)")


def test_versions(store: Path) -> None:
    edit(store, lambda m: m.update(version=3))
    refused(Store.open, store, "format version 3, this workbench reads version 2; install a newer workbench")
    edit(store, lambda m: m.update(version=0))
    refused(Store.open, store, "format version 0.*convert the model again")
    edit(store, lambda m: m.update(version="1"))
    refused(Store.open, store, "field version is '1', not int")
    edit(store, lambda m: m.update(format="zip"))
    refused(Store.open, store, "not a flash store's")


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, apart from the checkpoint's config and the source's own notes."""
    found = [prefix] if prefix else []
    if prefix in {("model", "config"), ("source", "files"), ("tokenizer",)}:
        return found
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += paths(item, (*prefix, key))
    return found


FREE = {("model", "model_type"), ("model", "activation"), ("source", "name"), ("source", "dtype")}
"""Text that the format leaves free: another text there is no fault of the store."""


def test_every_field_missing_or_of_another_type(whole: Path, store: Path) -> None:
    manifest = json.loads((whole / "store.json").read_text())
    places = [place for place in paths(manifest) if place not in {("source", "files"), ("self_sha256",)}]
    assert len(places) > 80
    for place in places:
        for replacement in ("absent", None, [3], {"a": 1}, -1, 1.5, True, "x" * 64):
            if (place in FREE and replacement == "x" * 64) or (place[-1] == "config" and replacement == {"a": 1}):
                continue
            changed = json.loads(json.dumps(manifest))
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            if replacement == "absent":
                del parent[place[-1]]
            else:
                parent[place[-1]] = replacement
            (store / "store.json").write_bytes(seal(changed))
            with pytest.raises(StoreError) as caught:
                verify(store)
            assert "\n" not in str(caught.value), place


def test_any_flipped_bit_of_the_manifest_is_found(store: Path) -> None:
    file, draw = store / "store.json", random.Random(1)
    raw = file.read_bytes()
    for position in draw.sample(range(len(raw)), 300):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(StoreError) as caught:
            Store.open(store)
        assert "\n" not in str(caught.value)


LIES: dict[str, tuple[Change, str]] = {
    "wider": (lambda m: m["model"].update(d_model=128), "field layout does not fit"),
    "more neurons": (lambda m: m["model"].update(d_ff=512), "the layout"),
    "more layers": (lambda m: m["model"].update(num_layers=3), "the layout|layers has 2 entries, not 3"),
    "no layers": (lambda m: m["model"].update(num_layers=0), "num_layers is 0"),
    "gate": (lambda m: m["model"].update(parts=3), "field layout does not fit"),
    "five parts": (lambda m: m["model"].update(parts=5), "parts is 5"),
    "dtype": (lambda m: m.update(dtype="float16"), "field layout does not fit"),
    "unknown dtype": (lambda m: m.update(dtype="int8"), "'int8', not one of float32"),
    "stride": (lambda m: m["layout"].update(bundle_stride=1024), "field layout does not fit"),
    "region": (lambda m: m["layers"][1]["bundled"].update(offset=0), r"layers\[1\]\.bundled does not fit"),
    "parts swapped": (lambda m: m["layers"][1]["split"].reverse(), r"layers\[1\]\.split\[0\] does not fit"),
    "size": (lambda m: m["files"]["resident.safetensors"].update(nbytes=1), "too long"),
    "group": (lambda m: m["groups"][1].update(offset=4096), "group layer.0 is at a wrong offset"),
    "group's size": (lambda m: m["groups"][1].update(nbytes=4096), "layer.1 is at a wrong offset"),
    "groups swapped": (lambda m: m["groups"].reverse(), "groups are not embed"),
    "digest": (lambda m: m["files"]["ffn.split"].update(sha256="0" * 64), "SHA-256 of ffn.split does not fit"),
    "tokenizer": (
        lambda m: m["tokenizer"].update({"../../x": {"nbytes": 1, "sha256": "0" * 64}}),
        "not a plain file name",
    ),
}


@pytest.mark.parametrize(("change", "match"), LIES.values(), ids=LIES)
def test_manifest_that_lies(store: Path, change: Change, match: str) -> None:
    edit(store, change)
    refused(verify, store, match)


@pytest.mark.parametrize("name", WEIGHTS)
def test_missing_truncated_and_long_files(store: Path, name: str) -> None:
    file = store / name
    size = file.stat().st_size
    os.truncate(file, size - 1)
    refused(
        Store.open, store, rf"{name}: truncated: {size - 1} bytes, store\.json says {size}; convert the model again"
    )
    os.truncate(file, size + 1)
    refused(Store.open, store, f"{name}: too long")
    file.unlink()
    refused(Store.open, store, f"{name}: missing; convert the model again")


def test_flipped_bits_are_found_and_named(store: Path) -> None:
    draw = random.Random(0)
    for region in regions(json.loads((store / "store.json").read_text())):
        file = store / region.file
        raw = file.read_bytes()
        for position in {
            region.offset,
            region.offset + region.nbytes - 1,
            region.offset + draw.randrange(region.nbytes),
        }:
            damaged = bytearray(raw)
            damaged[position] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            where = r"offset 0" if region.what == "header" else rf"{region.what}, offset {region.offset}, "
            refused(verify, store, rf"{region.file}: .*{where}")
            file.write_bytes(raw)
    verify(store)


def lie(store: Path, change: Change) -> None:
    """Rewrite the resident header, of the same length, and make store.json agree with it."""
    file = store / "resident.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    raw = raw[:8] + text + raw[8 + length :]
    file.write_bytes(raw)
    edit(store, lambda m: m.update(header_sha256=hashlib.sha256(raw[: 8 + length]).hexdigest()))


def _swap(header: dict[str, Any]) -> None:
    """Two tensors of layer 1 trade places."""
    bias, weight = ("model.decoder.layers.1.fc2.bias", "model.decoder.layers.1.fc1.bias")
    entries = [header[name] for name in (bias, weight)]
    start = min(entry["data_offsets"][0] for entry in entries)
    for entry in entries:
        nbytes = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["data_offsets"] = [start, start + nbytes]
        start += nbytes


def test_resident_header_that_lies(store: Path) -> None:
    file = store / "resident.safetensors"
    raw = file.read_bytes()
    for old, new in ((b"fc1.bias", b"fc9.bias"), (b"[128,64]", b"[64,128]")):
        file.write_bytes(raw.replace(old, new, 1))
        refused(Store.open, store, r"resident\.safetensors: offset 0: the header is not the one")
    file.write_bytes(b"\xff" * 8 + raw[8:])
    refused(Store.open, store, r"resident\.safetensors: offset 0: header error: claims")


HEADER_LIES: dict[str, tuple[Change, str]] = {
    "dtype": (lambda h: h["model.decoder.embed_tokens.weight"].update(dtype="I32"), "embed_tokens.weight is I32"),
    "shape": (
        lambda h: h["model.decoder.embed_tokens.weight"].update(shape=[9, 9]),
        "embed_tokens.weight of 324 bytes",
    ),
    "order": (_swap, "layer.1 is not laid out as layer.0"),
    "not whole": (lambda h: h.pop("model.decoder.embed_tokens.weight"), "starts at"),
}


@pytest.mark.parametrize(("change", "match"), HEADER_LIES.values(), ids=HEADER_LIES)
def test_resident_header_and_manifest_that_lie_together(store: Path, change: Change, match: str) -> None:
    lie(store, change)
    refused(Store.open, store, rf"resident\.safetensors: .*{match}")
