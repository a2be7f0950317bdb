"""Train the predictors of all layers in one pass over the text, resumable, and write them with their card."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.capture.activations import dense, tokenizer
from workbench.capture.text import TokenStream, source_identity, split_of
from workbench.errors import DataError, DeviceError, PredictorError
from workbench.models import family
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights
from workbench.predictor.card import SCHEMA
from workbench.predictor.config import PredictorSpec
from workbench.predictor.evaluate import Scorer, measure, targets, thresholds, time_share
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.predictor.metrics import Counts
from workbench.predictor.trainer import MEMORY_BYTES, Progress, Trainer, choose_micro_windows
from workbench.spec import ModelSpec
from workbench.training.interrupts import Interrupts
from workbench.training.state import CURRENT, PREVIOUS, write_atomic


def train_predictors(
    model: str | Path,
    data: str | Path,
    spec: PredictorSpec | None = None,
    *,
    out: str | Path,
    resume: bool = True,
    progress: Progress | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    memory_bytes: int | None = None,
    checkpoint_seconds: float = 30.0,
) -> Predictors:
    """Train low-rank predictors (paper section 3.1) for every FFN layer of `model` on the text `data`.

    One dense forward without gradients serves all layers. State is kept in OUT.partial, so that a run that was
    killed or interrupted goes on where it was and ends with the identical result; with `resume=False` it is
    discarded. When OUT is there and was trained by the same request, it is returned at once.

    model: checkpoint directory or hub id. data: see `workbench.capture.text`. progress(stage, done, total): tokens.
    device 'cpu' or 'cuda'; dtype of the dense model. memory_bytes bounds the captured activations.

    Raises PredictorError (OUT belongs to another request, cannot be written), DataError, CheckpointError,
    DeviceError; KeyboardInterrupt on Ctrl-C, after the state is saved.
    """
    _check_device(device)
    report = progress or (lambda stage, done, total: None)
    out = Path(out)
    geometry, digest, name = _identify(model)
    spec = (spec or PredictorSpec()).resolved(geometry)
    micro = choose_micro_windows(spec, geometry, memory_bytes or MEMORY_BYTES[device])
    request = {
        "model_digest": digest,
        "spec": dataclasses.asdict(spec),
        "data": source_identity(data),
        "device": device,
        "dtype": dtype,
        "micro_windows": micro,
    }
    partial = out.with_name(out.name + ".partial")
    done = _finished(out, partial, request)
    if done is not None:
        return done
    words = tokenizer(model)
    loaded = dense(model, dtype, device)
    ups = family(geometry.model_type).activated_linears(loaded)
    compute = torch.float32 if device == "cpu" or dtype == "float32" else torch.bfloat16
    with _claimed(partial, request, resume), Interrupts() as interrupts:
        stream = _stream(data, words, spec, "train", loop=True)
        trainer = Trainer(
            loaded, ups, stream, spec, micro_windows=micro, compute=compute, progress=report, interrupts=interrupts
        )
        if not trainer.restore(partial):
            trainer.initialise()
            trainer.save(partial)
        trainer.run(partial, checkpoint_seconds)
        predictors = _finish(trainer, data, words, request, name)
        predictors.save(out)
    shutil.rmtree(partial, ignore_errors=True)
    return Predictors.load(out)


def _check_device(device: str) -> None:
    if device not in MEMORY_BYTES:
        raise DeviceError(f"device {device!r} is not one of {', '.join(MEMORY_BYTES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device cuda: this torch sees no CUDA GPU; install a CUDA build of torch or use --device cpu")


def _identify(model: str | Path) -> tuple[ModelSpec, str, str]:
    """A checkpoint's geometry, fingerprint and name, without loading it whole."""
    path, name = locate(model)
    with Checkpoint(path, name) as checkpoint:
        weights = Weights(checkpoint)
        layers = range(weights.spec.num_layers)
        return weights.spec, fingerprint(weights.read(weights.ffn(layer)[0]) for layer in layers), name


def _stream(data: str | Path, words: Any, spec: PredictorSpec, part: str, loop: bool = False) -> TokenStream:
    share = spec.validation_share
    return TokenStream(data, words, spec.sequence, lambda text: split_of(text, share) == part, loop=loop)


def _finished(out: Path, partial: Path, request: dict[str, Any]) -> Predictors | None:
    """Predictors in OUT if they answer this request; None if there is no OUT."""
    if not out.exists():
        return None
    found = Predictors.load(out)
    if found.card.get("request") != request:
        raise PredictorError(f"{out}: holds predictors of another request; choose another --out or delete it")
    shutil.rmtree(partial, ignore_errors=True)
    return found


