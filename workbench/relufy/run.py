"""Turn a model whose FFN is not sparse into one with ReLU, and write it as a checkpoint with its card."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.capture.activations import dense, tokenizer
from workbench.capture.perplexity import perplexity
from workbench.capture.text import documents, hash_of, source_identity, split_of, token_windows
from workbench.errors import DataError, DeviceError, TrainingError
from workbench.models import family
from workbench.models.activation import FatReLU
from workbench.relufy.card import SCHEMA, markdown
from workbench.relufy.config import RelufySpec
from workbench.relufy.measure import GRID, Energy, at_most, largest, measure
from workbench.relufy.models import (
    Original,
    make_student,
    open_original,
    round_weights,
    trainable,
    write_checkpoint,
)
from workbench.relufy.text import Mixture, TokenSource
from workbench.relufy.trainer import Progress, Trainer, choose_micro_windows
from workbench.training.claim import claimed
from workbench.training.interrupts import Interrupts
from workbench.training.logs import Logs, check_logs
from workbench.training.state import sync_directory, write_atomic
from workbench.training.versions import versions

Source = str | Path
Data = Source | Sequence[Source | tuple[Source, float]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_BYTES = 2 << 30
HELD_OUT_WINDOWS = 256
VALIDATION, HELD_OUT = "validation", "held out"


def relufy(
    model: str | Path,
    data: Data,
    spec: RelufySpec | None = None,
    *,
    out: str | Path,
    resume: bool = True,
    progress: Progress | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    checkpoint_seconds: float = 120.0,
    logs: Path | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Replace the FFN activation of `model` by ReLU, distil from the original on `data`, and write OUT; its card.

    OUT is a Hugging Face checkpoint with plain ReLU, or with FATReLU's thresholds, card.json and CARD.md; it is there
    whole or not at all. State is kept in OUT.partial, so that a run that was killed or interrupted goes on where it
    was; with `resume=False` it is discarded. When OUT is there and came from the same request, its card is returned.

    model: checkpoint directory or hub id. data: a text (see `workbench.capture.text`) or several, each alone or with
    a weight: its share of the windows. The first is also what is validated on. progress(stage, done, total): tokens.
    device 'cpu' or 'cuda'; dtype 'float32', or 'bfloat16' for autocast over float32 weights. logs: a folder for
    TensorBoard. trust_remote_code: let a tokenizer run code that the checkpoint brings along.

    Raises CheckpointError (not a checkpoint, sparse already), DataError, DeviceError, TrainingError (OUT belongs to
    another request or cannot be written, a loss that is not finite); KeyboardInterrupt on Ctrl-C, after the state is
    saved.
    """
    _check(device, dtype)
    check_logs(logs)
    original = open_original(model)
    spec = (spec or RelufySpec()).resolved(original.spec)
    sources = _sources(data)
    request = {
        "model_digest": original.digest,
        "spec": dataclasses.asdict(spec),
        "data": [{**source_identity(source), "weight": weight} for source, weight in sources],
        "device": device,
        "dtype": dtype,
    }
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    done = _finished(out, partial, request)
    if done is not None:
        return done
    report = progress or (lambda stage, done, total: None)
    with ExitStack() as stack:
        stack.enter_context(claimed(partial, request, resume))
        interrupts = stack.enter_context(Interrupts())
        words = tokenizer(original.path, trust_remote_code=trust_remote_code)
        run = _Run(original, words, sources, spec, DTYPES[dtype], device, report, interrupts)
        try:
            card = run.all(partial, request, checkpoint_seconds, logs)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"{device}: out of memory; lower --batch-tokens (now {spec.batch_tokens}) or --sequence, or free "
                "memory that other programs hold"
            ) from error
        _publish(partial / "result", out)
        shutil.rmtree(partial, ignore_errors=True)
        return card


def _check(device: str, dtype: str) -> None:
    if device not in ("cpu", "cuda"):
        raise DeviceError(f"device {device!r} is not one of cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device cuda: this torch sees no CUDA GPU; install a CUDA build of torch or use --device cpu")
    if dtype not in DTYPES:
        raise DeviceError(f"dtype {dtype!r}: training computes in {' or '.join(DTYPES)}; pass one of them")


def _sources(data: Data) -> list[tuple[Source, float]]:
    """The texts with their weights. DataError when there are none, or a weight is not positive."""
    given = [data] if isinstance(data, str | Path) else list(data)
    pairs = [entry if isinstance(entry, tuple) else (entry, 1.0) for entry in given]
    if not pairs:
        raise DataError("no text to train on; give --data")
    for source, weight in pairs:
        if not 0 < weight < float("inf"):
            raise DataError(f"{source}: its weight {weight} is not above 0; leave the text out instead")
    return [(source, float(weight)) for source, weight in pairs]


