"""Train the predictors of all layers in one pass over the text, resumable, and write them with their card."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.capture.activations import dense, tokenizer
from workbench.capture.text import DataCard, TokenStream, documents, hash_of, source_identity, split_of
from workbench.errors import DataError, PredictorError
from workbench.models import family
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights
from workbench.predictor.card import make_card
from workbench.predictor.config import PredictorSpec
from workbench.predictor.evaluate import Scorer, measure, targets, thresholds, time_share
from workbench.predictor.fingerprint import fingerprint
from workbench.predictor.low_rank import LayerPredictor, Predictors
from workbench.predictor.quantise import store
from workbench.predictor.request import Choice, finished, partial_of, read_choice, write_choice
from workbench.predictor.trainer import Progress, Trainer, batch_windows, choose_micro_windows
from workbench.predictor.watch import Watch, Watcher
from workbench.spec import ITEMSIZE, ModelSpec
from workbench.training.claim import claimed
from workbench.training.distributed import World, connect
from workbench.training.interrupts import Interrupts
from workbench.training.logs import Logs, check_logs
from workbench.training.memory import free_bytes
from workbench.training.state import StateWriter

MOST_MEMORY = {"cpu": 512 << 20, "cuda": 32 << 30}  # for captured activations: more does not make training faster
DTYPES = ("auto", *ITEMSIZE)
GRACE_SECONDS = 3.0  # a launcher repeats Ctrl-C within this


def train_predictors(
    model: str | Path,
    data: str | Path,
    spec: PredictorSpec | None = None,
    *,
    out: str | Path,
    resume: bool = True,
    progress: Progress | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    memory_bytes: int | None = None,
    checkpoint_seconds: float = 120.0,
    logs: str | Path | None = None,
    fused: bool | None = None,
    trust_remote_code: bool = False,
    watch: Watch | None = None,
    interrupts: Interrupts | None = None,
) -> Predictors:
    """Train low-rank predictors (paper section 3.1) for every FFN layer of `model` on the text `data`.

    One dense forward without gradients serves all layers. State is kept in OUT.partial, so that a run that was
    killed or interrupted goes on where it was and ends with the identical result; with `resume=False` it is
    discarded. When OUT is there and was trained by the same request, it is returned at once.

    Under torchrun the processes share the windows of every step: the result is that of one process, up to the order of
    sums, and a run may go on with another number of processes. The first one alone writes and shows progress; only it
    needs OUT. All need the checkpoint and the text.

    model: checkpoint directory or hub id. data: see `workbench.capture.sources`. progress(stage, done, total): tokens
    ('ranks': layers). device 'cpu' or 'cuda'. dtype of the dense model: 'auto' is bfloat16 on CUDA; on the CPU float32
    where it fits in the memory that is free, else bfloat16. memory_bytes bounds the captured activations [a third of
    what is free, at most 512 MiB on the CPU and 32 GiB on CUDA]. An interrupted run's choice of both is kept.
    checkpoint_seconds between saved states. logs: folder for TensorBoard's event files. fused: the loss's slope as one
    compiled kernel, equal within rounding [on CUDA]. trust_remote_code: let a tokenizer run code that the checkpoint
    brings along. watch: called at most a few times a second with the losses so far, and with the quality on a part of
    the held-out text (`workbench.predictor.watch`); the result does not depend on it. interrupts: the caller's own,
    whose `stop()` ends the run from another thread as Ctrl-C does.

    Raises PredictorError (OUT belongs to another request, cannot be written), TrainingError (so does OUT.partial, or a
    process was lost), DataError, CheckpointError, DeviceError; KeyboardInterrupt on Ctrl-C, after the state is saved.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    check_logs(logs)
    with connect(device) as world:
        run = _prepare(model, data, spec, Path(out), dtype, world)
        done = world.first(lambda: finished(run.out, run.request))
        if done is not None:
            return done
        fused = fused if fused is not None else world.device.type == "cuda"
        control = interrupts or Interrupts(GRACE_SECONDS if world.size > 1 else 0.0)
        return _run(
            run, resume, progress, memory_bytes, checkpoint_seconds, logs, fused, trust_remote_code, watch, control
        )


