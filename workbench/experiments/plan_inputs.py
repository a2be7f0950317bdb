"""What a plan starts from: a model of which only the config is there, and how many neurons its tokens use."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from workbench import assets
from workbench.errors import CheckpointError, RecordError
from workbench.experiments.cost import FlashFit, FlashPoint, Reuse
from workbench.experiments.record import geometry, model_name
from workbench.flash.layout import Group, RecordLayout, plan_resident
from workbench.flash.manifest import MANIFEST
from workbench.flash.store import Store
from workbench.models import family, family_of
from workbench.models.fields import MOST_LAYERS
from workbench.models.hub import no_retry_lines
from workbench.predictor.config import PredictorSpec
from workbench.predictor.low_rank import Predictors
from workbench.spec import DType, ModelSpec

CONFIG = "config.json"
PAPER = "data/reference/llm_in_a_flash.toml"
MOST_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class Outline:
    """A model's geometry and where its bytes would lie in a store of `dtype`, without the weights. `path`: what
    messages call it; `groups` as a store has them."""

    name: str
    path: Path
    spec: ModelSpec
    dtype: DType
    layout: RecordLayout
    groups: tuple[Group, ...]

    @classmethod
    def of(cls, name: str, path: Path, spec: ModelSpec, dtype: DType) -> Outline:
        """As `convert` would lay it out. CheckpointError when it has more layers than any model has."""
        if spec.num_layers > MOST_LAYERS:
            raise CheckpointError(
                f"{path}: num_hidden_layers is {spec.num_layers}, more than {MOST_LAYERS}; take the model's own config"
            )
        module = family(spec.model_type)
        matrices = {n for layer in range(spec.num_layers) for n in module.ffn_names(spec, layer).matrices}
        order = ["embed", *(f"layer.{i}" for i in range(spec.num_layers)), "head"]
        grouped: dict[str, dict[str, tuple[int, ...]]] = {group: {} for group in order}
        for tensor, shape in module.tensor_shapes(spec).items():
            if tensor not in matrices:
                grouped[module.group_of(tensor)][tensor] = shape
        groups = plan_resident(list(grouped.items()), dtype)[1]
        return cls(name, path, spec, dtype, RecordLayout.of(spec, dtype), groups)

    @property
    def model_bytes(self) -> int:
        """Bytes of all weights, without padding."""
        resident = sum(slot.nbytes for group in self.groups for slot in group.tensors.values())
        return resident + self.spec.ffn_bytes(self.dtype)

    @property
    def linear_bytes(self) -> int:
        """Bytes of resident matrices that each token reads: all but the embeddings, of which a tied head is one."""
        sizes = {name: slot.nbytes for group in self.groups for name, slot in group.tensors.items()}
        embed = next(group for group in self.groups if group.name == "embed")
        tied = set(family(self.spec.model_type).tied(self.spec).values())
        return sum(nbytes for name, nbytes in sizes.items() if name not in embed.tensors or name in tied)


def outline(model: str | Path, dtype: DType | None = None) -> Outline:
    """The model that a path or a hub id names: a checkpoint directory, a store, a config.json, or an id of which the
    config alone is downloaded. dtype: of the store that would be made; the model's own when None.

    CheckpointError, one line, when there is none or no config, or the family is not supported. A model whose
    activation is not ReLU is planned as its ReLU version.
    """
    path = Path(model)
    if (path / MANIFEST).is_file():
        store = Store.open(path)
        return Outline.of(model_name(store), path, store.spec, dtype or _stored(store.dtype))
    file, name = _config_file(model, path)
    config = _read(file)
    spec = family_of(config).spec(config, force=True)
    own = config.get("dtype", config.get("torch_dtype"))
    return Outline.of(name, file, spec, dtype or (_stored(own) if own in get_args(DType) else "float32"))


def _stored(name: Any) -> DType:
    return next(dtype for dtype in get_args(DType) if dtype == name)


def _config_file(model: str | Path, path: Path) -> tuple[Path, str]:
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path}: no {CONFIG}, so nothing to plan for; give the directory that holds it")
        return path / CONFIG, path.absolute().name
    if path.is_file():
        return path, path.absolute().parent.name if path.name == CONFIG else path.stem
    text = str(model)
    if text.count("/") > 1 or text.endswith(".json") or text.startswith((".", "/", "~")) or not text:
        raise CheckpointError(f"{model}: no such file or directory; give a checkpoint, a store, a {CONFIG} or a hub id")
    return _download(text), text


def _download(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        with no_retry_lines():
            return Path(hf_hub_download(model, CONFIG))
    except Exception as error:  # the hub's client and its transport raise classes of their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{model}: no such directory, and the Hugging Face hub did not give its {CONFIG} ({reason}); "
            f"check the name and the network, or give a {CONFIG}"
        ) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MOST_CONFIG_BYTES:
            raise CheckpointError(f"{file}: too large for a {CONFIG}; give the model's own")
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON; give the model's own {CONFIG}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file}: no model_type, so not a model's {CONFIG}; give the model's own")
    if "quantization_config" in config:
        raise CheckpointError(f"{file}: the weights are quantized; plan for the float32, float16 or bfloat16 model")
    return config


@dataclass(frozen=True)
class Use:
    """How many neurons a token uses, as shares of a layer, by layer; what a window of them keeps; the predictors'
    bytes, largest rank and dtype. `nbytes` and `card` are what a DRAM plan asks. `assumed`: what is not of this model,
    whole sentences."""

    predicted: tuple[float, ...]
    active: tuple[float, ...]
    reuse: Reuse
    nbytes: int
    rank: int
    stored: str
    card: dict[str, Any]
    assumed: tuple[str, ...]


def use_of(model: Outline, predictors: Predictors | None = None, reuse: str | Path | None = None) -> Use:
    """From predictors and a reuse or window record of the model where they are given, else from the paper's figures.

    PredictorError when the predictors are another model's, RecordError when the record is, or is no such record.
    """
    spec, paper, assumed = model.spec, _paper(), []
    curve, active = published_reuse(paper), (1 - paper["sparsity"]["OPT-6.7B"],) * spec.num_layers
    if reuse is None:
        assumed.append("What a window keeps and a token adds: the paper's figures for OPT-6.7B.")
    else:
        curve, found = read_reuse_curve(reuse, spec)
        active = found or active
    if predictors is not None:
        predictors.check(spec)
        entries = predictors.card["layers"]
        predicted = tuple(_share(entry["predicted"], spec.d_ff) for entry in entries)
        active = tuple(_share(entry["active"], spec.d_ff) for entry in entries)
        first = predictors.layers[0]
        return Use(predicted, active, curve, predictors.nbytes, max(layer.rank for layer in predictors.layers),
                   first.stored, {"layers": entries}, tuple(assumed))  # fmt: skip
    published = next(point["new_share"] for point in paper["reuse"] if point["window"] == 0)
    over = published / (1 - paper["sparsity"]["OPT-6.7B"])
    predicted = tuple(min(0.99, over * share) for share in active)
    measured = "of the paper's OPT-6.7B" if reuse is None else f"{over:.1f} for each active one, as the paper's"
    assumed.append(f"Neurons predicted: {sum(predicted) / len(predicted):.0%} of each token's, {measured}.")
    training = PredictorSpec().resolved(spec)
    ranks = training.ranks(spec.num_layers)
    nbytes = sum(rank * training.rank_cost(spec.d_model, spec.d_ff) + 8 * spec.d_ff for rank in ranks)
    assumed.append(f"Predictors: {training.store_dtype}, of the ranks that train-predictors takes.")
    card = {"layers": [{"predicted": share * spec.d_ff} for share in predicted]}
    return Use(predicted, active, curve, nbytes, max(ranks), training.store_dtype, card, tuple(assumed))


def _share(count: float, d_ff: int) -> float:
    return min(max(float(count) / d_ff, 1e-6), 1.0)


def _paper() -> dict[str, Any]:
    return tomllib.loads(assets.path(PAPER).read_text(encoding="utf-8"))


def published_reuse(paper: dict[str, Any] | None = None) -> Reuse:
    """The paper's section 3.2: 10% of the FFN are predicted; a window of 4 keeps 24%, and a token then adds 2.4%."""
    points = (paper or _paper())["reuse"]
    used = next(p["new_share"] for p in points if p["window"] == 0)
    known = tuple((p["window"], p.get("kept_share", p["new_share"]), p["new_share"]) for p in points)
    return Reuse("the paper, OPT-6.7B", used, known)


