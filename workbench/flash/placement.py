"""A placement: a store's bundled records once more, in an order that puts those side by side which are loaded together.

Three files of the store's directory, `ffn.placed`, `ffn.order` and `placement.json`, of which the last is written last
and alone makes the store a placed one. docs/store-format.md specifies them. Which order is good is not decided here:
`workbench.analysis.placement` finds orders, `workbench.experiments.place` joins the two.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import StoreError
from workbench.flash.journal import locked, naming_write_errors, sync_directory, write_synced
from workbench.flash.manifest import SELF, Fields, check_seal, seal
from workbench.flash.store import Progress, Store, check_size, digest_region
from workbench.flash.write import write_at
from workbench.spec import format_bytes

PLACED, ORDER, CARD = "ffn.placed", "ffn.order", "placement.json"
FORMAT, VERSION = "flash-workbench placement", 1
UNFINISHED = ".new"
BLOCK_BYTES = 4 << 20
_REMEDY = "run `workbench place` again, or delete placement.json"
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Placement:
    """A store's placement, checked when it was read.

    order: int32 [layers, d_ff], the neuron at each position. card: placement.json as it is; its `provenance` says what
    the order was fitted on, and how.
    """

    path: Path
    order: NDArray[np.int32]
    card: dict[str, Any] = field(repr=False)

    @property
    def placed_path(self) -> Path:
        """The records in placed order; regions and strides are those of ffn.bundled."""
        return self.path / PLACED

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Where each neuron lies: int64 [layers, d_ff]."""
        inverse = np.empty(self.order.shape, np.int64)
        np.put_along_axis(inverse, self.order.astype(np.int64), np.arange(self.order.shape[1])[None, :], axis=1)
        return inverse

    @property
    def digest(self) -> str:
        """Identifies the placement: the SHA-256 that placement.json has of itself."""
        return str(self.card[SELF])

    @property
    def nbytes(self) -> int:
        """Bytes of its two data files."""
        return sum(entry["nbytes"] for entry in self.card["files"].values())


def is_placed(store: Store) -> bool:
    """Whether the store has a placement, sound or not."""
    return (store.path / CARD).exists()


def read_placement(store: Store) -> Placement:
    """The store's placement. StoreError, one line, when it has none, or one that is damaged, of another version, or of
    another store; `verify_placement` also reads the records."""
    file = store.path / CARD
    try:
        text = file.read_bytes()
    except FileNotFoundError as error:
        raise StoreError(
            f"{store.path}: not placed (no {CARD}); run `workbench place MODEL {store.path} --data D`, or leave "
            "placement off"
        ) from error
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        value = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise StoreError(f"{file}: not JSON; {_REMEDY}") from error
    _check_card(store, file, text, value)
    for name, entry in value["files"].items():
        check_size(store.path / name, entry["nbytes"], CARD, _REMEDY)
    return Placement(store.path, _read_order(store, value), value)


def _check_card(store: Store, file: Path, text: bytes, value: Any) -> None:
    card = Fields(file, value, remedy=_REMEDY)
    if card.get("format", str) != FORMAT:
        raise StoreError(f"{file}: not a placement's; {_REMEDY}")
    if (version := card.get("version", int)) != VERSION:
        remedy = "install a newer workbench" if version > VERSION else _REMEDY
        raise StoreError(f"{file}: format version {version}, this workbench reads version {VERSION}; {remedy}")
    check_seal(file, text, card.digest(SELF), _REMEDY)
    if card.digest("store") != store.digest:
        raise StoreError(f"{file}: of another store (digest {value['store'][:12]}, not {store.digest[:12]}); {_REMEDY}")
    card.get("provenance", dict)
    sizes, files = _sizes(store), card.inner("files")
    for name, size in sizes.items():
        files.inner(name).ranged("nbytes")
        if files.value[name]["nbytes"] != size:
            raise StoreError(f"{file}: files.{name} has {files.value[name]['nbytes']} bytes, not {size}; {_REMEDY}")
    if files.value.keys() != sizes.keys():
        raise StoreError(f"{file}: files has {sorted(files.value.keys() - sizes.keys())[0]!r} too; {_REMEDY}")
    for layer, entry in enumerate(card.items("layers", store.spec.num_layers)):
        entry.digest()
        wanted = {"offset": store.bundled_offset(layer), "nbytes": store.layout.bundled_region(store.spec.d_ff)}
        if {key: entry.value.get(key) for key in wanted} != wanted:
            raise StoreError(f"{file}: layers[{layer}] does not fit the layout; {_REMEDY}")


