"""`workbench synth`: a flash store of random weights at a true geometry, sparse and persistent as published.

The store is written straight, layer by layer, as `convert` writes one; the dense checkpoint, in Hugging Face's layout,
only where it is asked for. Nothing is trained: the generator's own factors are the predictors. What is known of a
layer once it is calibrated lies in PREDICTORS.partial, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from workbench.errors import CheckpointError, PredictorError, SpecError, StoreError
from workbench.experiments.geometries import geometry as named
from workbench.experiments.record import SCHEMA, machine, run_info
from workbench.experiments.synth_checkpoint import DenseCheckpoint, tokenizer_of
from workbench.experiments.synth_model import (
    FROM,
    PUBLISHED,
    TO,
    WINDOW,
    Generator,
    LayerFacts,
    Request,
)
from workbench.experiments.synth_probe import Probe
from workbench.flash.convert import write_store
from workbench.flash.journal import locked, naming_write_errors, write_synced
from workbench.flash.layout import RecordLayout, plan_resident
from workbench.flash.manifest import WEIGHT_FILES, canonical, file_sizes
from workbench.flash.store import Progress, Store
from workbench.models import family_of
from workbench.predictor.card import SCHEMA as CARD_SCHEMA
from workbench.predictor.config import ITEMSIZE as FACTOR_BYTES
from workbench.predictor.config import StoreDType
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import Predictors
from workbench.spec import ITEMSIZE, DType, ModelSpec, format_bytes
from workbench.training.versions import versions

STATE, TOKENIZER = "state.safetensors", "tokenizer"
ORIGIN = "factors of the generator"
SHARES = ("active_share", "predicted_share", "false_negative", "new_share", "kept_share")
_MARGIN_BYTES = 16 << 20
"""Kept free beyond the weights, for cards, calibration and the file system's own blocks."""
Told = Callable[[int, dict[str, float]], None]
"""Called with a layer and its row of the record, once it is calibrated."""


@dataclass(frozen=True)
class Synthesis:
    """What was made: the store, its predictors, and the record of what was measured, by layer."""

    store: Store
    predictors: Predictors
    record: dict[str, Any]


def synth(
    geometry: str | Path | dict[str, Any],
    out: str | Path,
    *,
    predictors: str | Path | None = None,
    checkpoint: str | Path | None = None,
    dtype: DType = "bfloat16",
    seed: int = 0,
    active: float = 0.03,
    predicted: float = PUBLISHED["predicted"],
    activation: str | None = None,
    predictor_dtype: StoreDType = "int8",
    progress: Progress | None = None,
    tell: Told | None = None,
) -> Synthesis:
    """Write a store of random weights at `out`, its predictors at `predictors` (OUT-predictors), and open them.

    geometry: a name of `geometries.GEOMETRIES`, a config.json, or its content. checkpoint: also write the dense model
    here, with the very weights of the store. dtype: of all weights. active, predicted: shares of the FFN, means over
    the layers. activation: 'relu' or 'relu2' in place of the config's. predictor_dtype: of the predictors' factors.
    progress(part, bytes done, bytes in all).

    Memory is bounded by a layer, or by the embedding where a checkpoint is written. Interrupted or killed, the same
    call resumes; where all is there, it is only opened. Raises SpecError (geometry, shares), CheckpointError (a config
    that cannot be run), StoreError (no space, found before anything is written; `out` is something else; cannot be
    written) or PredictorError (`predictors` is something else).
    """
    request = request_of(geometry, dtype, seed, active, predicted, activation, predictor_dtype)
    store_path = _with_name(out)
    pred_path = _with_name(predictors) if predictors else store_path.with_name(store_path.name + "-predictors")
    dense_path = _with_name(checkpoint) if checkpoint else None
    places = [path.resolve() for path in (store_path, pred_path, dense_path) if path]
    if len(set(places)) < len(places):
        raise StoreError(f"{out}: store, predictors and checkpoint are to be at different places; choose other names")
    started = time.perf_counter()
    dense = DenseCheckpoint(dense_path, request) if dense_path else None
    existing = _check_places(request, store_path, pred_path, dense)
    work = pred_path.with_name(pred_path.name + ".partial")
    with naming_write_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    try:
        with locked(work, "synthesis is writing"), Generator(request) as generator:
            source = SyntheticSource(generator, work, dense, tell)
            store = write_store(source, store_path, dtype, progress)
            if dense:
                dense.finish(generator, source.tensors)
            if existing is None:
                digest = fingerprint(store.activated_rows(n) for n in range(store.spec.num_layers))
                _save_predictors(generator, source.facts(), digest, pred_path)
    except BaseException:
        if not any(work.iterdir()):
            work.rmdir()
        raise
    shutil.rmtree(work)
    trained = existing or Predictors.load(pred_path)
    return Synthesis(store, trained, _record(request, store, trained, time.perf_counter() - started))


