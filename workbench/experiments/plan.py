"""Before a model is downloaded or converted: does it fit in this much DRAM, with which window, and how fast will it be.

Each row of the ablation is counted as the engine would run it (bytes and reads of flash, neurons, bytes of DRAM) and
priced with what this machine was measured at; see `cost`. Nothing of the model is needed but its config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.ablation import PAPER_ROWS, Ablation, IoEngine
from workbench.engines.budget import DramPlan, compute_threads, context_tokens, plan_dram
from workbench.errors import BudgetError, DeviceError
from workbench.experiments import calibrate as calibration
from workbench.experiments.cost import (
    ComputeFit,
    Counts,
    FlashFit,
    ReadCalls,
    TokenCost,
    as_dict,
    scattered_calls,
    sequential_calls,
    token_cost,
)
from workbench.experiments.plan_inputs import Outline, Use, outline, read_flash_fit, use_of
from workbench.experiments.record import SCHEMA, machine, run_info
from workbench.flash.manifest import MANIFEST
from workbench.flash.store import Store
from workbench.models import family
from workbench.predictor.low_rank import Predictors
from workbench.spec import DType, RunSpec

ALL = "+ bundling (all)"
ROWS: dict[str, Ablation] = {**PAPER_ROWS, "all + coalesce": dataclasses.replace(PAPER_ROWS[ALL], coalesce=True)}
WINDOWS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
VARIATION = 1.1
"""Slots that a layer needs over the mean number of neurons that its window keeps, for the window to be cut short for
none of the tokens, which differ."""
ALIKE = 1.001
"""Windows whose times differ by no more count as equal: slots are whole, and a window that is cut short is what is left
of it, however long it was."""
LEAST_FILE = 16 << 20
PROMPT = 128
"""Tokens before the first one that is planned for, the paper's."""
KV_BYTES: dict[DType, int] = {"float32": 4, "float16": 4 + 6, "bfloat16": 4 + 6}
"""What attention moves for each value of the KV cache: it reads float32, and what is kept in 16 bits is widened before:
read and written."""
Progress = Callable[[str, int, int], None]