def _sizes(store: Store) -> dict[str, int]:
    spec = store.spec
    return {PLACED: spec.num_layers * store.layout.bundled_region(spec.d_ff), ORDER: spec.num_layers * spec.d_ff * 4}


def _read_order(store: Store, card: dict[str, Any]) -> NDArray[np.int32]:
    """ffn.order, whose digest and whose layers, each a permutation, are checked here: it is small and decides which
    weights a neuron gets."""
    file = store.path / ORDER
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror}); {_REMEDY}") from error
    if hashlib.sha256(content).hexdigest() != card["files"][ORDER]["sha256"]:
        raise StoreError(f"{file}: damaged (the SHA-256 is not the one in {CARD}); {_REMEDY}")
    order = np.frombuffer(content, "<i4").reshape(store.spec.num_layers, store.spec.d_ff)
    _check_order(store, order, file)
    return order.astype(np.int32)


def _check_order(store: Store, order: NDArray[np.integer], where: object) -> None:
    shape = (store.spec.num_layers, store.spec.d_ff)
    if order.shape != shape or order.dtype.kind not in "iu":
        raise StoreError(f"{where}: order is {order.dtype} {list(order.shape)}, not whole numbers {list(shape)}")
    wrong = np.flatnonzero((np.sort(order, axis=1) != np.arange(shape[1])).any(axis=1))
    if len(wrong):
        raise StoreError(f"{where}: layer {wrong[0]} is not each neuron once; {_REMEDY}")


def check_present(placement: Placement) -> None:
    """StoreError when the placement on flash is another one by now: its file must not be read by the former order."""
    file = placement.path / CARD
    try:
        same = json.loads(file.read_bytes()).get(SELF) == placement.digest
    except (OSError, ValueError, AttributeError):
        same = False
    if not same:
        raise StoreError(f"{file}: changed since the store was opened; open it again")


def write_placement(
    store: Store, order: NDArray[np.integer], provenance: dict[str, Any], progress: Progress | None = None
) -> Placement:
    """Write the bundled records in `order` [layers, d_ff] (the neuron at each position) into the store, and read it.

    One layer is held at a time. The files grow under names that end in `.new`; a former placement goes when they are
    whole, and placement.json, which makes the store a placed one, comes last: interrupted or killed at any point, the
    store is as it was, without a placement, or with the new one, and the same call may be made again. Records are
    checked against ffn.bundled's digests as they are copied. `provenance` (JSON) is kept in placement.json.

    progress(part, bytes done, bytes in all). StoreError: not a permutation, no space, cannot be written, ffn.bundled
    damaged, another run writes here.
    """
    _check_order(store, order, f"{store.path}: placement")
    permutations = np.ascontiguousarray(order, "<i4")
    new = {name: store.path / (name + UNFINISHED) for name in (PLACED, ORDER)}
    with naming_write_errors(store.path), locked(store.path, "run is writing a placement"):
        _check_space(store, new[PLACED])
        try:
            card = {
                "format": FORMAT,
                "version": VERSION,
                "store": store.digest,
                **_write_files(store, permutations, new, progress),
                "provenance": provenance,
            }
            (store.path / CARD).unlink(missing_ok=True)
            sync_directory(store.path)
            for name, file in new.items():
                os.replace(file, store.path / name)
            write_synced(store.path / CARD, seal(card))
        except BaseException:
            for file in new.values():
                file.unlink(missing_ok=True)
            raise
    return read_placement(store)


def _check_space(store: Store, file: Path) -> None:
    present = file.stat().st_blocks * 512 if file.is_file() else 0
    needed = sum(_sizes(store).values()) - present + _MARGIN_BYTES
    free = shutil.disk_usage(store.path).free
    if needed > free:
        raise StoreError(
            f"{store.path}: {format_bytes(needed)} ({needed} bytes) needed for {PLACED}, {format_bytes(free)} free; "
            "free space"
        )