def _with_name(path: str | Path) -> Path:
    """The path, absolute where it has no name of its own, such as '.'."""
    return Path(path) if Path(path).name not in ("", "..") else Path(path).resolve()


def request_of(
    geometry: str | Path | dict[str, Any],
    dtype: DType = "bfloat16",
    seed: int = 0,
    active: float = 0.03,
    predicted: float = PUBLISHED["predicted"],
    activation: str | None = None,
    predictor_dtype: StoreDType = "int8",
) -> Request:
    """What `synth` makes of its arguments. SpecError or CheckpointError as there."""
    name, config = ("custom", dict(geometry)) if isinstance(geometry, dict) else named(geometry)
    if dtype not in ITEMSIZE:
        raise SpecError(f"dtype {dtype!r} is not one of {', '.join(ITEMSIZE)}")
    if predictor_dtype not in get_args(StoreDType):
        raise SpecError(f"predictor_dtype {predictor_dtype!r} is not one of {', '.join(get_args(StoreDType))}")
    family = family_of(config)
    if activation is not None:
        if activation not in ("relu", "relu2"):
            raise SpecError(f"activation {activation!r}: choose relu or relu2")
        config[family.ACTIVATION_FIELD] = activation
    config |= {"synthetic": True, "dtype": dtype}
    config.pop("torch_dtype", None)
    try:
        spec = family.spec(config)
    except CheckpointError as error:
        if "is not ReLU" not in str(error):
            raise
        raise SpecError(
            f"{name}: its config's activation leaves no neuron at zero; give --activation relu or relu2 in its place"
        ) from None
    return Request(name, spec, dtype, seed, active, predicted, predictor_dtype)


