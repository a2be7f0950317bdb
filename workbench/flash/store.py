"""A flash store, opened: where everything lies, checked before anything is decoded.

The format is specified in docs/store-format.md.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import StoreError
from workbench.flash import manifest as manifests
from workbench.flash.layout import ALIGNMENT, PAD_PREFIX, PART_NAMES, Group, RecordLayout, TensorSlot
from workbench.flash.manifest import BUNDLED, MANIFEST, RESIDENT, SPLIT, WEIGHT_FILES
from workbench.spec import ITEMSIZE, ModelSpec
from workbench.tensorfile import DTYPES, TensorFileError, read_header

Progress = Callable[[str, int, int], None]
"""Called as progress(what, bytes done, bytes in all)."""
NUMPY_DTYPES: dict[str, type[np.generic]] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Storage dtypes in numpy; bfloat16 as its bits."""
CHUNK_BYTES = 4 << 20
_VOCABULARIES = {"tokenizer.json", "vocab.json", "tokenizer.model"}
_REMEDY = "convert the model again"


@dataclass(frozen=True)
class Store:
    """A model on flash. Make one with `Store.open`; nothing of the weights is read by it.

    `groups`: the resident part in the order 'embed', 'layer.0' .. 'layer.L-1', 'head'. `layout`: strides in bytes.
    `manifest`: store.json as it is.
    """

    path: Path
    spec: ModelSpec
    dtype: str
    layout: RecordLayout
    groups: tuple[Group, ...]
    manifest: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open a store directory.

        Raises StoreError, naming file and remedy, when it is no store, of another version, when a file is missing
        or has another size than store.json says, or when the resident header does not fit store.json.
        """
        root = Path(path)
        if not root.is_dir():
            raise StoreError(f"{root}: no such directory; make a store with `workbench convert MODEL {root}`")
        manifest = manifests.load(root)
        file = root / MANIFEST
        spec, dtype, layout = manifests.parse_spec(file, manifest)
        manifests.check_tables(file, manifest, spec, layout)
        for name, entry in {**manifest["files"], **_tokenizer_table(manifest)}.items():
            check_size(root / name, entry["nbytes"], MANIFEST, _REMEDY)
        return cls(root, spec, dtype, layout, _groups(root, manifest, spec, dtype), manifest)

    @property
    def resident_path(self) -> Path:
        """All but the FFN matrices, a safetensors file."""
        return self.path / RESIDENT

    @property
    def bundled_path(self) -> Path:
        """The FFN matrices, one record a neuron."""
        return self.path / BUNDLED

    @property
    def split_path(self) -> Path:
        """The FFN matrices, up (gate) rows and down columns apart."""
        return self.path / SPLIT

    @property
    def tokenizer_path(self) -> Path | None:
        """The directory that holds the tokenizer's files, or None when the checkpoint had none."""
        held = _VOCABULARIES & self.manifest["tokenizer"].keys()
        return self.path / "tokenizer" if held else None

    def bundled_offset(self, layer: int) -> int:
        """First byte of a layer's region in ffn.bundled; record i is `i * layout.bundle_stride` further."""
        return self._layer(layer) * self.layout.bundled_region(self.spec.d_ff)

    def split_offset(self, layer: int, part: int) -> int:
        """First byte of a part's region in ffn.split (0 up, 1 down, 2 gate); row i is `i * layout.row_stride` on."""
        if not 0 <= part < self.spec.parts:
            raise IndexError(f"part {part} of {self.spec.parts}")
        return (self._layer(layer) * self.spec.parts + part) * self.layout.split_region(self.spec.d_ff)

    def rows(self, layer: int, part: int) -> np.ndarray:
        """One part of a layer's FFN, mapped and not read: [d_ff, d_model] in the storage dtype (bfloat16 as uint16).

        Row i belongs to neuron i: its up row, its down column (fc2.weight.T), or its gate row. StoreError when the file
        has gone or is shorter than it was.
        """
        item = ITEMSIZE[self.dtype]
        shape = (self.spec.d_ff, self.layout.row_stride // item)
        offset = self.split_offset(layer, part)
        try:
            mapped = np.memmap(self.split_path, NUMPY_DTYPES[self.dtype], mode="r", offset=offset, shape=shape)
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is shorter than its manifest says"
            raise StoreError(f"{self.split_path}: cannot be read ({what}); copy or convert the store again") from None
        return mapped[:, : self.spec.d_model]

    def activated_rows(self, layer: int) -> np.ndarray:
        """The rows whose product decides which neurons fire, [d_ff, d_model], mapped and not read: the gate's in a
        gated FFN, else the up projection."""
        return self.rows(layer, 2 if self.spec.gated else 0)

    def group(self, name: str) -> Group:
        """The resident group of that name. KeyError when there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    @property
    def model_bytes(self) -> int:
        """Bytes of all weights: resident and FFN, without padding."""
        resident = sum(slot.nbytes for group in self.groups for slot in group.tensors.values())
        return resident + self.spec.ffn_bytes(self.dtype)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the weight files' table: identifies model and dtype."""
        return manifests.model_digest(self.manifest["files"])

    @property
    def model_digest(self) -> str:
        """The same as `digest`."""
        return self.digest

    @property
    def source_digest(self) -> str:
        """Digest of the checkpoint that the store was made from; the same for every storage dtype."""
        return self.manifest["source"]["digest"]

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.spec.num_layers:
            raise IndexError(f"layer {layer} of {self.spec.num_layers}")
        return layer


def _tokenizer_table(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"tokenizer/{name}": entry for name, entry in manifest["tokenizer"].items()}


def check_size(file: Path, wanted: int, says: str, remedy: str) -> None:
    """StoreError when the file has not the bytes that the table named `says` gives it; it ends in `remedy`."""
    try:
        got = os.stat(file).st_size
    except FileNotFoundError as error:
        raise StoreError(f"{file}: missing; {remedy}") from error
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror})") from error
    if got != wanted:
        what = "truncated" if got < wanted else "too long"
        raise StoreError(f"{file}: {what}: {got} bytes, {says} says {wanted}; {remedy}")