@contextmanager
def _claimed(partial: Path, request: dict[str, Any], resume: bool) -> Iterator[None]:
    """OUT.partial for this request and this process alone."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = open(partial / "lock", "w")  # noqa: SIM115 (held until the run ends)
    except OSError as error:
        raise PredictorError(f"{partial}: cannot be written ({error.strerror}); choose another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PredictorError(f"{partial}: another process is training there; choose another --out") from error
        _match_request(partial, request, resume)
        yield


def _match_request(partial: Path, request: dict[str, Any], resume: bool) -> None:
    path = partial / "request.json"
    if not resume or not any((partial / name).exists() for name in (CURRENT, PREVIOUS)):  # nothing is lost
        for file in partial.iterdir():
            if file.name != "lock":
                file.unlink()
    if path.exists():
        try:
            before = json.loads(path.read_text())
        except ValueError:
            before = None  # damaged: nothing can be said to belong to it
        if before != request:
            raise PredictorError(
                f"{partial}: was started with another request; "
                "choose another --out, or --fresh (resume=False) to discard it"
            )
        return
    write_atomic(path, (json.dumps(request, indent=1) + "\n").encode())


def _finish(trainer: Trainer, data: str | Path, words: Any, request: dict[str, Any], name: str) -> Predictors:
    """Set thresholds on one half of the validation text, measure on the other, and make the card."""
    spec, ups = trainer.spec, trainer.ups
    factors = trainer.stored_factors()
    scorer = Scorer(factors)
    rates = targets(spec.false_negative)
    cards = {"train": trainer.stream.card.as_dict()}
    windows: dict[str, list[np.ndarray]] = {}
    for part in ("calibrate", "test"):
        stream = _stream(data, words, spec, part)
        windows[part] = list(islice(stream, max(1, spec.validation_tokens // spec.sequence)))
        if not windows[part]:
            raise DataError(
                f"{data}: fewer than {spec.sequence} tokens of validation text ({part}); give more documents or a "
                "larger validation_share"
            )
        cards[part] = {**stream.card.as_dict(), "tokens": len(windows[part]) * spec.sequence}

    def tick(stage: str, part: str):  # type: ignore[no-untyped-def]
        total = len(windows[part]) * spec.sequence

        def report(done: int) -> None:
            trainer.progress(stage, done, total)
            trainer.interrupts.raise_pending()

        return report

    size = trainer.micro_windows
    batches = {part: [np.stack(w[i : i + size]) for i in range(0, len(w), size)] for part, w in windows.items()}
    limits = thresholds(trainer.model, ups, scorer, batches["calibrate"], rates, tick("thresholds", "calibrate"))
    counts = measure(trainer.model, ups, scorer, batches["test"], limits, tick("measure", "test"))
    chosen = rates.index(spec.false_negative)
    layers = [
        LayerPredictor(f.a.cpu().numpy(), f.b.cpu().numpy(), f.bias.cpu().numpy(), limits[n][chosen], spec.store_dtype)
        for n, f in enumerate(factors)
    ]
    card = _card(trainer, layers, limits, counts, rates, request, cards, name)
    card["measured"] = time_share(ups, scorer)
    return Predictors(layers, card, request["model_digest"])


def _card(
    trainer: Trainer,
    layers: list[LayerPredictor],
    limits: list[list[float]],
    counts: list[list[Counts]],
    rates: list[float],
    request: dict[str, Any],
    data: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    spec = trainer.spec
    d_ff, d_model = trainer.ups[0].weight.shape
    chosen = rates.index(spec.false_negative)
    factors = sum(layer.a.size + layer.b.size + layer.bias.size for layer in layers)
    return {
        "schema": SCHEMA,
        "model": {"name": name, "num_layers": len(layers), "d_model": d_model, "d_ff": d_ff},
        "model_digest": request["model_digest"],
        "spec": request["spec"],
        "request": request,
        "data": {**data, "rounds": trainer.stream.round + 1},
        "seed": spec.seed,
        "versions": _versions(),
        "store_dtype": spec.store_dtype,
        "nbytes": sum(layer.nbytes for layer in layers),
        "weight_share": factors / _ffn_weights(trainer.ups),
        "tokens_trained": trainer.steps * trainer.batch_tokens,
        "tokens_statistics": trainer.init_batches * trainer.batch_tokens,
        "steps": trainer.steps,
        "batch_tokens": trainer.batch_tokens,
        "loss_curve": trainer.curve,
        "layers": [
            {
                "rank": layer.rank,
                "threshold": layer.threshold,
                **counts[n][chosen].as_dict(),
                "weight_share": (layer.a.size + layer.b.size) / (2 * d_ff * d_model),
                "frontier": [
                    {"target": rate, "threshold": limits[n][i], **counts[n][i].as_dict()}
                    for i, rate in enumerate(rates)
                ],
            }
            for n, layer in enumerate(layers)
        ],
    }


def _ffn_weights(ups: Sequence[nn.Linear]) -> int:
    """Weights of the up and down matrices together."""
    return sum(2 * up.weight.numel() for up in ups)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("flash-workbench", "torch", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