class SyntheticSource:
    """A `WeightSource` whose weights are made when they are read; `work` holds what resuming needs."""

    def __init__(
        self, generator: Generator, work: Path, dense: DenseCheckpoint | None = None, tell: Told | None = None
    ) -> None:
        self.generator, self.request, self.spec = generator, generator.request, generator.spec
        self._work, self._dense, self._tell = work, dense, tell
        self._facts, hidden = self._resume()
        self._probe: Probe | None = None
        self._hidden = hidden
        self._layer: tuple[int, dict[str, torch.Tensor]] | None = None
        for layer, facts in enumerate(self._facts):
            self._say(layer, facts)

    @property
    def dtype(self) -> str:
        """Of all weights."""
        return self.request.dtype

    @property
    def groups(self) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
        """The resident tensors' shapes, by group."""
        return resident_groups(self.spec)

    def ffn(self, layer: int) -> tuple[str, ...]:
        """Names of a layer's FFN matrices by part."""
        return self.generator.ffn(layer).matrices

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor. A layer is made whole, calibrated if it is new, and held until the next."""
        layer = self.generator.family.layer_of(name)
        if layer is None:
            return self.generator.outside(name, start, stop)
        return self.tensors(layer)[name][start:stop]

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """All tensors of a layer."""
        if self._layer is None or self._layer[0] != layer:
            self._layer = None  # before the next is made, so that there is one at a time
            if layer < len(self._facts):
                self._layer = (layer, self.generator.layer(layer, self._facts[layer]))
            else:
                while len(self._facts) <= layer:
                    self._calibrate()
            assert self._layer is not None
            if self._dense:
                self._dense.write(layer + 1, self._layer[1])
        return self._layer[1]

    def facts(self) -> list[LayerFacts]:
        """The calibration of every layer; those that no one has read yet are calibrated now."""
        while len(self._facts) < self.spec.num_layers:
            self._calibrate()
        return self._facts

    def _calibrate(self) -> None:
        if self._probe is None:
            self._probe = Probe(self.generator, self._hidden)
        layer = len(self._facts)
        self._layer = None
        facts, tensors = self._probe.run(layer)
        state = {"request": self.request.as_dict(), "layers": [asdict(f) for f in [*self._facts, facts]]}
        with naming_write_errors(self._work):
            write_synced(self._work / STATE, save({"hidden": self._probe.hidden}, {"state": json.dumps(state)}))
        self._facts.append(facts)
        self._layer = (layer, tensors)
        self._say(layer, facts)

    def _say(self, layer: int, facts: LayerFacts) -> None:
        if self._tell:
            self._tell(layer, _shares(self.spec, {**facts.quality, **facts.used}))

    def _resume(self) -> tuple[list[LayerFacts], torch.Tensor | None]:
        file, remedy = self._work / STATE, f"delete {self._work} to start anew, or choose another name"
        if not file.exists():
            return [], None
        try:
            with safe_open(file, framework="pt") as opened:
                state = json.loads((opened.metadata() or {})["state"])
                hidden = opened.get_tensor("hidden")
            found = [LayerFacts(**entry) for entry in state["layers"]]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{file}: damaged, so it cannot be resumed; {remedy}") from error
        # What was written as JSON is compared with what would be: tuples and numbers look alike then.
        if state["request"] != json.loads(json.dumps(self.request.as_dict())):
            raise StoreError(f"{self._work}: an unfinished synthesis of another request; {remedy}")
        return found, hidden

    def where(self, name: str) -> str:
        """For messages."""
        return f"{self.request.name} (synthetic)"

    def source(self) -> dict[str, Any]:
        """Name and fingerprint: the request decides every weight."""
        digest = hashlib.sha256(canonical(self.request.of_weights())).hexdigest()
        return {"name": self.request.name, "dtype": self.dtype, "digest": digest, "synthetic": True}

    def modified(self) -> dict[str, int]:
        """Nothing that could change between two runs."""
        return {}

    def tokenizer_files(self) -> list[Path]:
        """The demo model's tokenizer, fitted to the vocabulary, so that text can be read and shown."""
        files = tokenizer_of(self.spec)
        if files:
            files["config.json"] = json.dumps(self.spec.config, indent=1)
        folder = self._work / TOKENIZER
        with naming_write_errors(self._work):
            folder.mkdir(exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
        return [folder / name for name in files]


def resident_groups(spec: ModelSpec) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
    """Shapes of all tensors but the FFN's matrices, by group, in the store's order."""
    family = family_of(spec.config)
    matrices = {name for layer in range(spec.num_layers) for name in family.ffn_names(spec, layer).matrices}
    grouped: dict[str, dict[str, tuple[int, ...]]] = {
        name: {} for name in ("embed", *(f"layer.{n}" for n in range(spec.num_layers)), "head")
    }
    for name, shape in family.tensor_shapes(spec).items():
        if name not in matrices:
            grouped[family.group_of(name)][name] = shape
    return list(grouped.items())


def _check_places(request: Request, store: Path, predictors: Path, dense: DenseCheckpoint | None) -> Predictors | None:
    """Refuses what would fail later: names that are taken, too little space. The predictors, where they are there."""
    existing, spec = None, request.spec
    if os.path.lexists(predictors):
        existing = Predictors.load(predictors)
        known = {"predictor_dtype": existing.card.get("store_dtype"), **existing.card.get("request", {})}
        if known != json.loads(json.dumps(request.as_dict())):
            raise PredictorError(f"{predictors}: already holds other predictors; choose another name, or delete it")
    ready = dense.check() if dense else True
    layout = RecordLayout.of(spec, request.dtype)
    resident = plan_resident(resident_groups(spec), request.dtype)[1][-1]
    wanted: list[tuple[Path, int]] = []
    if not (store / "store.json").exists():
        partial = store.with_name(store.name + ".partial")
        present = sum((partial / n).stat().st_blocks * 512 for n in WEIGHT_FILES if (partial / n).is_file())
        wanted.append((store, sum(file_sizes(spec, layout, resident.offset + resident.nbytes).values()) - present))
    if existing is None:
        ranks = sum(request.rank(n) for n in range(spec.num_layers))
        factors = FACTOR_BYTES[request.predictor_dtype] * ranks * (spec.d_model + spec.d_ff)
        wanted.append((predictors, factors + 8 * spec.ffn_neurons))  # biases, and scales
    if dense and not ready:
        wanted.append((dense.target, dense.nbytes - dense.present()))
    _check_space(wanted)
    return existing


def _check_space(wanted: list[tuple[Path, int]]) -> None:
    """StoreError when a file system has less than what is to be written on it."""
    by_device: dict[int, tuple[Path, int]] = {}
    for path, nbytes in wanted:
        folder = next(p for p in (path.resolve().parent, *path.resolve().parent.parents) if p.exists())
        place, total = by_device.get(os.stat(folder).st_dev, (folder, _MARGIN_BYTES))
        by_device[os.stat(folder).st_dev] = (place, total + nbytes)
    for folder, needed in by_device.values():
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise StoreError(
                f"{folder}: {format_bytes(needed)} ({needed} bytes) needed, {format_bytes(free)} ({free} bytes) free; "
                f"free space or choose another place"
            )


def _shares(spec: ModelSpec, measured: Mapping[str, float]) -> dict[str, float]:
    """A layer's row of the record, from what its card has."""
    return {
        "active_share": measured["active"] / spec.d_ff,
        "predicted_share": measured["predicted"] / spec.d_ff,
        **{name: measured[name] for name in ("false_negative", "new_share", "kept_share")},
    }


def _save_predictors(generator: Generator, facts: list[LayerFacts], digest: str, out: Path) -> None:
    """The factors as predictors of the store, with a card that says what they are."""
    request, spec = generator.request, generator.spec
    layers = [generator.predictor(n, entry) for n, entry in enumerate(facts)]
    sizes = [layer.a.size + layer.b.size for layer in layers]
    ffn = spec.parts * spec.d_ff * spec.d_model
    tokens = TO - FROM
    card = {
        "schema": CARD_SCHEMA,
        "synthetic": True,
        "origin": f"{ORIGIN} (workbench synth): random weights, nothing was trained; thresholds are set so that about "
        f"{request.predicted:.0%} of the neurons are predicted, {request.predicted / request.active:.1f} times those "
        f"that fire",
        "model": {
            "name": f"{request.name} (synthetic)", "num_layers": spec.num_layers, "d_model": spec.d_model,
            "d_ff": spec.d_ff, "parts": spec.parts,
        },
        "input": "ffn",
        "spec": {"loss": "no", "init": ORIGIN, "learning_rate": 0.0, "validation_share": 1.0, "seed": request.seed},
        "request": request.as_dict(),
        "data": {
            "train": {"source": f"none, {ORIGIN}", "documents": 0, "tokens": 0, "sha256": "none"},
            "calibrate": {"source": "random tokens", "tokens": tokens},
            "test": {"source": "random tokens, another stream", "tokens": tokens},
            "rounds": 0,
        },
        "seed": request.seed,
        "versions": versions(),
        "store_dtype": layers[0].stored,
        "nbytes": sum(layer.nbytes for layer in layers),
        "weight_share": sum(sizes) / (ffn * spec.num_layers),
        "tokens_trained": 0,
        "steps": 0,
        "batch_tokens": 0,
        "loss_curve": {"step": [], "loss": []},
        "layers": [
            {
                "rank": layer.rank, "threshold": layer.threshold, **entry.quality, "weight_share": size / ffn,
                **entry.used, "frontier": [],
            }
            for layer, entry, size in zip(layers, facts, sizes, strict=True)
        ],
    }  # fmt: skip
    Predictors(layers, card, digest).save(out)


def _record(request: Request, store: Store, predictors: Predictors, seconds: float) -> dict[str, Any]:
    measured = predictors.card["layers"]
    rows = [{"layer": layer, **_shares(store.spec, entry)} for layer, entry in enumerate(measured)]
    info = run_info(
        request.name, store.spec, store.dtype, tokens=TO - FROM, io="none", window=WINDOW, seed=request.seed
    )
    written = sum(entry["nbytes"] for entry in store.manifest["files"].values())
    return {
        "schema": SCHEMA,
        "kind": "synth",
        "machine": machine(store.path),
        "run": info,
        "asked": {"active_share": request.active, "predicted_share": request.predicted},
        "rows": rows,
        "mean": {name: statistics.fmean(row[name] for row in rows) for name in SHARES},
        "model_bytes": store.model_bytes,
        "store_bytes": written,
        "predictor_bytes": predictors.nbytes,
        "seconds": seconds,
    }