def _write_files(store: Store, order: NDArray[Any], new: dict[str, Path], progress: Progress | None) -> dict[str, Any]:
    """Write both data files and sync them; the tables `layers` and `files` of placement.json."""
    region = store.layout.bundled_region(store.spec.d_ff)
    whole, layers = hashlib.sha256(), []
    with open(store.bundled_path, "rb", buffering=0) as source, open(new[PLACED], "wb+", buffering=0) as target:
        os.truncate(target.fileno(), _sizes(store)[PLACED])
        for layer, permutation in enumerate(order):
            offset = store.bundled_offset(layer)
            _write_layer(store, layer, permutation, source.fileno(), target.fileno())
            os.fsync(target.fileno())
            layers.append({
                "offset": offset,
                "nbytes": region,
                "sha256": digest_region(target.fileno(), new[PLACED], offset, region, whole),
            })  # fmt: skip
            for fd in (source.fileno(), target.fileno()):  # cached pages would cost DRAM and slow direct reads
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, offset, region, os.POSIX_FADV_DONTNEED)
            if progress:
                progress(f"layer {layer}", (layer + 1) * region, len(order) * region)
    content = order.tobytes()
    with open(new[ORDER], "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    files = {PLACED: (_sizes(store)[PLACED], whole), ORDER: (len(content), hashlib.sha256(content))}
    return {
        "layers": layers,
        "files": {name: {"nbytes": size, "sha256": digest.hexdigest()} for name, (size, digest) in files.items()},
    }


def _write_layer(store: Store, layer: int, permutation: NDArray[Any], source: int, target: int) -> None:
    """Copy one layer's records in their new order. What is behind the last record stays zero, as in ffn.bundled."""
    stride, count = store.layout.bundle_stride, store.spec.d_ff
    offset, region = store.bundled_offset(layer), store.layout.bundled_region(count)
    held = np.empty(region, np.uint8)
    view, done = held.data, 0
    while done < region:
        got = os.preadv(source, [view[done:]], offset + done)
        if got <= 0:
            raise StoreError(
                f"{store.bundled_path}: offset {offset + done}: bytes are missing; convert the model again"
            )
        done += got
    if hashlib.sha256(view).hexdigest() != store.manifest["layers"][layer]["bundled"]["sha256"]:
        raise StoreError(
            f"{store.bundled_path}: layer {layer}, offset {offset}: damaged (another SHA-256 than store.json's); "
            "convert the model again"
        )
    records = held[: count * stride].reshape(count, stride)
    step = max(1, BLOCK_BYTES // stride)
    for first in range(0, count, step):
        block = np.ascontiguousarray(records[permutation[first : first + step]])
        write_at(target, block.reshape(-1).data, offset + first * stride)


def verify_placement(store: Store, progress: Progress | None = None, begun: int = 0, total: int = 0) -> None:
    """Check a placement whole: what `read_placement` checks, every digest of ffn.placed, and that each record is the
    one that ffn.bundled has of the same neuron. progress(file, begun + bytes, total). StoreError names layer and byte.
    """
    placement = read_placement(store)
    region, stride, count = store.layout.bundled_region(store.spec.d_ff), store.layout.bundle_stride, store.spec.d_ff
    whole = hashlib.sha256()
    with open(placement.placed_path, "rb", buffering=0) as placed:
        for layer, entry in enumerate(placement.card["layers"]):
            where = f"{placement.placed_path}: layer {layer}, offset {entry['offset']}"
            got = digest_region(placed.fileno(), placement.placed_path, entry["offset"], region, whole)
            if got != entry["sha256"]:
                raise StoreError(f"{where}, {region} bytes: damaged (the SHA-256 is not the one in {CARD}); {_REMEDY}")
            shape = (count, stride)
            one, other = (
                np.memmap(path, np.uint8, mode="r", offset=entry["offset"], shape=shape)
                for path in (placement.placed_path, store.bundled_path)
            )
            step = max(1, BLOCK_BYTES // stride)
            for first in range(0, count, step):
                ids = placement.order[layer, first : first + step]
                if not np.array_equal(one[first : first + step], other[ids]):
                    raise StoreError(f"{where}: records from position {first} on are not ffn.bundled's; {_REMEDY}")
            if progress:
                progress(PLACED, begun + entry["offset"] + region, total)
    if whole.hexdigest() != placement.card["files"][PLACED]["sha256"]:
        raise StoreError(f"{store.path / CARD}: SHA-256 of {PLACED} does not fit its layers; {_REMEDY}")
