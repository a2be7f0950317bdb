"""The distillation loop: a frozen original, a student with ReLU, one optimiser step a batch, saved states."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.errors import TrainingError
from workbench.models import family
from workbench.relufy.activation import PenalisedReLU
from workbench.relufy.config import RelufySpec
from workbench.relufy.norms import fuse_norms
from workbench.relufy.objective import distil, match
from workbench.relufy.text import Ahead, Batch, Mixture
from workbench.spec import ModelSpec
from workbench.training.interrupts import Interrupts
from workbench.training.sparsity import SparsityControl
from workbench.training.state import StateWriter, load_state

CURVE_POINTS = 250
LOOK = 10  # steps between two looks at values on the device, each of which makes the CPU wait for it
PROBE_STEPS, PROBE_SHARE = 3, 0.04  # a time budget's steps are fixed after so many, and this share of it
MARGIN = 0.98  # of a time budget is planned for steps, the rest for saved states
PENALTY_START = 0.05  # of the run, before the progressive penalty begins
BETAS = (0.9, 0.95)
Progress = Callable[[str, int, int], None]
Log = Callable[[int, dict[str, float]], None]


@dataclass
class Schedule:
    """Steps of the run (0: not fixed yet) and of its warm-up, windows of a forward, the seconds trained so far.

    step_seconds: of each step until a time budget's steps are fixed.
    """

    steps: int
    warmup: int
    micro_windows: int
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)


class Trainer:
    """A student that learns the original's distribution with ReLU in its FFNs.

    `parameters`: those that move, by name (`models.trainable`). The teacher and the student are on one device; with
    `compute` bfloat16 the student runs under autocast over float32 weights.
    """

    def __init__(
        self,
        teacher: Any,
        student: Any,
        parameters: dict[str, nn.Parameter],
        mixture: Mixture,
        model: ModelSpec,
        spec: RelufySpec,
        *,
        compute: torch.dtype,
        micro_windows: int,
        progress: Progress,
        interrupts: Interrupts,
        log: Log | None = None,
    ) -> None:
        self.teacher, self.student, self.parameters = teacher, student, parameters
        self.mixture, self.spec, self.compute = mixture, spec, compute
        self.progress, self.interrupts, self.log = progress, interrupts, log
        self.device = torch.device(next(iter(parameters.values())).device)
        arch = family(model.model_type)
        self.linears = arch.activated_linears(student)
        self.strength = torch.zeros((), device=self.device)
        self.counts = torch.zeros(len(self.linears), dtype=torch.int64, device=self.device)
        for layer in range(len(self.linears)):
            arch.set_activation(
                student, layer, PenalisedReLU(layer, self.strength, self.counts, spec.penalty == "capped")
            )
        self.optimizer = _optimizer(parameters, spec, self.device)
        steps = spec.planned_steps()
        warmup = spec.warmup_steps if steps is None else min(spec.warmup_steps, max(1, steps // 5))
        self.schedule = Schedule(steps or 0, warmup, micro_windows)
        self.control = SparsityControl(spec.active, PENALTY_START, spec.reach, boost=2.0, floor=0.01)
        self.step, self.active, self.weight = 0, 1.0, 0.0
        self.bad = torch.zeros((), dtype=torch.int64, device=self.device)
        self.curve: dict[str, list[float]] = {"step": [], "kl": [], "ce": [], "match": [], "active": [], "penalty": []}
        self.position: dict[str, Any] = mixture.position()
        for each in (teacher, student):
            fuse_norms(each)
        self._trunks = [m.base_model for m in (teacher, student)]
        if spec.compile:
            self._trunks = [torch.compile(trunk) for trunk in self._trunks]

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.spec.batch_windows * self.spec.sequence

    def rate(self) -> float:
        """The learning rate of the present step, 1 for the first: linear, then a cosine to zero."""
        peak, steps, warmup = self.spec.learning_rate, self.schedule.steps, self.schedule.warmup
        if self.step <= warmup:
            return peak * self.step / warmup
        return peak * 0.5 * (1 + math.cos(math.pi * (self.step - warmup - 1) / max(1, steps - warmup)))

    def one_step(self, batch: Batch) -> None:
        """One optimiser step. The position is the batch's afterwards."""
        self.step += 1
        self.counts.zero_()
        rows = self.schedule.micro_windows
        micros = batch.ids.shape[0] // rows
        self.strength.fill_(self.weight / (len(self.linears) * micros))
        value = self._shown()
        sums: dict[str, torch.Tensor] = {}
        for part in batch.ids.split(rows):
            for name, found in self._accumulate(part.to(self.device, non_blocking=True), value).items():
                sums[name] = sums.get(name, 0) + found
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.spec.clip, foreach=True)
        self.bad = torch.where((self.bad == 0) & ~norm.isfinite(), self.step, self.bad)
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.position = batch.position
        if value or self.step % LOOK == 0:
            self._look({name: found / self.batch_tokens for name, found in sums.items()}, value, rate)

    def _shown(self) -> bool:
        """Whether this step's losses go into the curve."""
        if not self.schedule.steps:
            return self.step == 1
        every = -(-self.schedule.steps // CURVE_POINTS)
        return self.step == 1 or self.step % every == 0 or self.step == self.schedule.steps

    def _accumulate(self, ids: torch.Tensor, value: bool) -> dict[str, torch.Tensor]:
        """Gradients of one forward over ids [windows, length], added to those there are; sums of the losses."""
        spec, tokens = self.spec, self.batch_tokens
        layers = spec.layer_match > 0
        teacher_trunk, student_trunk = self._trunks
        with torch.inference_mode():
            taught = teacher_trunk(input_ids=ids, use_cache=False, output_hidden_states=layers)
        with torch.autocast(self.device.type, self.compute, enabled=self.compute != torch.float32):
            learnt = student_trunk(input_ids=ids, use_cache=False, output_hidden_states=layers)
        hidden = learnt[0]
        labels = torch.full_like(ids, -1)
        labels[:, :-1] = ids[:, 1:]
        scored = self.spec.batch_windows * (spec.sequence - 1)
        head = self.student.get_output_embeddings()
        found = distil(
            hidden.flatten(0, 1), head, taught[0].flatten(0, 1), self.teacher.get_output_embeddings(),
            labels.flatten(), kl=spec.kl_weight, ce=spec.ce_weight * tokens / scored, compute=self.compute, value=value,
        )  # fmt: skip
        outputs, grads = [hidden], [found.hidden.view_as(hidden).div_(tokens)]
        sums = {}
        if found.kl is not None and found.ce is not None:
            sums = {"kl": found.kl, "ce": found.ce * tokens / scored}
        if layers:
            away = torch.zeros((), device=self.device)
            pairs = list(zip(learnt.hidden_states, taught.hidden_states, strict=True))[1:-1]
            for ours, theirs in pairs:
                distance, grad = match(ours, theirs)
                away += distance / len(pairs)
                outputs.append(ours)
                grads.append(grad.mul_(spec.layer_match / (len(pairs) * tokens)))
            sums["match"] = away
        torch.autograd.backward(outputs, grads)
        for parameter, grad in ((head.weight, found.weight), (head.bias, found.bias)):
            if grad is not None:
                grad = grad.div_(tokens)
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        return sums

    def _look(self, losses: dict[str, torch.Tensor], shown: bool, rate: float) -> None:
        """Read values back from the device: the share of active neurons, losses, whether all is finite."""
        width = self.linears[0].weight.shape[0]
        active = float(self.counts.sum()) / (len(self.linears) * width * self.batch_tokens)
        self.check()
        if shown:
            point = {"kl": 0.0, "ce": 0.0, "match": 0.0} | {name: float(loss) for name, loss in losses.items()}
            point |= {"active": active, "penalty": self.weight}
            self.curve["step"].append(self.step)
            for name, number in point.items():
                self.curve[name].append(round(number, 6))
            if self.log is not None:
                self.log(self.step, {**point, "learning_rate": rate})
        self.active = active

    def _push(self) -> None:
        """Set the penalty's weight for the next step."""
        steps = self.schedule.steps
        if self.spec.schedule == "l1":
            self.weight = self.spec.penalty_weight * self.step / steps if steps else 0.0
        elif steps:
            self.control.gain = min(0.1, max(0.01, 60 / steps))
            self.weight = self.control.step(self.step / steps, self.active)

    def check(self) -> None:
        """TrainingError if a gradient was not finite since the run began. Waits for the device."""
        step = int(self.bad)
        if step:
            raise TrainingError(
                f"step {step}: the loss or its gradient is not a finite number; lower --learning-rate (now "
                f"{self.spec.learning_rate:g}) and start again with --fresh; the last good state is kept"
            )

    def _fix_steps(self, began: float) -> None:
        """Decide the number of steps of a time budget from the speed so far."""
        budget = self.spec.seconds
        if self.schedule.steps or budget is None:
            return
        spent = time.monotonic() - began
        if self.step < self.spec.warmup_steps and (self.step < PROBE_STEPS or spent < PROBE_SHARE * budget):
            return
        speed = statistics.fmean(self.schedule.step_seconds[len(self.schedule.step_seconds) // 2 :])
        self.schedule.steps = self.step + max(1, int(MARGIN * (budget - spent) / speed))
        self.schedule.warmup = min(self.spec.warmup_steps, max(self.step, self.schedule.steps // 5))

    def run(self, folder: Path, checkpoint_seconds: float) -> None:
        """Train to the last step, saving in `folder` every so many seconds, at the end and on Ctrl-C.

        Raises KeyboardInterrupt after saving, TrainingError when a gradient is not finite, DataError without text.
        """
        began = time.monotonic() - self.schedule.seconds
        writer = StateWriter(folder)
        saved_at, saved_step, consistent = time.monotonic(), -1, True
        try:
            with Ahead(self.mixture, self.spec.batch_windows, self.device.type == "cuda") as ahead:
                while not self.schedule.steps or self.step < self.schedule.steps:
                    mark = time.monotonic()
                    batch = ahead.next()
                    consistent = False
                    self.one_step(batch)
                    self._push()
                    consistent = True
                    if not self.schedule.steps:
                        if self.device.type == "cuda":
                            torch.cuda.synchronize()
                        self.schedule.step_seconds.append(time.monotonic() - mark)
                        self._fix_steps(began)
                    self.schedule.seconds = time.monotonic() - began
                    if time.monotonic() - saved_at >= checkpoint_seconds and self.schedule.steps:
                        self.save(writer)
                        saved_at, saved_step = time.monotonic(), self.step
                    self._report()
                    self.interrupts.raise_pending()
            if saved_step != self.step:
                self.save(writer)
        except KeyboardInterrupt:
            if consistent and saved_step != self.step and self.step:
                self.save(writer)
            raise
        finally:
            writer.join()

    def _report(self) -> None:
        if self.schedule.steps:
            self.progress("train", self.step * self.batch_tokens, self.schedule.steps * self.batch_tokens)
        else:
            self.progress("measure speed", self.step, self.spec.warmup_steps)

    def save(self, writer: StateWriter) -> None:
        """Everything that the next step depends on; nothing is random. TrainingError if a gradient was not finite."""
        self.check()
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"w.{name}"] = parameter.detach()
            state = self.optimizer.state.get(parameter, {})
            if state:
                tensors |= {f"m.{name}": state["exp_avg"], f"v.{name}": state["exp_avg_sq"]}
        sources = []
        for i, at in enumerate(self.position["sources"]):
            tensors[f"pending.{i}"] = torch.from_numpy(at["pending"].astype(np.int64))
            sources.append({key: value for key, value in at.items() if key != "pending"})
        meta = {
            "step": self.step, "active": self.active, "weight": self.weight, "control": self.control.state(),
            "schedule": asdict(self.schedule), "curve": self.curve, "given": self.position["given"], "sources": sources,
        }  # fmt: skip
        writer.save(tensors, meta)

    def restore(self, folder: Path) -> bool:
        """Go on from the newest whole state in `folder`; False when there is none."""
        found = load_state(folder)
        if found is None:
            return False
        tensors, meta = found
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"w.{name}"])
                if f"m.{name}" in tensors:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(float(meta["step"]), device=self._step_device()),
                        "exp_avg": tensors[f"m.{name}"].to(self.device),
                        "exp_avg_sq": tensors[f"v.{name}"].to(self.device),
                    }
        self.step, self.active, self.weight = meta["step"], meta["active"], meta["weight"]
        self.control.restore(meta["control"])
        self.schedule = Schedule(**meta["schedule"])
        self.curve = meta["curve"]
        sources = [
            {**at, "pending": tensors[f"pending.{i}"].numpy().astype(np.uint32)} for i, at in enumerate(meta["sources"])
        ]
        self.position = {"given": meta["given"], "sources": sources}
        self.mixture.seek(self.position)
        return True

    def _step_device(self) -> torch.device:
        """Where AdamW keeps its step count: beside the weights if it is fused."""
        return self.device if self.device.type == "cuda" else torch.device("cpu")


def _optimizer(parameters: dict[str, nn.Parameter], spec: RelufySpec, device: torch.device) -> torch.optim.AdamW:
    """AdamW; vectors do not decay."""
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=BETAS, fused=device.type == "cuda"
    )


def choose_micro_windows(spec: RelufySpec, model: ModelSpec, itemsize: int, memory_bytes: int) -> int:
    """Windows of one forward: the largest divisor of a batch whose tensors kept for the way back fit in memory_bytes.

    itemsize: of the compute dtype. An estimate, on the safe side: what a layer keeps, the residual stream in float32.
    """
    d, layers = model.d_model, model.num_layers
    layer = d * (12 * itemsize + 6 * 4) + model.d_ff * 6 * itemsize
    matched = 3 * 4 * d if spec.layer_match else 0
    token_bytes = layers * (layer + matched) + 12 * 4 * d
    fit = max(1, memory_bytes // (token_bytes * spec.sequence))
    whole = spec.batch_windows
    return max(n for n in range(1, whole + 1) if whole % n == 0 and n <= fit)