def count_token(model: Outline, ablation: Ablation, run: RunSpec, dram: DramPlan, use: Use, position: int) -> Counts:
    """What one token does, after `position` others, within a DRAM plan made for the same ablation and run."""
    spec, layout = model.spec, model.layout
    heads, width = family(spec.model_type).kv_shape(spec)
    calls: list[ReadCalls] = []
    if not ablation.hybrid:
        for group in model.groups:
            reads = -(-group.nbytes // run.chunk_bytes)
            calls.append(ReadCalls(1, reads, group.nbytes / reads))
    sparse = ablation.predictor != "off"
    loaded = kept = predicted = 0.0
    active = spec.d_ff * sum(use.active)
    slots = dram.slots or (0,) * spec.num_layers
    for layer, capacity in enumerate(slots):
        if not sparse:
            new, held, wanted = float(spec.d_ff - capacity), float(capacity), float(spec.d_ff)
            block = max(1, dram.scratch_bytes // dram.slot_bytes)
            calls += sequential_calls(int(new), block, layout, ablation, run.chunk_bytes)
        else:
            share = use.predicted[layer]
            wanted = share * spec.d_ff
            held = new = wanted
            if ablation.windowing:
                fits = use.reuse.window_within(share, run.window, capacity / spec.d_ff)
                if fits >= 0:
                    held, new = (spec.d_ff * each for each in use.reuse.shares(share, fits))
            call = scattered_calls(new, spec, layout, ablation, run)
            calls += [call] if call else []
        loaded, kept, predicted = loaded + new, kept + held, predicted + wanted
    row = layout.row_bytes
    return Counts(
        layers=spec.num_layers,
        reads=tuple(calls),
        predicted=predicted,
        active=min(active, predicted),
        loaded=loaded,
        in_window=kept,
        changed=loaded * (2 if ablation.windowing else 1),
        linear_bytes=model.linear_bytes,
        ffn_bytes=row * (predicted + min(active, predicted) * (layout.parts - 1)),
        attention_bytes=2.0 * KV_BYTES[run.kv_dtype] * spec.num_layers * position * heads * width,
        predictor_bytes=use.nbytes if ablation.predictor == "low_rank" else 0,
        mode="sparse" if sparse else "dense" if ablation.hybrid else "streamed",
    )


def window_fits(model: Outline, use: Use, window: int, dram: DramPlan) -> bool:
    """Whether every layer's slots hold the neurons of so many tokens before, without cutting the window short."""
    d_ff = model.spec.d_ff
    return all(
        use.reuse.window_within(share, window, capacity / VARIATION / d_ff) == window or capacity == d_ff
        for share, capacity in zip(use.predicted, dram.slots, strict=True)
    )


def window_bytes(model: Outline, use: Use, run: RunSpec) -> int:
    """Bytes of DRAM, to a thousandth of the model, with which run.window is not cut short."""

    def planned(budget: int) -> DramPlan:
        return plan_dram(model, ROWS[ALL], use, dataclasses.replace(run, dram=f"{budget}B"))

    whole = planned(4 * model.model_bytes + (1 << 40))
    low, high = plan_dram(model, ROWS[ALL], use, run).fixed, whole.total
    while high - low > model.model_bytes / 1000:
        middle = (low + high) // 2
        try:
            enough = window_fits(model, use, run.window, planned(middle))
        except BudgetError:
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    return high


def plan(
    model: str | Path,
    *,
    dram: str,
    dtype: DType | None = None,
    predictors: Predictors | str | Path | None = None,
    reuse: str | Path | None = None,
    flash: FlashFit | str | Path | None = None,
    compute: ComputeFit | None = None,
    store_dir: Path = Path(),
    backend: str = "torch-cpu",
    window: int | None = None,
    depth: int | None = None,
    context: int = 512,
    kv_dtype: DType = "float32",
    tokens: int = 256,
    threads: int = 0,
    io: IoEngine = "threads",
    seed: int = 0,
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A record of kind plan: what goes where in DRAM, and for each row of the ablation what a token is predicted to
    take, in the middle of `tokens` after a prompt of 128.

    model: checkpoint directory, store, config.json or hub id. dram: the budget. dtype: of the store. predictors and
    reuse: of this model, else the paper's figures. flash: a fit or a record of `bench flash`, else flash is measured
    now, where the model is a store by its own file, else under `store_dir`. compute: else this machine is calibrated
    now. window and depth: picked when None, as those that make 'all' fastest; the window may be one that is cut short.
    io: the reader engine that is measured.

    Raises BudgetError, with the least that works, DeviceError for a backend that cannot be predicted, CheckpointError,
    PredictorError, RecordError or StoreError, one line each.
    """
    if backend != "torch-cpu":
        raise DeviceError(f"backend {backend!r}: only torch-cpu can be planned for; leave --backend out")
    shape = outline(model, dtype)
    trained = Predictors.load(predictors) if isinstance(predictors, str | Path) else predictors
    use = use_of(shape, trained, reuse)
    fit = read_flash_fit(flash) if isinstance(flash, str | Path) else flash
    run = RunSpec(window=window if window is not None else 0, dram=dram, depth=depth or 32, context=context,
                  kv_dtype=kv_dtype, compute_threads=threads, seed=seed)  # fmt: skip
    plan_dram(shape, ROWS[ALL], use, run)  # refused now, not after the measurements
    position = min(PROMPT + tokens // 2, context_tokens(shape, run))
    if fit is None:
        fit = calibration.measure_flash(store_dir, engine=io, seed=seed, progress=progress, file=_stored_file(model))
    if compute is None:
        work = workload(shape, use, position)
        compute = calibration.calibrate(
            work, store_dir, threads=compute_threads(run), engine=fit.engine, seed=seed, progress=progress
        )
    chosen, windows, depths = choose(shape, use, run, fit, compute, position, window, depth)
    if progress:
        progress("done", 1, 1)
    whole = plan_dram(shape, ROWS[ALL], use, chosen)
    return {
        "schema": SCHEMA,
        "kind": "plan",
        "machine": machine(store_dir),
        "run": run_info(
            shape.name, shape.spec, shape.dtype, tokens=tokens, io=fit.engine, window=chosen.window, dram=dram,
            seed=seed, predictors=_name(predictors), command=command, backend=backend,
        ),
        "model_bytes": shape.model_bytes,
        "position": position,
        "dram": {**whole.to_dict(), "slots": list(whole.slots)},
        "slot_neurons": sum(whole.slots),
        "ffn_neurons": shape.spec.ffn_neurons,
        "window": chosen.window,
        "window_fits": window_fits(shape, use, chosen.window, whole),
        "depth": chosen.depth,
        "compute_threads": compute.threads,
        "windows": windows,
        "depths": depths,
        "assumed": [*_activation(shape), *use.assumed],
        "predicted_share": sum(use.predicted) / len(use.predicted),
        "active_share": sum(use.active) / len(use.active),
        "reuse": as_dict(use.reuse),
        "flash": as_dict(fit),
        "compute": as_dict(compute),
        "rows": [row_of(name, ablation, shape, use, chosen, fit, compute, position) for name, ablation in ROWS.items()],
    }  # fmt: skip


def workload(model: Outline, use: Use, position: int) -> calibration.Workload:
    """What the kernels are timed at for a model: its own sizes."""
    spec, row = model.spec, model.layout.row_bytes
    predicted, active = (sum(shares) / len(shares) for shares in (use.predicted, use.active))
    touched = model.linear_bytes + use.nbytes + row * spec.ffn_neurons * (predicted + active * (spec.parts - 1))
    return calibration.Workload(
        spec, model.dtype, int(touched), min(1.0, active / predicted), active, max(8, int(predicted * spec.d_ff)),
        position, use.rank, use.stored,
    )  # fmt: skip


def choose(
    model: Outline,
    use: Use,
    run: RunSpec,
    flash: FlashFit,
    compute: ComputeFit,
    position: int,
    window: int | None,
    depth: int | None,
) -> tuple[RunSpec, list[dict[str, Any]], list[dict[str, Any]]]:
    """The run with the window and the reads in flight that make 'all' fastest, and what the others would give.

    Windows up to twice the longest that the reuse curve was measured at are considered. Of equal ones the shorter.
    """

    def cost(each: RunSpec) -> tuple[DramPlan, TokenCost]:
        dram = plan_dram(model, ROWS[ALL], use, each)
        counts = count_token(model, ROWS[ALL], each, dram, use, position)
        return dram, token_cost(counts, flash, compute, each.depth)

    tried = [k for k in WINDOWS if k <= max(4, 2 * use.reuse.longest)] if window is None else [window]
    windows = []
    for k in tried:
        each = dataclasses.replace(run, window=k)
        dram, price = cost(each)
        fits = window_fits(model, use, k, dram)
        need = window_bytes(model, use, each)
        windows.append({"window": k, "need_bytes": need, "fits": fits, "total_ms": price.total_ms})
    least = min(row["total_ms"] for row in windows)
    best = dataclasses.replace(run, window=next(row["window"] for row in windows if row["total_ms"] <= ALIKE * least))
    depths = []
    for count in flash.depths if depth is None else (depth,):
        depths.append({"depth": count, "total_ms": cost(dataclasses.replace(best, depth=count))[1].total_ms})
    best = dataclasses.replace(best, depth=min(depths, key=lambda row: (row["total_ms"], row["depth"]))["depth"])
    return best, windows, depths


def row_of(
    name: str,
    ablation: Ablation,
    model: Outline,
    use: Use,
    run: RunSpec,
    flash: FlashFit,
    compute: ComputeFit,
    position: int,
) -> dict[str, Any]:
    """One row: counts and milliseconds of a token, or `problem`, in one line, where the budget is too small for it."""
    head = {"name": name, "ablation": dataclasses.asdict(ablation)}
    try:
        dram = plan_dram(model, ablation, use, run)
    except BudgetError as error:
        return {**head, "problem": str(error)}
    counts = count_token(model, ablation, run, dram, use, position)
    return {**head, "problem": "", "dram_bytes": dram.total, **row_figures(counts, flash, compute, run.depth)}


def row_figures(counts: Counts, flash: FlashFit, compute: ComputeFit, depth: int) -> dict[str, float]:
    """Counts and predicted milliseconds, by the names that a row of `ablate` has."""
    cost = token_cost(counts, flash, compute, depth)
    return {
        "flash_bytes": counts.flash_bytes,
        "reads": counts.read_count,
        "predicted": counts.predicted,
        "active": counts.active,
        "loaded": counts.loaded,
        "in_window": counts.in_window,
        "io_ms": cost.io_ms,
        "mem_ms": cost.mem_ms,
        "compute_ms": cost.compute_ms,
        "predictor_ms": cost.predictor_ms,
        "total_ms": cost.total_ms,
        "tokens_per_s": 1000 / cost.total_ms,
    }


def _activation(model: Outline) -> tuple[str, ...]:
    name = model.spec.activation
    if name in ("relu", "relu2"):
        return ()
    return (f"Its activation is {name}, which is never zero: this is a plan for its version after `workbench relufy`.",)


def _stored_file(model: str | Path) -> Path | None:
    """The file of neurons where the model is a store that has one of some size; the smallest measure nothing."""
    if not (Path(model) / MANIFEST).is_file():
        return None
    file = Store.open(model).bundled_path
    return file if file.stat().st_size >= LEAST_FILE else None


def _name(predictors: Predictors | str | Path | None) -> str:
    return Path(predictors).name if isinstance(predictors, str | Path) else "given" if predictors else ""
