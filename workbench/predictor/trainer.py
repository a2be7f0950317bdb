"""The training loop over text: dense forward, taps into groups of layers of equal rank, steps, saved states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.capture.activations import FfnTap, run_trunk
from workbench.capture.text import TokenStream
from workbench.errors import DataError
from workbench.predictor.config import PredictorSpec
from workbench.predictor.initialise import Factors, Moments, random, regression
from workbench.predictor.optimise import Group
from workbench.spec import ModelSpec
from workbench.training.interrupts import Interrupts
from workbench.training.schedule import rate_at
from workbench.training.state import load_state, save_state

CURVE_POINTS = 500
BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 1 << 28}
MEMORY_BYTES = {"cpu": 512 << 20, "cuda": 8 << 30}
Progress = Callable[[str, int, int], None]


class Trainer:
    """All layers' predictors of one model, trained on one stream of windows.

    `spec` must be resolved. `micro_windows` windows go through the dense model at a time; a step gathers
    `batch_windows`, a multiple of it.
    """

    def __init__(
        self,
        model: Any,
        ups: Sequence[nn.Linear],
        stream: TokenStream,
        spec: PredictorSpec,
        *,
        micro_windows: int,
        compute: torch.dtype,
        progress: Progress,
        interrupts: Interrupts,
    ) -> None:
        self.model, self.ups, self.stream, self.spec = model, list(ups), stream, spec
        self.micro_windows, self.compute = micro_windows, compute
        self.progress, self.interrupts = progress, interrupts
        self.device = self.ups[0].weight.device.type
        self.batch_windows = batch_windows(spec)
        self.batch_tokens = self.batch_windows * spec.sequence
        batches = max(2, spec.tokens // self.batch_tokens)
        self.init_batches = min(-(-(spec.init_tokens or 0) // self.batch_tokens), max(1, batches // 2))
        self.steps = batches - self.init_batches
        self.step = 0
        self.curve: dict[str, list[Any]] = {"step": [], "loss": []}
        self.groups: list[Group] = []

    def initialise(self) -> None:
        """Read the first part of the text and set the factors from its statistics."""
        d_ff, d_model = self.ups[0].weight.shape
        moments = Moments(len(self.ups), d_model, d_ff, self.device)
        total = self.init_batches * self.batch_tokens
        with FfnTap(self.ups, moments.add):
            for i in range(self.init_batches * self.batch_windows // self.micro_windows):
                run_trunk(self.model, self._windows(self.micro_windows))
                self.progress("statistics", min(total, (i + 1) * self.micro_windows * self.spec.sequence), total)
                self.interrupts.raise_pending()
        generator = torch.Generator().manual_seed(self.spec.seed)
        factors = []
        for layer, (up, rank) in enumerate(zip(self.ups, self.spec.ranks(len(self.ups)), strict=True)):
            if self.spec.init == "regression":
                factors.append(regression(moments, layer, up.weight, up.bias, rank))
            else:
                factors.append(random(moments, layer, d_ff, rank, generator))
            self.interrupts.raise_pending()
        self._group(factors)

    def _group(self, factors: list[Factors]) -> None:
        """Stack neighbouring layers of equal rank, and make the buffers that the taps fill."""
        ranks = self.spec.ranks(len(self.ups))
        self.groups = []
        for _, members in groupby(range(len(ranks)), key=lambda layer: ranks[layer]):
            layers = list(members)
            chosen = [factors[layer] for layer in layers]
            self.groups.append(Group(layers, chosen, self.spec.loss, self.compute, BLOCK_BYTES[self.device]))
        tokens = self.micro_windows * self.spec.sequence
        self._batches = [group.batch(tokens, self.device) for group in self.groups]
        self._place = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}

    def _windows(self, count: int) -> np.ndarray:
        rows = list(islice(self.stream, count))
        if len(rows) < count:
            raise DataError(
                f"{self.stream.source}: no training text of {self.spec.sequence} tokens left after the validation "
                "documents are set aside; give more text or a smaller validation_share"
            )
        return np.stack(rows)

    def _sink(self, layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
        group, index = self._place[layer]
        batch = self._batches[group]
        batch.x[index].copy_(x)
        if batch.active.dtype == torch.bool:
            torch.gt(z, 0, out=batch.active[index])
        else:
            batch.active[index].copy_(z.clamp_min(0))

    def one_step(self) -> None:
        """One optimiser step of every layer on the next batch of text."""
        micros = self.batch_windows // self.micro_windows
        losses = torch.zeros(len(self.ups), dtype=torch.float64, device=self.device)
        for _ in range(micros):
            run_trunk(self.model, self._windows(self.micro_windows))
            for group, batch in zip(self.groups, self._batches, strict=True):
                losses[group.layers] += group.accumulate(batch, 1 / micros) / micros
        self.step += 1
        rate = rate_at(self.step, self.steps, self.spec.learning_rate, self.spec.warmup)
        for group in self.groups:
            group.apply(self.step, rate, self.spec.weight_decay)
        every = -(-self.steps // CURVE_POINTS)
        if self.step == 1 or self.step % every == 0 or self.step == self.steps:
            self.curve["step"].append(self.step)
            self.curve["loss"].append([round(value, 6) for value in losses.tolist()])

    def run(self, folder: Path, checkpoint_seconds: float) -> None:
        """Train to the last step, saving in `folder` every so many seconds, at the end and on Ctrl-C.

        Raises KeyboardInterrupt after saving.
        """
        total = self.steps * self.batch_tokens
        saved_at, saved_step = time.monotonic(), -1
        consistent = True
        try:
            with FfnTap(self.ups, self._sink):
                while self.step < self.steps:
                    consistent = False
                    self.one_step()
                    consistent = True
                    if time.monotonic() - saved_at >= checkpoint_seconds:
                        self.save(folder)
                        saved_at, saved_step = time.monotonic(), self.step
                    self.progress("train", self.step * self.batch_tokens, total)
                    self.interrupts.raise_pending()
        except KeyboardInterrupt:
            if consistent and saved_step != self.step:
                self.save(folder)
            raise
        if saved_step != self.step:
            self.save(folder)

    def save(self, folder: Path) -> None:
        """Everything the next step depends on. Nothing is random after the initialisation, whose seed is given."""
        tensors = {f"{g}.{key}": t for g, group in enumerate(self.groups) for key, t in group.state().items()}
        save_state(folder, tensors, {"step": self.step, "position": self.stream.position(), "curve": self.curve})

    def restore(self, folder: Path) -> bool:
        """Go on from the newest whole state in `folder`; False when there is none."""
        found = load_state(folder)
        if found is None:
            return False
        tensors, meta = found
        d_ff, d_model = self.ups[0].weight.shape
        empty = [
            Factors(*(torch.zeros(s, device=self.device) for s in ((rank, d_model), (d_ff, rank), (d_ff,))))
            for rank in self.spec.ranks(len(self.ups))
        ]
        self._group(empty)
        for g, group in enumerate(self.groups):
            group.restore({key: tensors[f"{g}.{key}"] for key in group.state()})
        self.step, self.curve = meta["step"], meta["curve"]
        self.stream.seek(meta["position"])
        return True

    def stored_factors(self) -> list[Factors]:
        """The factors of each layer, rounded to the dtype they are stored in, as float32."""
        dtype = getattr(torch, self.spec.store_dtype)
        result = {}
        for group in self.groups:
            for i, layer in enumerate(group.layers):
                a, b, bias = (group.parameters[name][i] for name in ("a", "b", "bias"))
                result[layer] = Factors(a.to(dtype).float(), b.to(dtype).float(), bias.clone())
        return [result[layer] for layer in range(len(self.ups))]


def batch_windows(spec: PredictorSpec) -> int:
    """Windows an optimiser step."""
    return max(1, spec.batch_tokens // spec.sequence)


def choose_micro_windows(spec: PredictorSpec, model: ModelSpec, memory_bytes: int) -> int:
    """Windows of one dense forward: the largest divisor of a batch whose captured activations fit in memory_bytes."""
    held = model.d_ff * (1 if spec.loss == "balanced" else 2) + 4 * model.d_model
    token_bytes = model.num_layers * held + 16 * model.d_ff
    fit = max(1, memory_bytes // (token_bytes * spec.sequence))
    whole = batch_windows(spec)
    return max(n for n in range(1, whole + 1) if whole % n == 0 and n <= fit)