@dataclass
class _Run:
    """What is asked for, of which model. `parameters`: of the dense model. `dtype` may be 'auto'."""

    model: str | Path
    data: str | Path
    spec: PredictorSpec
    out: Path
    dtype: str
    world: World
    geometry: ModelSpec
    name: str
    parameters: int
    request: dict[str, Any]


def _prepare(
    model: str | Path, data: str | Path, spec: PredictorSpec | None, out: Path, dtype: str, world: World
) -> _Run:
    geometry, digest, name, parameters = world.first(lambda: _identify(model))
    resolved = (spec or PredictorSpec()).resolved(geometry)
    identity = source_identity(data)
    world.agree()
    if any(other != identity for other in world.gather(identity)):
        raise DataError(f"{data}: not the same text on every machine; copy it to all")
    request = {
        "model_digest": digest,
        "spec": dataclasses.asdict(resolved),
        "data": identity,
        "device": world.device.type,
        "dtype": dtype,
    }
    return _Run(model, data, resolved, out, dtype, world, geometry, name, parameters, request)


def _identify(model: str | Path) -> tuple[ModelSpec, str, str, int]:
    """A checkpoint's geometry, fingerprint, name and number of parameters, without loading it whole."""
    path, name = locate(model)
    with Checkpoint(path, name) as checkpoint:
        weights = Weights(checkpoint)
        parameters = sum(prod(info.shape) for info in checkpoint.tensors.values())
        parts = (weights.ffn(layer) for layer in range(weights.spec.num_layers))
        activated = (names[2] if weights.spec.gated else names[0] for names in parts)
        return weights.spec, fingerprint(weights.read(tensor) for tensor in activated), name, parameters


def _run(
    run: _Run,
    resume: bool,
    progress: Progress | None,
    memory_bytes: int | None,
    checkpoint_seconds: float,
    logs: str | Path | None,
    fused: bool,
    trust_remote_code: bool,
    watch: Watch | None,
    interrupts: Interrupts,
) -> Predictors:
    world, spec, partial = run.world, run.spec, partial_of(run.out)
    with ExitStack() as stack:
        if world.main:
            stack.enter_context(claimed(partial, run.request, resume))
        stack.enter_context(interrupts)
        before = world.first(lambda: read_choice(partial))
        dtype = before.dtype if before else _dtype(run)
        words = tokenizer(run.model, trust_remote_code=trust_remote_code)
        held = {part: _held_out(run, words, part) for part in ("calibrate", "test")}
        loaded = dense(run.model, dtype, str(world.device))
        world.agree()
        choice = _choose(run, dtype, before, memory_bytes)
        world.first(lambda: write_choice(partial, choice))
        ups = family(run.geometry.model_type).activated_linears(loaded)
        compute = torch.float32 if world.device.type == "cpu" or dtype == "float32" else torch.bfloat16
        stream = _stream(run, words, "train", loop=True)
        stack.callback(stream.close)
        trainer = Trainer(
            loaded, ups, stream, spec, run.geometry, micro_windows=choice.micro_windows, compute=compute,
            progress=progress if progress and world.main else lambda stage, done, total: None,
            interrupts=interrupts, world=world, fused=fused,
        )  # fmt: skip
        writer = StateWriter(partial)
        stack.callback(writer.join)
        if not trainer.restore(partial):
            trainer.initialise()
            trainer.save(writer)
        if watch and world.main:
            trainer.watcher = Watcher(watch, {part: windows for part, (windows, _) in held.items()})
        trainer.logs = stack.enter_context(Logs(logs if world.main else None, trainer.step + 1))
        trainer.run(writer, checkpoint_seconds)
        stream.close()  # its thread uses the tokenizer
        made = _finish(run, trainer, stream.card, held, choice)
        world.first(lambda: made.save(run.out) if made else None)
    if world.main:
        shutil.rmtree(partial, ignore_errors=True)
    return world.first(lambda: Predictors.load(run.out))


def _dtype(run: _Run) -> str:
    """The dense model's dtype: as asked, or by device and memory, the same on every process."""
    if run.dtype != "auto":
        return run.dtype
    if run.world.device.type == "cuda":
        return "bfloat16"
    free = min(run.world.gather(free_bytes(run.world.device)))
    return "float32" if run.parameters * 4 + MOST_MEMORY["cpu"] <= free else "bfloat16"


