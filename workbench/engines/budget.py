"""The DRAM budget: what goes where, planned before anything is read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from workbench.ablation import Ablation
from workbench.engines.kv import cache_bytes
from workbench.errors import BudgetError
from workbench.flash.layout import Group, RecordLayout, round_up
from workbench.spec import ModelSpec, RunSpec, format_bytes, parse_dram

STREAM_BYTES, PROMPT_BYTES = 128 << 20, 32 << 20
"""Scratch, where neurons that are used once pass through. Without a predictor that is every token's FFN: as large as
a layer's, at most the first. With one it is the prompt's: half a layer's, at most the second."""
AHEAD_SHARE = 8
"""Room for what is read ahead: one neuron in so many of a layer, in no more bytes than the prompt's scratch."""
LEAST_SLOTS = 64
SLOT_MARGIN = 1.5
"""Slots over the mean number of neurons in the window, and one token's on top, since tokens differ."""


class Planned(Protocol):
    """What a plan asks of a model: a `Store` has it, and so has a model of which only the config is there. `path` is
    what messages call it."""

    @property
    def path(self) -> Path: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def layout(self) -> RecordLayout: ...
    @property
    def groups(self) -> tuple[Group, ...]: ...
    @property
    def model_bytes(self) -> int: ...


class Calibration(Protocol):
    """What a plan asks of predictors: their bytes, and in `card["layers"]` how many neurons are `predicted` a token."""

    @property
    def nbytes(self) -> int: ...
    @property
    def card(self) -> Mapping[str, Any]: ...


def slot_bytes(store: Planned) -> int:
    """Bytes of a neuron in DRAM: its record, at the stride of flash where direct reads can land in place."""
    layout = store.layout
    return layout.bundle_stride if layout.bundle_stride % layout.alignment == 0 else round_up(layout.record_bytes, 64)


@dataclass(frozen=True)
class DramPlan:
    """Bytes of DRAM by use. `slots` holds the capacity of each layer in neurons; `total` is the sum of all bytes."""

    budget_bytes: int
    resident_bytes: int
    predictor_bytes: int
    kv_bytes: int
    scratch_bytes: int
    slot_bytes: int
    slots: tuple[int, ...]
    ahead_bytes: int = 0
    draft_bytes: int = 0

    @property
    def total(self) -> int:
        return self.fixed + sum(self.slots) * self.slot_bytes

    @property
    def fixed(self) -> int:
        return (
            self.resident_bytes + self.predictor_bytes + self.kv_bytes + self.scratch_bytes + self.ahead_bytes
            + self.draft_bytes
        )  # fmt: skip

    def to_dict(self) -> dict[str, int | tuple[int, ...]]:
        return {**asdict(self), "total_bytes": self.total}


def plan_dram(
    store: Planned, ablation: Ablation, predictors: Calibration | None, run: RunSpec, draft_bytes: int = 0
) -> DramPlan:
    """Share the budget out. BudgetError, with the least that works, when it cannot hold what it must.

    Fixed: resident weights (one layer's, without `hybrid`), predictors, KV cache, scratch, and the `draft_bytes` of a
    draft model. The rest is slots: with a predictor, each layer gets them by the number of neurons that are predicted
    there (the paper's Req_i), no more than its window needs; without one, each layer keeps as many neurons as fit.
    """
    spec, each = store.spec, slot_bytes(store)
    try:
        budget = parse_dram(run.dram, store.model_bytes)
    except ValueError as error:
        raise BudgetError(f"--dram: {error}") from None
    by_group = {group.name: group.nbytes for group in store.groups}
    layers = [by_group[f"layer.{i}"] for i in range(spec.num_layers)]
    resident = sum(by_group.values()) if ablation.hybrid else by_group["embed"] + by_group["head"] + layers[0]
    low_rank = ablation.predictor == "low_rank" and predictors is not None
    streams = ablation.predictor == "off"
    scratch = min(STREAM_BYTES // each, spec.d_ff) if streams else min(PROMPT_BYTES // each, -(-spec.d_ff // 2))
    ahead = max(1, min(PROMPT_BYTES // each, -(-spec.d_ff // AHEAD_SHARE))) if ablation.prefetch else 0
    plan = DramPlan(
        budget_bytes=budget,
        resident_bytes=resident,
        predictor_bytes=predictors.nbytes if low_rank and predictors is not None else 0,
        kv_bytes=cache_bytes(spec, context_tokens(store, run), run.kv_dtype),
        scratch_bytes=max(1, scratch) * each,
        slot_bytes=each,
        slots=(),
        ahead_bytes=ahead * each,
        draft_bytes=draft_bytes,
    )
    streams_all = streams and not ablation.hybrid
    least_slots = 0 if streams else min(LEAST_SLOTS, spec.d_ff)
    least = plan.fixed + spec.num_layers * least_slots * each
    if least > budget:
        raise BudgetError(
            f"{store.path}: a DRAM budget of {format_bytes(budget)} ({run.dram}) is too small for the resident part; "
            f"the least that works with {ablation.describe()} is {least} bytes, so pass --dram {-(-least // 2**20)}MiB"
        )
    if streams_all:
        return _with_slots(plan, [0] * spec.num_layers)
    wanted = _wanted(store, ablation, predictors if low_rank else None, run)
    return _with_slots(plan, share_out((budget - plan.fixed) // each, wanted, least_slots))


def check_gpu_memory(needed: int, limit: int, what: str) -> None:
    """BudgetError when a GPU may use fewer than `needed` bytes."""
    if needed > limit:
        raise BudgetError(
            f"{what}: {format_bytes(needed)} do not fit the {format_bytes(limit)} that the GPU may use; "
            "pass a smaller --dram"
        )


def context_tokens(store: Planned, run: RunSpec) -> int:
    """Tokens that the KV cache holds."""
    positions = store.spec.max_positions
    return min(run.context, positions) if run.context else positions


def compute_threads(run: RunSpec) -> int:
    """Threads of the CPU kernels: those asked for, else one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return run.compute_threads or cores


def share_out(available: int, wanted: list[int], least: int) -> list[int]:
    """Slots by layer: what each wants if all fits, else in proportion, none below `least`."""
    if sum(wanted) <= available:
        return wanted
    low, high = 0.0, 1.0  # the largest common share that fits
    for _ in range(50):
        middle = (low + high) / 2
        fits = sum(max(least, int(w * middle)) for w in wanted) <= available
        low, high = (middle, high) if fits else (low, middle)
    return [max(least, int(w * low)) for w in wanted]


def _wanted(store: Planned, ablation: Ablation, predictors: Calibration | None, run: RunSpec) -> list[int]:
    spec = store.spec
    if predictors is None or ablation.predictor == "off":
        return [spec.d_ff] * spec.num_layers
    # the tokens of a round of speculative decoding are held at the same time
    together = 1 + (run.draft_tokens if ablation.speculative else 0)
    tokens = run.window + together if ablation.windowing else together
    means = [float(entry["predicted"]) for entry in predictors.card["layers"]]
    return [min(spec.d_ff, round_up(int((SLOT_MARGIN * tokens + 1) * mean) + LEAST_SLOTS, 64)) for mean in means]


def _with_slots(plan: DramPlan, slots: list[int]) -> DramPlan:
    return dataclasses.replace(plan, slots=tuple(slots))


def process_rss() -> int:
    """Resident bytes of this process now (Linux: /proc; elsewhere the peak that getrusage knows)."""
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