def _groups(root: Path, manifest: dict[str, Any], spec: ModelSpec, dtype: str) -> tuple[Group, ...]:
    """The resident groups, from store.json's ranges and the file's own header, each checked against the other."""
    file = root / RESIDENT
    try:
        header = read_header(file)
    except TensorFileError as error:
        raise StoreError(f"{file}: offset 0: {error}; {_REMEDY}") from error
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror})") from error
    if header.data_start != manifest["header_bytes"] or header.sha256 != manifest["header_sha256"]:
        raise StoreError(f"{file}: offset 0: the header is not the one {MANIFEST} has the digest of; {_REMEDY}")
    names = [entry["name"] for entry in manifest["groups"]]
    if names != ["embed", *(f"layer.{i}" for i in range(spec.num_layers)), "head"]:
        raise StoreError(f"{root / MANIFEST}: groups are not embed, layer.0 .. layer.{spec.num_layers - 1}, head")
    position, groups, unread = header.data_start, [], list(header.entries.items())
    for entry in manifest["groups"]:
        if entry["offset"] != position or entry["offset"] % ALIGNMENT or entry["nbytes"] % ALIGNMENT:
            raise StoreError(f"{root / MANIFEST}: group {entry['name']} is at a wrong offset; {_REMEDY}")
        position += entry["nbytes"]
        groups.append(Group(entry["name"], entry["offset"], entry["nbytes"], _take(file, unread, entry, dtype)))
    if position != header.file_bytes or unread:
        raise StoreError(f"{root / MANIFEST}: groups do not cover {RESIDENT}; {_REMEDY}")
    _check_same_layers(file, groups)
    return tuple(groups)


def _take(file: Path, unread: list[tuple[str, Any]], group: dict[str, Any], dtype: str) -> dict[str, TensorSlot]:
    """Move the tensors that end within `group` from `unread` (in the order of their bytes)."""
    end, tensors = group["offset"] + group["nbytes"], {}
    while unread and unread[0][1].start + unread[0][1].nbytes <= end:
        name, entry = unread.pop(0)
        if name.startswith(PAD_PREFIX):
            continue
        if entry.start < group["offset"]:
            raise StoreError(f"{file}: offset {entry.start}: {name} lies across two groups; {_REMEDY}")
        if DTYPES.get(entry.code) != dtype:
            raise StoreError(f"{file}: offset {entry.start}: {name} is {entry.code}, the store is {dtype}; {_REMEDY}")
        tensors[name] = TensorSlot(dtype, entry.shape, entry.start - group["offset"])
    return tensors