def _choose(run: _Run, dtype: str, before: Choice | None, memory_bytes: int | None) -> Choice:
    """Windows of one forward: an interrupted run's, where they suit the processes, else as memory allows."""
    world, whole = run.world, batch_windows(run.spec)
    kept = before is not None and memory_bytes is None and whole % before.micro_windows == 0
    if kept and before is not None and whole // before.micro_windows % world.size == 0:
        return before
    free = min(world.gather(free_bytes(world.device)))
    memory = memory_bytes or min(MOST_MEMORY[world.device.type], free // 3)
    return Choice(dtype, choose_micro_windows(run.spec, run.geometry, memory, world.size), memory)


def _stream(run: _Run, words: Any, part: str, loop: bool = False) -> TokenStream:
    share, skip = run.spec.validation_share, run.spec.skip_documents
    skipped = {hash_of(text) for text in documents(run.data, 0, skip)} if skip else set[bytes]()

    def keep(text: str) -> bool:
        return split_of(text, share) == part and (not skipped or hash_of(text) not in skipped)

    return TokenStream(run.data, words, run.spec.sequence, keep, loop=loop, ahead=loop)


def _held_out(run: _Run, words: Any, part: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Windows of a part of the validation text, and its card. DataError, before any training, when there is none."""
    spec, stream = run.spec, _stream(run, words, part)
    windows = list(islice(stream, max(1, spec.validation_tokens // spec.sequence)))
    if not windows:
        raise DataError(
            f"{run.data}: fewer than {spec.sequence} tokens of validation text ({part}); give more documents or a "
            "larger validation_share"
        )
    return windows, {**stream.card.as_dict(), "tokens": len(windows) * spec.sequence}


def _finish(
    run: _Run,
    trainer: Trainer,
    read: DataCard,
    held: dict[str, tuple[list[np.ndarray], dict[str, Any]]],
    choice: Choice,
) -> Predictors | None:
    """Set thresholds on one half of the validation text, measure on the other, and make the card; None on processes
    other than the first."""
    spec, ups, world = run.spec, trainer.ups, run.world
    scorer = Scorer(trainer.stored_factors())
    rates = targets(spec.false_negative)
    windows = {part: found for part, (found, _) in held.items()}
    cards = {"train": read.as_dict(), **{part: card for part, (_, card) in held.items()}}

    def tick(stage: str, part: str):  # type: ignore[no-untyped-def]
        total = len(windows[part]) * spec.sequence

        def report(done: int) -> None:
            trainer.progress(stage, min(total, done * world.size), total)
            trainer.interrupts.raise_pending()

        return report

    size = choice.micro_windows
    batches = {
        part: world.mine([np.stack(w[i : i + size]) for i in range(0, len(w), size)]) for part, w in windows.items()
    }
    together: dict[str, Any] = {"view": trainer.view, "world": world}
    model = trainer.model
    limits = thresholds(model, ups, scorer, batches["calibrate"], rates, tick("thresholds", "calibrate"), **together)
    counts = measure(model, ups, scorer, batches["test"], limits, tick("measure", "test"), **together)
    if not world.main:
        return None
    chosen = rates.index(spec.false_negative)
    layers = [
        LayerPredictor(f.a, f.b, f.bias, limits[n][chosen], spec.store_dtype, f.a_scale, f.b_scale)
        for n, f in enumerate(store(factors, spec.store_dtype) for factors in trainer.factors())
    ]
    for n, row in enumerate(counts):
        quality = {k: row[chosen].as_dict()[k] for k in ("false_negative", "false_positive", "predicted_over_active")}
        trainer.logs.scalars(trainer.step, {f"{name}/layer_{n:02d}": value for name, value in quality.items()})
    card = make_card(trainer, layers, limits, counts, rates, run.request, cards, run.name)
    card["run"] = {**choice.as_dict(), "processes": world.size}
    card["measured"] = time_share(ups, scorer, run.geometry.parts)
    if not all(np.isfinite(layer.bias).all() for layer in layers):
        raise PredictorError("training diverged: factors are not finite; choose a smaller learning_rate")
    return Predictors(layers, card, run.request["model_digest"])
