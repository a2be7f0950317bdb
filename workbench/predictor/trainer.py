"""The training loop over text: dense forward, taps into groups of layers of equal rank, steps, saved states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from workbench.errors import DataError, TrainingError
from workbench.predictor.allocate import HELD_TOKENS, Estimate, allocate, candidates, estimate
from workbench.predictor.config import PredictorSpec
from workbench.predictor.initialise import Factors, Moments, Regression, random, regression
from workbench.predictor.losses import compiled_slope, slope, weights
from workbench.predictor.optimise import Group
from workbench.predictor.quantise import values
from workbench.predictor.taps import SIZES, Sample, Taps, View
from workbench.predictor.watch import Watcher
from workbench.spec import ModelSpec
from workbench.training.distributed import World
from workbench.training.interrupts import Interrupts
from workbench.training.logs import Logs
from workbench.training.schedule import rate_at
from workbench.training.state import StateWriter, load_state

CURVE_POINTS = 500
WAITING_POINTS = 20  # losses that may stay on the device before the host asks for them
BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 1 << 28}
Progress = Callable[[str, int, int], None]


class Windows(Protocol):
    """A source of token windows int64 [sequence] that can be returned to."""

    source: Any
    round: int

    def __iter__(self) -> Iterator[np.ndarray]: ...
    def __next__(self) -> np.ndarray: ...
    def position(self) -> dict[str, Any]: ...
    def seek(self, position: dict[str, Any]) -> None: ...


class Trainer:
    """All layers' predictors of one model, trained on one stream of windows.

    `spec` must be resolved for `geometry`. `ups`: the linears that activations sit on. `micro_windows` windows go
    through the dense model at a time; a step gathers `batch_windows`, a multiple of it, of which each process of
    `world` takes every world.size-th: all read the same stream. `fused`: the loss's slope as one compiled kernel.
    """

    def __init__(
        self,
        model: Any,
        ups: Sequence[nn.Linear],
        stream: Windows,
        spec: PredictorSpec,
        geometry: ModelSpec,
        *,
        micro_windows: int,
        compute: torch.dtype,
        progress: Progress,
        interrupts: Interrupts,
        world: World,
        fused: bool = False,
    ) -> None:
        self.model, self.ups, self.stream, self.spec, self.geometry = model, list(ups), stream, spec, geometry
        self.micro_windows, self.compute = micro_windows, compute
        self.progress, self.interrupts, self.world = progress, interrupts, world
        self.device = self.ups[0].weight.device
        self.view = View.of(model, geometry, spec.loss, spec.input)
        self.slope = compiled_slope() if fused else slope
        self.batch_windows = batch_windows(spec)
        self.batch_tokens = self.batch_windows * spec.sequence
        batches = max(2, spec.tokens // self.batch_tokens)
        self.init_batches = min(-(-(spec.init_tokens or 0) // self.batch_tokens), max(1, batches // 2))
        self.steps = batches - self.init_batches
        self.step = 0
        self.curve: dict[str, list[Any]] = {"step": [], "loss": []}
        self.groups: list[Group] = []
        self.ranks: list[int] = []
        self.allocation: dict[str, Any] | None = None
        self.logs = Logs(None)
        self.watcher: Watcher | None = None
        self._waiting: list[tuple[int, float, torch.Tensor]] = []
        self._counted = (0, time.monotonic())

    # statistics and first factors

    def initialise(self) -> None:
        """Read the first part of the text and set the factors from its statistics."""
        spec, layers = self.spec, len(self.ups)
        d_ff, d_model = self.geometry.d_ff, self.geometry.d_model
        moments = Moments(layers, d_model, d_ff, self.device, other=spec.input != "ffn")
        count = self.init_batches * self.batch_windows
        held = self._held(count) if spec.allocation == "measured" else 0
        with Taps(self.model, self.ups, self.view, moments.add):
            for at in range(0, count - held, self.micro_windows):
                windows = self._windows(min(self.micro_windows, count - held - at))
                if at // self.micro_windows % self.world.size == self.world.rank:
                    self._forward(windows)
                self.progress("statistics", (at + len(windows)) * spec.sequence, (count - held) * spec.sequence)
                self.interrupts.raise_pending()
        self.world.agree()
        moments.merge(self.world)
        self.ranks = self._measured_ranks(moments, held) if held else spec.ranks(layers)
        share, size = moments.rates()
        self._group(self._first_factors(moments), share, size)

    def _held(self, count: int) -> int:
        """Windows of the statistics' text that are held back for the allocation of ranks."""
        if count < 2:
            raise DataError("allocation='measured' needs init_tokens of two windows at least; give more")
        return max(1, min(HELD_TOKENS // self.spec.sequence, count // 4))

    def _regression(self, moments: Moments, layer: int, rank: int) -> Regression:
        up, balanced = self.ups[layer], self.spec.loss != "bce"
        limit = self.geometry.threshold(layer)
        return regression(moments, layer, up.weight, up.bias, rank, threshold=limit, balanced=balanced)

    def _first_factors(self, moments: Moments) -> list[Factors]:
        """Each process makes those of some layers, and all get all."""
        d_ff, d_model = self.geometry.d_ff, self.geometry.d_model
        generator = torch.Generator().manual_seed(self.spec.seed)
        factors = []
        for layer, rank in enumerate(self.ranks):
            if self.spec.init == "random":
                factors.append(random(moments, layer, d_ff, rank, generator))
            elif layer % self.world.size == self.world.rank:
                factors.append(self._regression(moments, layer, rank).factors(rank))
            else:
                factors.append(_empty(rank, d_model, d_ff, self.device))
            self.interrupts.raise_pending()
        self.world.agree()
        for layer, made in enumerate(factors):
            self.world.copy_(made.a, made.b, made.bias, source=layer % self.world.size)
        return factors

    def _measured_ranks(self, moments: Moments, held: int) -> list[int]:
        """Every process runs the held-back text, and looks at some of the layers."""
        spec, geometry = self.spec, self.geometry
        kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.ups]

        def keep(layer: int, sample: Sample) -> None:
            if layer % self.world.size == self.world.rank:
                kept[layer].append((sample.x.to(self.compute, copy=True), sample.z > 0))

        with Taps(self.model, self.ups, self.view, keep):
            for at in range(0, held, self.micro_windows):
                self._forward(self._windows(min(self.micro_windows, held - at)))
        ladder = candidates(geometry.d_model)
        found: dict[int, Estimate] = {}
        for layer in self.world.mine(range(len(self.ups))):
            fitted = self._regression(moments, layer, ladder[-1])
            x, active = (torch.cat(parts) for parts in zip(*kept[layer], strict=True))
            found[layer] = estimate(fitted, x, active, ladder, spec.false_negative)
            kept[layer] = []
            self.progress("ranks", len(found), len(self.world.mine(range(len(self.ups)))))
            self.interrupts.raise_pending()
        self.world.agree()
        merged = {layer: entry for part in self.world.gather(found) for layer, entry in part.items()}
        estimates = [merged[layer] for layer in range(len(self.ups))]
        cost = spec.rank_cost(geometry.d_model, geometry.d_ff)
        budget = spec.rank_bytes or sum(spec.ranks(len(self.ups))) * cost
        ranks = self.world.share(allocate(estimates, cost, budget))
        self.allocation = {
            "rank_bytes": budget,
            "candidates": ladder,
            "active": [entry.active for entry in estimates],
            "predicted": [[entry.predicted[rank] for rank in ladder] for entry in estimates],
        }
        return ranks

    def _group(self, factors: list[Factors], share: torch.Tensor, size: torch.Tensor) -> None:
        """Stack layers of equal rank, and make the buffers that the taps fill."""
        positive, negative = weights(self.spec.loss, share, size, self.batch_tokens)
        self.groups = []
        for rank in sorted(set(self.ranks)):
            layers = [layer for layer, own in enumerate(self.ranks) if own == rank]
            self.groups.append(
                Group(
                    layers,
                    [factors[layer] for layer in layers],
                    positive[layers],
                    negative[layers],
                    self.compute,
                    BLOCK_BYTES[self.device.type],
                    self.slope,
                )
            )
        tokens, sized = self.micro_windows * self.spec.sequence, SIZES[self.spec.loss] != "none"
        self._batches = [group.batch(tokens, sized) for group in self.groups]
        self._place = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}

    # steps

    def _windows(self, count: int) -> np.ndarray:
        rows = list(islice(self.stream, count))
        if len(rows) < count:
            raise DataError(
                f"{self.stream.source}: no training text of {self.spec.sequence} tokens left after the validation "
                "documents are set aside; give more text or a smaller validation_share"
            )
        return np.stack(rows)

    def _forward(self, windows: np.ndarray) -> None:
        """One forward without the output head, of which the taps take what they need; queued, not waited for."""
        ids = torch.from_numpy(windows)
        if self.device.type == "cuda":
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        with torch.inference_mode():
            self.model.base_model(input_ids=ids, use_cache=False)

    def _sink(self, layer: int, sample: Sample) -> None:
        group, index = self._place[layer]
        batch = self._batches[group]
        batch.x[index].copy_(sample.x)
        if sample.size is None:
            torch.gt(sample.z, 0, out=batch.active[index])
        else:
            batch.active[index].copy_(sample.size)

    def one_step(self) -> bool:
        """One optimiser step of every layer on the next batch of text. Whether a process was told to stop meanwhile."""
        record = self._recorded(self.step + 1)
        losses = torch.zeros(len(self.ups), dtype=torch.float64, device=self.device) if record else None
        for i in range(self.batch_windows // self.micro_windows):
            windows = self._windows(self.micro_windows)
            if i % self.world.size != self.world.rank:
                continue
            self._forward(windows)
            for group, batch in zip(self.groups, self._batches, strict=True):
                found = group.accumulate(batch, record)
                if losses is not None and found is not None:
                    losses[group.layers] += found
        stop = self.world.agree(self.interrupts.pending)
        self.world.sum_(*(group.flat for group in self.groups))
        self.step += 1
        rate = self._rate(self.step)
        for group in self.groups:
            group.apply(self.step, rate, self.spec.weight_decay)
        if losses is not None:
            self.world.sum_(losses)
            self._waiting.append((self.step, time.time(), losses))
        return stop

    def _rate(self, step: int) -> float:
        return rate_at(step, self.steps, self.spec.learning_rate, self.spec.warmup)

    def _recorded(self, step: int) -> bool:
        """Whether the step's losses go into the curve."""
        return step == 1 or step == self.steps or step % -(-self.steps // CURVE_POINTS) == 0

    def flush(self) -> None:
        """Take the losses that the device still has into the curve and the logs."""
        waiting, self._waiting = self._waiting, []
        for step, at, losses in waiting:
            row = [round(value, 6) for value in losses.tolist()]
            if not np.isfinite(row).all():
                layer = int(np.flatnonzero(~np.isfinite(row))[0])
                raise TrainingError(
                    f"layer {layer}: the loss is not finite at step {step}; start again with --fresh and a smaller "
                    "--learning-rate, or in --dtype float32"
                )
            self.curve["step"].append(step)
            self.curve["loss"].append(row)
            by_group = {g: float(np.mean([row[layer] for layer in g.layers])) for g in self.groups}
            named = {f"loss/{_name(group)}": value for group, value in by_group.items()}
            self.logs.scalars(step, {**named, "learning_rate": self._rate(step)}, at)
        if waiting:
            tokens, since = self._counted
            now, done = time.monotonic(), self.step * self.batch_tokens
            self.logs.scalars(self.step, {"tokens_per_s": (done - tokens) / max(now - since, 1e-9)})
            self._counted = (done, now)

    def run(self, writer: StateWriter, checkpoint_seconds: float) -> None:
        """Train to the last step, saving every so many seconds, at the end and on Ctrl-C.

        Raises KeyboardInterrupt after saving.
        """
        total = self.steps * self.batch_tokens
        saved_at, saved_step = time.monotonic(), -1
        self._counted = (self.step * self.batch_tokens, time.monotonic())
        consistent = True
        try:
            with Taps(self.model, self.ups, self.view, self._sink) as taps:
                if self.watcher:
                    self.watcher.begun(self)
                while self.step < self.steps:
                    consistent = False
                    stop = self.one_step()
                    consistent = True
                    if self.watcher:
                        self.watcher.after_step(self, taps)
                    if len(self._waiting) >= WAITING_POINTS:
                        self.flush()
                    if time.monotonic() - saved_at >= checkpoint_seconds:
                        self.save(writer)
                        saved_at, saved_step = time.monotonic(), self.step
                    self.progress("train", self.step * self.batch_tokens, total)
                    if stop or (self.world.size == 1 and self.interrupts.pending):
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            if consistent and saved_step != self.step:
                self.save(writer)
            writer.join()
            raise
        if saved_step != self.step:
            self.save(writer)
        writer.join()

    # state

    def save(self, writer: StateWriter) -> None:
        """Everything the next step depends on. Nothing is random after the initialisation, whose seed is given."""
        self.flush()
        if not self.world.main:
            return
        tensors = {f"{g}.{key}": t for g, group in enumerate(self.groups) for key, t in group.state().items()}
        meta = {"step": self.step, "position": self.stream.position(), "curve": self.curve, "ranks": self.ranks}
        writer.save(tensors, {**meta, "allocation": self.allocation})

    def restore(self, folder: Path) -> bool:
        """Go on from the newest whole state in `folder`, which only the first process reads; False when there is
        none."""
        found = load_state(folder) if self.world.main else None
        self.world.agree()
        meta = self.world.share(found[1] if found else None)
        if meta is None:
            return False
        d_ff, d_model = self.geometry.d_ff, self.geometry.d_model
        self.ranks, self.allocation = meta["ranks"], meta["allocation"]
        half = torch.full((len(self.ups),), 0.5, dtype=torch.float64, device=self.device)
        self._group([_empty(rank, d_model, d_ff, self.device) for rank in self.ranks], half, half)
        for g, group in enumerate(self.groups):
            if found:
                group.restore({key: found[0][f"{g}.{key}"] for key in group.state()})
            self.world.copy_(*group.state().values())
        self.step, self.curve = meta["step"], meta["curve"]
        self.stream.seek(meta["position"])
        return True

    def factors(self) -> list[Factors]:
        """The factors of each layer, as trained."""
        result = {}
        for group in self.groups:
            for i, layer in enumerate(group.layers):
                result[layer] = Factors(*(group.parameters[name][i] for name in ("a", "b", "bias")))
        return [result[layer] for layer in range(len(self.ups))]

    def stored_factors(self) -> list[Factors]:
        """The factors of each layer with the values that the dtype they are stored in leaves them, as float32."""
        return [values(factors, self.spec.store_dtype) for factors in self.factors()]


def _empty(rank: int, d_model: int, d_ff: int, device: torch.device) -> Factors:
    return Factors(*(torch.zeros(shape, device=device) for shape in ((rank, d_model), (d_ff, rank), (d_ff,))))


def _name(group: Group) -> str:
    """'layers_0-3,6_rank_64'."""
    runs: list[list[int]] = []
    for layer in group.layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    names = ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in runs)
    return f"layers_{names}_rank_{group.parameters['a'].shape[1]}"


def batch_windows(spec: PredictorSpec) -> int:
    """Windows an optimiser step."""
    return max(1, (spec.batch_tokens or 1) // spec.sequence)


def choose_micro_windows(spec: PredictorSpec, model: ModelSpec, memory_bytes: int, world_size: int = 1) -> int:
    """Windows of one dense forward: a divisor of a batch whose captured activations fit in memory_bytes, the largest
    that leaves every process equally many, or else the largest that leaves each at least one.

    TrainingError when there are more processes than windows in a batch.
    """
    held = model.d_ff * (1 if SIZES[spec.loss] == "none" else 2) + 4 * model.d_model
    token_bytes = model.num_layers * held + 16 * model.d_ff
    fit = max(1, memory_bytes // (token_bytes * spec.sequence))
    whole = batch_windows(spec)
    if whole < world_size:
        raise TrainingError(
            f"batch_tokens {spec.batch_tokens} are {whole} windows of {spec.sequence}, too few for {world_size} "
            "processes; give more batch_tokens or start fewer processes"
        )
    sizes = [n for n in range(1, whole + 1) if whole % n == 0 and (n <= fit or n == 1) and whole // n >= world_size]
    return max(sizes, key=lambda n: (whole // n % world_size == 0, n))
