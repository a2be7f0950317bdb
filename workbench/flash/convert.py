"""Write a store from a source of weights, layer by layer, and resume where an interrupted run stopped.

This layer knows no architecture: it takes a `WeightSource`, which `workbench.models.weights.Weights` is;
`workbench.experiments.convert.convert` joins the two. docs/store-format.md specifies the result.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError, StoreError
from workbench.flash import manifest as manifests
from workbench.flash.journal import JOURNAL, Journal, locked, naming_write_errors, sync_directory, write_synced
from workbench.flash.layout import Group, RecordLayout, plan_resident
from workbench.flash.manifest import BUNDLED, MANIFEST, RESIDENT, SPLIT, WEIGHT_FILES
from workbench.flash.source import WeightSource
from workbench.flash.store import Progress, Store, digest_region
from workbench.flash.write import LayerWriter, write_at, write_group
from workbench.spec import ITEMSIZE, DType, ModelSpec, format_bytes

_MARGIN_BYTES = 1 << 20
"""Kept free beyond the weight files, for store.json, the tokenizer and the file system's own blocks."""


@dataclass(frozen=True)
class _Plan:
    """All that is known before the first weight is read."""

    spec: ModelSpec
    dtype: str
    layout: RecordLayout
    header: bytes
    groups: tuple[Group, ...]
    sizes: dict[str, int]
    source: dict[str, Any]

    @classmethod
    def of(cls, weights: WeightSource, dtype: str) -> _Plan:
        spec, layout = weights.spec, RecordLayout.of(weights.spec, dtype)
        header, groups = plan_resident(weights.groups, dtype)
        sizes = manifests.file_sizes(spec, layout, groups[-1].offset + groups[-1].nbytes)
        return cls(spec, dtype, layout, header, groups, sizes, weights.source())

    def request(self, weights: WeightSource) -> dict[str, Any]:
        """What a resumed run must have in common with the one before."""
        return {
            "version": manifests.VERSION,
            "source": self.source,
            "modified": weights.modified(),
            "dtype": self.dtype,
            "model": self.spec.as_dict(),
            "sizes": self.sizes,
        }


def write_store(
    weights: WeightSource, out: str | Path, dtype: DType | None = None, progress: Progress | None = None
) -> Store:
    """Write the store of `weights` at `out` and open it.

    The store grows under the name `OUT.partial` and is renamed when complete. A partial store of the same weights
    and dtype is resumed; of others it is refused. A complete store of the same weights and dtype at `out` is returned
    as it is; anything else there, an empty directory apart, is left alone and refused.

    dtype: stored as the weights are when None. progress(part, bytes done, bytes in all).
    Raises StoreError (refused, no space, cannot be written), CheckpointError (NaN or infinity, overflow in `dtype`;
    nothing is left behind). Interrupted or killed at any point, the same call resumes with an identical result.
    """
    target, place = Path(out), Path(os.path.realpath(out))
    if dtype is not None and dtype not in ITEMSIZE:
        raise StoreError(f"{target}: cannot store as {dtype!r}; choose one of {', '.join(ITEMSIZE)}")
    plan = _Plan.of(weights, dtype or weights.dtype)
    partial = place.with_name(place.name + ".partial")
    with naming_write_errors(target):
        if (ready := _existing(target, plan)) is not None:
            return ready
        partial.parent.mkdir(parents=True, exist_ok=True)
        _check_space(partial, plan)
        partial.mkdir(exist_ok=True)
        with locked(partial, "conversion is writing"):
            try:
                _Conversion(weights, plan, partial, progress).run()
            except CheckpointError:
                shutil.rmtree(partial)  # these weights can never become a store
                raise
            _publish(partial, place)
    return Store.open(target)


def _existing(target: Path, plan: _Plan) -> Store | None:
    """The store at `target` when it is the one asked for; None when the name is free. StoreError otherwise."""
    if not os.path.lexists(target):
        return None
    if not target.is_dir():
        raise StoreError(f"{target}: exists and is not a directory; choose another name")
    if not (target / MANIFEST).exists():
        if any(target.iterdir()):
            raise StoreError(f"{target}: exists and is not a flash store; choose another name")
        return None
    store = Store.open(target)
    source = store.manifest["source"]
    if source["digest"] != plan.source["digest"] or store.dtype != plan.dtype or store.spec != plan.spec:
        raise StoreError(
            f"{target}: already holds a store of {source['name']} as {store.dtype}; choose another name, or delete it"
        )
    if (target / JOURNAL).exists():  # left when the run was killed just after the renaming
        (target / JOURNAL).unlink()
    return store


def _check_space(partial: Path, plan: _Plan) -> None:
    present = sum((partial / name).stat().st_blocks * 512 for name in WEIGHT_FILES if (partial / name).is_file())
    needed = sum(plan.sizes.values()) - present + _MARGIN_BYTES
    free = shutil.disk_usage(partial.parent).free
    if needed > free:
        raise StoreError(
            f"{partial.parent}: {format_bytes(needed)} ({needed} bytes) needed, {format_bytes(free)} ({free} bytes) "
            f"free; free space or choose another place"
        )


def _publish(partial: Path, place: Path) -> None:
    """The complete store gets its name; from here on it is a store."""
    try:
        os.rename(partial, place)
    except OSError as error:
        raise StoreError(f"{place}: appeared while the store was written; move it away and convert again") from error
    sync_directory(place.parent)
    (place / JOURNAL).unlink(missing_ok=True)
    sync_directory(place)