def read_record(path: str | Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """A record of one of these kinds. RecordError, one line, when it is none."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: could not be read ({error.strerror}); pass the path of a record") from error
    except ValueError as error:
        raise RecordError(f"{path}: is not a whole JSON record ({error}); write the record again") from error
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in kinds:
        raise RecordError(f"{path}: is a record of kind {kind!r}, not {' or '.join(kinds)}; pass the file that fits")
    return record


def read_flash_fit(path: str | Path) -> FlashFit:
    """The fit of a record of `bench flash`, of its first reader engine. RecordError when it is none."""
    record = read_record(path, ("bench_flash",))
    try:
        engine = record["rows"][0]["engine"]
        points = tuple(
            FlashPoint(int(row["threads"]), int(row["chunk_bytes"]), 1 / float(row["reads_per_s"]))
            for row in record["rows"]
            if row["engine"] == engine
        )
        return FlashFit(f"{path}, {record['machine']['disk']}", engine, points)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RecordError(f"{path}: damaged ({error!r}); measure it again with `workbench bench flash`") from error


def read_reuse_curve(path: str | Path, spec: ModelSpec) -> tuple[Reuse, tuple[float, ...]]:
    """The curve of a record of `analyze reuse` (true activations) or `analyze window` (an engine's own counts, of
    windows that fitted), and the active share of each layer. RecordError for another model's."""
    record = read_record(path, ("reuse", "window"))
    try:
        if record["run"]["geometry"] != geometry(spec):
            raise RecordError(
                f"{path}: is of {record['run']['model']}, a model of another geometry; measure this one, or leave "
                f"--reuse out"
            )
        rows = _window_rows(record, spec) if record["kind"] == "window" else _reuse_rows(record)
        if record["kind"] == "window":
            first = record["rows"][0]["measured"]
            used = float(first["predicted"]) / spec.ffn_neurons
            active = (float(first["active"]) / spec.ffn_neurons,) * spec.num_layers
        else:
            used = next(kept for window, kept, _ in rows if window == 0)
            layers = [row["kept_share"] for row in record.get("by_layer", ()) if row["window"] == 0]
            active = tuple(max(1e-6, share) for share in layers or [used] * spec.num_layers)
        return Reuse(f"{path}, {record['run']['model']}", used, rows), active
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        raise RecordError(
            f"{path}: has no usable curve ({error!r}); measure it again with `workbench analyze`"
        ) from error


def _reuse_rows(record: dict[str, Any]) -> tuple[tuple[int, float, float], ...]:
    return tuple(sorted((int(r["window"]), float(r["kept_share"]), float(r["new_share"])) for r in record["rows"]))


def _window_rows(record: dict[str, Any], spec: ModelSpec) -> tuple[tuple[int, float, float], ...]:
    neurons = spec.ffn_neurons
    whole = [row for row in record["rows"] if not row["measured"]["window_trims"]]
    return tuple(
        (int(r["window"]), float(r["measured"]["in_window"]) / neurons, float(r["measured"]["loaded"]) / neurons)
        for r in whole
    )
