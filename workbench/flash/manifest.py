"""store.json: what it says, and the checks that stand between a damaged one and the reader."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from workbench.errors import StoreError
from workbench.flash.layout import PART_NAMES, RecordLayout
from workbench.spec import ITEMSIZE, ModelSpec

FORMAT = "flash-workbench store"
VERSION = 2
MANIFEST = "store.json"
SELF = "self_sha256"
REMEDY = "convert the model again"
RESIDENT, BUNDLED, SPLIT = "resident.safetensors", "ffn.bundled", "ffn.split"
WEIGHT_FILES = (RESIDENT, BUNDLED, SPLIT)
_SPEC_FIELDS = {field.name: field.type for field in fields(ModelSpec)}


def canonical(value: object) -> bytes:
    """JSON with sorted keys and no spaces: the same value always gives the same bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def model_digest(files: dict[str, dict[str, Any]]) -> str:
    """SHA-256 (hex) over the names, sizes and digests of the three weight files."""
    return hashlib.sha256(canonical({name: files[name] for name in WEIGHT_FILES})).hexdigest()


def file_sizes(spec: ModelSpec, layout: RecordLayout, resident_bytes: int) -> dict[str, int]:
    """Bytes of each weight file; those of the resident one are given."""
    return {
        RESIDENT: resident_bytes,
        BUNDLED: spec.num_layers * layout.bundled_region(spec.d_ff),
        SPLIT: spec.num_layers * spec.parts * layout.split_region(spec.d_ff),
    }


def layer_regions(spec: ModelSpec, layout: RecordLayout, layer: int) -> dict[str, Any]:
    """Offsets and sizes of one layer's regions, as store.json lists them (without digests)."""
    bundled, split = layout.bundled_region(spec.d_ff), layout.split_region(spec.d_ff)
    return {
        "bundled": {"offset": layer * bundled, "nbytes": bundled},
        "split": [
            {"part": PART_NAMES[part], "offset": (layer * spec.parts + part) * split, "nbytes": split}
            for part in range(spec.parts)
        ],
    }


def seal(manifest: dict[str, Any]) -> bytes:
    """store.json as bytes, its own SHA-256 included: that of the same bytes with 64 zeros in the digest's place."""
    blank = json.dumps({**manifest, SELF: "0" * 64}, indent=1).encode() + b"\n"
    digest = hashlib.sha256(blank).hexdigest().encode()
    head, key, tail = blank.rpartition(f'"{SELF}": "'.encode())
    return head + key + digest + tail[64:]


def check_seal(file: Path, raw: bytes, digest: str, remedy: str = REMEDY) -> None:
    """StoreError unless `raw`, the file's bytes, are those that `seal` gave the digest of."""
    head, key, tail = raw.rpartition(digest.encode())
    if not key or hashlib.sha256(head + b"0" * 64 + tail).hexdigest() != digest:
        raise StoreError(f"{file}: damaged (another SHA-256 than its own field {SELF} says); {remedy}")