class _Conversion:
    """One run: writes the parts that the journal does not have, digests all, and completes the manifest."""

    def __init__(self, weights: WeightSource, plan: _Plan, partial: Path, progress: Progress | None) -> None:
        self._weights, self._plan, self._partial = weights, plan, partial
        self._progress, self._done, self._total = progress, 0, sum(plan.sizes.values())
        self._journal = Journal(partial, plan.request(weights))
        self._fds: dict[str, int] = {}
        self._whole = {name: hashlib.sha256() for name in WEIGHT_FILES}

    def run(self) -> None:
        self._journal.resume()
        plan = self._plan
        with ExitStack() as closing:
            for name in WEIGHT_FILES:
                self._fds[name] = os.open(self._partial / name, os.O_RDWR | os.O_CREAT, 0o644)
                closing.callback(os.close, self._fds[name])
                os.ftruncate(self._fds[name], plan.sizes[name])
            sync_directory(self._partial)
            write_at(self._fds[RESIDENT], plan.header, 0)
            self._whole[RESIDENT].update(plan.header)
            self._advance("header", len(plan.header))
            for group in plan.groups:
                self._part(group)
            self._sync()
        self._complete()

    def _part(self, group: Group) -> None:
        """One group and, for a decoder layer, its FFN: verified when the journal has it, written when not."""
        known = self._journal.done.get(group.name)
        if known is not None:
            before = {name: whole.copy() for name, whole in self._whole.items()}
            if self._digest(group) == known:
                self._advance(group.name, sum(size for _, _, size in self._ranges(group)))
                return
            self._whole = before
            self._journal.forget(group.name)
        self._write(group)
        self._sync()
        self._journal.enter(group.name, self._digest(group))

    def _write(self, group: Group) -> None:
        plan, written = self._plan, self._written(group.name)
        write_group(self._fds[RESIDENT], self._weights, group, plan.dtype, written)
        layer = _layer(group)
        if layer is not None:
            regions = manifests.layer_regions(plan.spec, plan.layout, layer)
            writer = LayerWriter(plan.spec, plan.layout, plan.dtype, self._fds[BUNDLED], self._fds[SPLIT])
            split = [entry["offset"] for entry in regions["split"]]
            writer.write(self._weights, layer, regions["bundled"]["offset"], split, written)

    def _ranges(self, group: Group) -> list[tuple[str, int, int]]:
        """File, offset and bytes of everything that belongs to a part."""
        found, layer = [(RESIDENT, group.offset, group.nbytes)], _layer(group)
        if layer is not None:
            regions = manifests.layer_regions(self._plan.spec, self._plan.layout, layer)
            found.append((BUNDLED, regions["bundled"]["offset"], regions["bundled"]["nbytes"]))
            found += [(SPLIT, entry["offset"], entry["nbytes"]) for entry in regions["split"]]
        return found

    def _digest(self, group: Group) -> dict[str, Any]:
        """Digests of a part as it is on flash, read back; also feeds the whole files' hashes."""
        found: dict[str, Any] = {RESIDENT: [], BUNDLED: [], SPLIT: []}
        for name, offset, nbytes in self._ranges(group):
            fd = self._fds[name]
            found[name].append(digest_region(fd, self._partial / name, offset, nbytes, self._whole[name]))
            if hasattr(os, "posix_fadvise"):  # cached pages would make later direct reads slow, and cost DRAM
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return found

    def _sync(self) -> None:
        for fd in self._fds.values():
            os.fsync(fd)

    def _complete(self) -> None:
        """Everything but the name: tokenizer and store.json."""
        plan, done = self._plan, self._journal.done
        manifest = manifests.build(
            plan.spec,
            plan.dtype,
            plan.layout,
            header_bytes=len(plan.header),
            header_sha256=hashlib.sha256(plan.header).hexdigest(),
            groups=[
                {"name": g.name, "offset": g.offset, "nbytes": g.nbytes, "sha256": done[g.name][RESIDENT][0]}
                for g in plan.groups
            ],
            layers=[self._layer_entry(layer) for layer in range(plan.spec.num_layers)],
            files={
                name: {"nbytes": plan.sizes[name], "sha256": self._whole[name].hexdigest()} for name in WEIGHT_FILES
            },
            tokenizer=self._copy_tokenizer(),
            source=plan.source,
        )
        write_synced(self._partial / MANIFEST, manifests.seal(manifest))

    def _layer_entry(self, layer: int) -> dict[str, Any]:
        regions = manifests.layer_regions(self._plan.spec, self._plan.layout, layer)
        digests = self._journal.done[f"layer.{layer}"]
        for region, digest in zip(
            [regions["bundled"], *regions["split"]], [*digests[BUNDLED], *digests[SPLIT]], strict=True
        ):
            region["sha256"] = digest
        return regions

    def _copy_tokenizer(self) -> dict[str, dict[str, Any]]:
        files, table = self._weights.tokenizer_files(), {}
        shutil.rmtree(self._partial / "tokenizer", ignore_errors=True)
        if files:
            (self._partial / "tokenizer").mkdir()
        for file in sorted(files):
            content = file.read_bytes()
            write_synced(self._partial / "tokenizer" / file.name, content)
            table[file.name] = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return table

    def _written(self, part: str) -> Callable[[int], None]:
        return lambda nbytes: self._advance(part, nbytes)

    def _advance(self, part: str, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(part, self._done, self._total)


def _layer(group: Group) -> int | None:
    return int(group.name.removeprefix("layer.")) if group.name.startswith("layer.") else None