def _finished(out: Path, partial: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The card in OUT if it answers this request; None if there is no OUT."""
    if not out.exists():
        return None
    card: Any = None
    with suppress(OSError, ValueError):
        card = json.loads((out / "card.json").read_text())
    if not isinstance(card, dict) or card.get("request") != request:
        raise TrainingError(f"{out}: exists and does not come from this request; choose another OUT or delete it")
    shutil.rmtree(partial, ignore_errors=True)
    return card


def _publish(result: Path, out: Path) -> None:
    try:
        os.rename(result, out)
        sync_directory(out.parent)
    except OSError as error:
        raise TrainingError(f"{out}: cannot be written ({error.strerror}); choose another OUT") from error


class _Run:
    """One run, from loaded models to the written result."""

    def __init__(
        self,
        original: Original,
        words: Any,
        sources: list[tuple[Source, float]],
        spec: RelufySpec,
        compute: torch.dtype,
        device: str,
        progress: Progress,
        interrupts: Interrupts,
    ) -> None:
        self.original, self.sources, self.spec, self.compute = original, sources, spec, compute
        self.device, self.progress, self.interrupts = device, progress, interrupts
        self.arch = family(original.spec.model_type)
        self.words = words
        self.held = {hash_of(text) for text in documents(sources[0][0], 0, spec.skip_documents)}
        self.calibrate = self._windows("calibrate")
        self.texts = {VALIDATION: self._windows("test")}
        if spec.skip_documents:
            self.texts[HELD_OUT] = self._held_out()
        self.autocast = None if compute == torch.float32 else compute

    def all(
        self, partial: Path, request: dict[str, Any], checkpoint_seconds: float, logs: Path | None
    ) -> dict[str, Any]:
        """Everything; the result lies in `partial`/result."""
        original, spec = self.original, self.spec
        with ExitStack() as stack:
            teacher = dense(original.path, str(self.compute).removeprefix("torch."), self.device, force=True)
            student = make_student(original, spec, self.device)
            parameters = trainable(student, original, spec)
            linears = self.arch.activated_linears(student)
            trainer = Trainer(
                teacher, student, parameters, self._mixture(), original.spec, spec, compute=self.compute,
                micro_windows=self._micro_windows(student, parameters), progress=self.progress,
                interrupts=self.interrupts,
            )  # fmt: skip
            first = self._first(partial / "before.json", teacher, student, linears)
            trainer.restore(partial)
            if logs is not None:
                trainer.log = stack.enter_context(Logs(logs, trainer.step + 1)).scalars
            trainer.run(partial, checkpoint_seconds)
        round_weights(student, original)
        thresholds, search = self._search(student, linears)
        self._activate(student, thresholds)
        after = {text: self._measure(student, linears, text, at_most(thresholds)) for text in self.texts}
        card = self._card(trainer, request, first, after, thresholds, search)
        shutil.rmtree(partial / "result", ignore_errors=True)
        write_checkpoint(partial / "result", student, original, spec, thresholds, card, markdown(card))
        return card

    def _windows(self, part: str) -> np.ndarray:
        """Validation windows of the first text, int64 [n, sequence]."""
        source, spec = self.sources[0][0], self.spec
        texts = (t for t in documents(source, spec.skip_documents) if self._part(t) == part)
        count = max(1, spec.validation_tokens // spec.sequence)
        found = list(islice(token_windows(texts, self.words, spec.sequence), count))
        if not found:
            raise DataError(
                f"{source}: fewer than {spec.sequence} tokens of validation text ({part}); give more documents or a "
                "larger validation_share"
            )
        return np.stack(found)

    def _held_out(self) -> np.ndarray:
        """Windows of the documents that are left out, int64 [n, sequence]."""
        source, spec = self.sources[0][0], self.spec
        texts = documents(source, 0, spec.skip_documents)
        found = list(islice(token_windows(texts, self.words, spec.sequence), HELD_OUT_WINDOWS))
        if not found:
            raise DataError(
                f"{source}: its first {spec.skip_documents} documents have fewer than {spec.sequence} tokens; "
                "hold out more documents or none"
            )
        return np.stack(found)

    def _part(self, text: str) -> str:
        """'train', 'calibrate', 'test', or 'held out' for a document that is held out wherever it stands again."""
        if self.held and hash_of(text) in self.held:
            return HELD_OUT
        return split_of(text, self.spec.validation_share)

    def _mixture(self) -> Mixture:
        made = [
            TokenSource(source, self.words, lambda text: self._part(text) == "train", self._start(i))
            for i, (source, _) in enumerate(self.sources)
        ]
        return Mixture(made, [weight for _, weight in self.sources], self.spec.sequence)

    def _start(self, index: int) -> int:
        return self.spec.skip_documents if index == 0 else 0

    def _micro_windows(self, student: Any, parameters: dict[str, nn.Parameter]) -> int:
        memory = CPU_BYTES
        if self.device == "cuda":
            held = 12 * sum(p.numel() for p in parameters.values())  # gradients and AdamW's two moments
            head = 6 * student.get_output_embeddings().weight.numel() + (6 << 30)  # and chunks of logits
            memory = int(0.8 * (torch.cuda.mem_get_info()[0] - held - head))
        return choose_micro_windows(self.spec, self.original.spec, self.compute.itemsize, memory)

    def _first(self, file: Path, teacher: Any, student: Any, linears: Sequence[nn.Linear]) -> dict[str, Any]:
        """Measurements of the original, and of the student before it is trained; kept in `file`."""
        with suppress(OSError, ValueError):
            return json.loads(file.read_text())
        from transformers.activations import ACT2FN

        activation = ACT2FN[self.original.spec.activation]
        own = self.arch.activated_linears(teacher)
        found = {
            text: {
                "before": self._measure(teacher, own, text, lambda layer, z: activation(z) == 0),
                "swapped": self._measure(student, linears, text, at_most(())),
            }
            for text in self.texts
        }
        write_atomic(file, (json.dumps(found) + "\n").encode())
        return found

    def _measure(
        self, model: Any, linears: Sequence[nn.Linear], text: str, zero: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> dict[str, Any]:
        windows = self.texts[text]
        return measure(model, linears, windows, zero, autocast=self.autocast, progress=self._tick("measure", windows))

    def _tick(self, stage: str, windows: np.ndarray) -> Callable[[int], None]:
        def tick(done: int) -> None:
            self.progress(stage, done, windows.size)
            self.interrupts.raise_pending()

        return tick

    def _activate(self, student: Any, thresholds: Sequence[float]) -> None:
        for layer in range(self.original.spec.num_layers):
            module = FatReLU(thresholds[layer]) if any(thresholds) else nn.ReLU()
            self.arch.set_activation(student, layer, module)

    def _search(self, student: Any, linears: Sequence[nn.Linear]) -> tuple[list[float], dict[str, Any]]:
        """The thresholds that take away most within the tolerance, none if there are none, and how they were found."""
        self._activate(student, ())
        tolerance, windows = self.spec.fatrelu_tolerance, self.calibrate
        if not tolerance:
            return [], {"tried": [], "share": 0.0}
        after = self.original.student_spec(self.spec)
        downs = [
            student.get_submodule(self.arch.ffn_names(after, layer).down.removesuffix(".weight"))
            for layer in range(after.num_layers)
        ]
        energy = Energy(linears, downs)
        with energy.tap():
            plain = self._perplexity(student)
        tried: list[dict[str, float]] = []

        def accepted(index: int) -> bool:
            self._activate(student, energy.thresholds(GRID[index]))
            found = self._perplexity(student)
            tried.append({"share": GRID[index], "perplexity": found})
            self.progress("thresholds", len(tried), len(GRID).bit_length())
            return found <= plain * (1 + tolerance)

        chosen = largest(accepted, len(GRID))
        search = {"tried": tried, "perplexity": plain, "tokens": windows.size, "share": 0.0}
        if chosen < 0:
            return [], search
        return energy.thresholds(GRID[chosen]), {**search, "share": GRID[chosen]}

    def _perplexity(self, student: Any) -> float:
        def tick(done: int) -> None:
            self.interrupts.raise_pending()

        return perplexity(student, self.calibrate, autocast=self.autocast, progress=tick)

    def _card(
        self,
        trainer: Trainer,
        request: dict[str, Any],
        first: dict[str, Any],
        after: dict[str, Any],
        thresholds: list[float],
        search: dict[str, Any],
    ) -> dict[str, Any]:
        geometry = self.original.spec
        return {
            "schema": SCHEMA,
            "model": {
                "name": self.original.name, "model_type": geometry.model_type, "num_layers": geometry.num_layers,
                "d_model": geometry.d_model, "d_ff": geometry.d_ff, "activation": geometry.activation,
                "digest": self.original.digest, "dtype": self.original.dtype,
            },
            "request": request,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "data": [
                {**at["card"], "weight": weight, "rounds": at["round"] + 1}
                for at, (_, weight) in zip(trainer.position["sources"], self.sources, strict=True)
            ],
            "training": {
                "steps": trainer.step, "batch_tokens": trainer.batch_tokens,
                "tokens": trainer.step * trainer.batch_tokens, "seconds": trainer.schedule.seconds,
                "micro_windows": trainer.schedule.micro_windows, "penalty_weight": trainer.weight,
                "trained_parameters": sum(p.numel() for p in trainer.parameters.values()), "curve": trainer.curve,
            },
            "windows": {
                text: {"windows": windows.shape[0], "length": windows.shape[1]} for text, windows in self.texts.items()
            },
            "measured": {text: {**first[text], "after": found} for text, found in after.items()},
            "fatrelu": {"thresholds": thresholds, **search},
            "versions": versions(),
        }  # fmt: skip