def build(spec: ModelSpec, dtype: str, layout: RecordLayout, **tables: Any) -> dict[str, Any]:
    """A manifest; `tables` are header_bytes, header_sha256, groups, layers, files, tokenizer and source."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": spec.as_dict(),
        "dtype": dtype,
        "layout": asdict(layout),
        **tables,
    }


class Fields:
    """Typed look-ups in a JSON object; StoreError names the file and the field that is missing or wrong."""

    def __init__(self, path: Path, value: Any, where: str = "", remedy: str = REMEDY) -> None:
        if not isinstance(value, dict):
            raise StoreError(f"{path}: {where or 'the file'} is not a JSON object; {remedy}")
        self.path, self.value, self.where, self.remedy = path, value, where, remedy

    def get(self, key: str, kind: type) -> Any:
        """The field `key`, of type `kind` (an int is no bool and not negative)."""
        name = f"{self.where}.{key}" if self.where else key
        if key not in self.value:
            raise StoreError(f"{self.path}: field {name} is missing; {self.remedy}")
        found = self.value[key]
        if type(found) is not kind or (kind is int and found < 0):
            raise StoreError(f"{self.path}: field {name} is {str(found)[:40]!r}, not {kind.__name__}; {self.remedy}")
        return found

    def inner(self, key: str) -> Fields:
        """The field `key`, an object."""
        return Fields(self.path, self.get(key, dict), f"{self.where}.{key}" if self.where else key, self.remedy)

    def items(self, key: str, count: int | None = None) -> list[Fields]:
        """The field `key`, a list of objects (`count` of them, where given)."""
        found = self.get(key, list)
        if count is not None and len(found) != count:
            raise StoreError(f"{self.path}: field {key} has {len(found)} entries, not {count}; {self.remedy}")
        names = (f"{self.where}.{key}[{i}]".lstrip(".") for i in range(len(found)))
        return [Fields(self.path, item, name, self.remedy) for item, name in zip(found, names, strict=True)]

    def digest(self, key: str = "sha256") -> str:
        """The field `key`, a SHA-256 in lower-case hex."""
        found = self.get(key, str)
        if len(found) != 64 or set(found) - set("0123456789abcdef"):
            raise StoreError(f"{self.path}: field {self.where}.{key} is not a SHA-256; {self.remedy}")
        return found

    def ranged(self, *numbers: str) -> None:
        """The fields `numbers` are whole numbers and there is a SHA-256."""
        for key in numbers:
            self.get(key, int)
        self.digest()


def load(path: Path) -> dict[str, Any]:
    """The manifest of a store directory, with format, version and its own digest checked. StoreError."""
    file = path / MANIFEST
    try:
        text = file.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(f"{path}: no {MANIFEST}, so not a flash store; make one with `workbench convert`") from error
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        value = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise StoreError(f"{file}: not JSON; convert the model again") from error
    manifest = Fields(file, value)
    if manifest.get("format", str) != FORMAT:
        raise StoreError(f"{file}: not a flash store's; make one with `workbench convert`")
    version = manifest.get("version", int)
    if version != VERSION:
        remedy = "install a newer workbench" if version > VERSION else "convert the model again"
        raise StoreError(f"{file}: format version {version}, this workbench reads version {VERSION}; {remedy}")
    check_seal(file, text, manifest.digest(SELF))
    return manifest.value


def parse_spec(file: Path, manifest: dict[str, Any]) -> tuple[ModelSpec, str, RecordLayout]:
    """Model spec, dtype and record layout; the layout must be the one that spec and dtype give. StoreError."""
    top = Fields(file, manifest)
    model, kinds = top.inner("model"), {"str": str, "int": int, "dict[str, Any]": dict, "tuple[float, ...]": list}
    values = {name: model.get(name, kinds[str(kind)]) for name, kind in _SPEC_FIELDS.items()}
    spec = ModelSpec(**{**values, "thresholds": tuple(values["thresholds"])})
    for name in ("num_layers", "d_model", "d_ff", "vocab_size", "max_positions"):
        if getattr(spec, name) < 1:
            raise StoreError(f"{file}: field model.{name} is {getattr(spec, name)}; convert the model again")
    if spec.parts not in (2, 3):
        raise StoreError(f"{file}: field model.parts is {spec.parts}, not 2 or 3; convert the model again")
    if len(spec.thresholds) not in (0, spec.num_layers) or not all(type(t) is float for t in spec.thresholds):
        raise StoreError(f"{file}: field model.thresholds is not a number for each layer; convert the model again")
    dtype = top.get("dtype", str)
    if dtype not in ITEMSIZE:
        raise StoreError(f"{file}: field dtype is {dtype!r}, not one of {', '.join(ITEMSIZE)}; convert the model again")
    layout = RecordLayout.of(spec, dtype)
    if top.get("layout", dict) != asdict(layout):
        raise StoreError(f"{file}: field layout does not fit model and dtype; convert the model again")
    return spec, dtype, layout


def check_tables(file: Path, manifest: dict[str, Any], spec: ModelSpec, layout: RecordLayout) -> None:
    """Every table of digests is there, whole, and at the offsets that the layout gives. StoreError."""
    top = Fields(file, manifest)
    for name in WEIGHT_FILES:
        top.inner("files").inner(name).ranged("nbytes")
    resident = manifest["files"][RESIDENT]["nbytes"]
    for name, size in file_sizes(spec, layout, resident).items():
        if manifest["files"][name]["nbytes"] != size:
            raise StoreError(f"{file}: files.{name} has {manifest['files'][name]['nbytes']} bytes, the layout {size}")
    for layer, entry in enumerate(top.items("layers", spec.num_layers)):
        wanted = layer_regions(spec, layout, layer)
        pairs = [(entry.inner("bundled"), wanted["bundled"])]
        pairs += list(zip(entry.items("split", spec.parts), wanted["split"], strict=True))
        for found, region in pairs:
            found.digest()
            if {key: found.value.get(key) for key in region} != region:
                raise StoreError(f"{file}: {found.where} does not fit the layout; convert the model again")
    for entry in top.items("groups"):
        entry.get("name", str)
        entry.ranged("offset", "nbytes")
    for name in top.get("tokenizer", dict):
        if Path(name).name != name:
            raise StoreError(f"{file}: tokenizer file {name!r} is not a plain file name; convert the model again")
        top.inner("tokenizer").inner(name).ranged("nbytes")
    source = top.inner("source")
    for key in ("name", "dtype"):
        source.get(key, str)
    source.digest("digest")
    top.get("header_bytes", int)
    top.digest("header_sha256")