def _check_same_layers(file: Path, groups: list[Group]) -> None:
    inner = [(g.nbytes, [(s.shape, s.offset) for s in g.tensors.values()]) for g in groups[1:-1]]
    for group, found in zip(groups[1:-1], inner, strict=True):
        if found != inner[0]:
            raise StoreError(f"{file}: offset {group.offset}: {group.name} is not laid out as layer.0 is; {_REMEDY}")


@dataclass(frozen=True)
class Region:
    """A digested byte range of a weight file; `what` names it in messages."""

    file: str
    what: str
    offset: int
    nbytes: int
    sha256: str


def regions(manifest: dict[str, Any]) -> list[Region]:
    """All digested regions, file by file in the order of their bytes; together they cover each file."""
    found = [Region(RESIDENT, "header", 0, manifest["header_bytes"], manifest["header_sha256"])]
    for entry in manifest["groups"]:
        found.append(Region(RESIDENT, f"group {entry['name']}", entry["offset"], entry["nbytes"], entry["sha256"]))
    for layer, entry in enumerate(manifest["layers"]):
        bundled = entry["bundled"]
        found.append(Region(BUNDLED, f"layer {layer}", bundled["offset"], bundled["nbytes"], bundled["sha256"]))
    for layer, entry in enumerate(manifest["layers"]):
        for part, split in enumerate(entry["split"]):
            what = f"layer {layer} {PART_NAMES[part]}"
            found.append(Region(SPLIT, what, split["offset"], split["nbytes"], split["sha256"]))
    return found


def verify(path: str | Path, progress: Progress | None = None) -> None:
    """Check a store whole: what `Store.open` checks, then every region's and file's SHA-256, and its placement's.

    StoreError names the file, the layer, the region's first byte and the remedy. `progress(file, bytes, bytes)`.
    """
    from workbench.flash import placement  # which needs Store

    store = Store.open(path)
    table = regions(store.manifest)
    total = sum(region.nbytes for region in table) + sum(e["nbytes"] for e in store.manifest["tokenizer"].values())
    placed = placement.read_placement(store).nbytes if placement.is_placed(store) else 0
    total += placed
    done = 0
    for name in WEIGHT_FILES:
        whole = hashlib.sha256()
        with _opened(store.path / name) as fd:
            for region in (r for r in table if r.file == name):
                got = digest_region(fd, store.path / name, region.offset, region.nbytes, whole)
                done += region.nbytes
                if got != region.sha256:
                    raise StoreError(
                        f"{store.path / name}: {region.what}, offset {region.offset}, {region.nbytes} bytes: "
                        f"damaged (the SHA-256 is not the one in {MANIFEST}); {_REMEDY}"
                    )
                if progress:
                    progress(name, done, total)
        if whole.hexdigest() != store.manifest["files"][name]["sha256"]:
            raise StoreError(f"{store.path / MANIFEST}: SHA-256 of {name} does not fit its regions; {_REMEDY}")
    for name, entry in _tokenizer_table(store.manifest).items():
        with _opened(store.path / name) as fd:
            got = digest_region(fd, store.path / name, 0, entry["nbytes"], hashlib.sha256())
        if got != entry["sha256"]:
            raise StoreError(f"{store.path / name}: offset 0: damaged (another SHA-256); {_REMEDY}")
        done += entry["nbytes"]
        if progress:
            progress(name, done, total)
    if placed:
        placement.verify_placement(store, progress, done, total)
        if progress:
            progress(placement.ORDER, total, total)


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        yield fd
    finally:
        os.close(fd)


def digest_region(fd: int, file: Path, offset: int, nbytes: int, whole: Any) -> str:
    """SHA-256 (hex) of a byte range, read in chunks; the bytes also go into the file's hash `whole`."""
    own, buffer = hashlib.sha256(), memoryview(bytearray(min(nbytes, CHUNK_BYTES)))
    position, end = offset, offset + nbytes
    while position < end:
        try:
            got = os.preadv(fd, [buffer[: end - position]], position)
        except OSError as error:
            raise StoreError(f"{file}: offset {position}: cannot be read ({error.strerror}); {_REMEDY}") from error
        if got <= 0:
            raise StoreError(f"{file}: offset {position}: {end - position} bytes are missing; {_REMEDY}")
        own.update(buffer[:got])
        whole.update(buffer[:got])
        position += got
    return own.hexdigest()
