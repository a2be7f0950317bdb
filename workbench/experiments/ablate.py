"""Table 2 and more: the same text through each combination of techniques, on this machine.

Each row is a fresh engine. It takes the prompt, then the text that follows it token by token, so that every row
computes the same thing whatever its predictor thinks. The first tokens, which fill the window, are not counted.
A row with speculative decoding writes its own text after the same prompt, since what is given cannot be drafted.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.engines import check_backend, device_of, memory_bandwidth, open_engine
from workbench.engines.budget import process_rss
from workbench.engines.pipeline import FlashEngine
from workbench.engines.sampling import greedy
from workbench.engines.speculative import check_draft
from workbench.engines.stats import TokenStats
from workbench.errors import AblationError, DataError
from workbench.experiments.energy import EnergyMeter
from workbench.experiments.flash_bench import random_throughput
from workbench.experiments.record import SCHEMA, commit, machine, model_name, run_info, write_json
from workbench.flash.placement import read_placement
from workbench.flash.store import Store
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

WARM_UP = 8
LEAST_TOKENS = 4
PROBE_SECONDS = 0.4
SEQUENTIAL = 1 << 20
OWN_TEXT = "own greedy continuation"
TIMES = ("predictor", "io", "mem", "compute", "total")
Progress = Callable[[str, int, int], None]

BEYOND_ROWS: dict[str, Ablation] = {
    "all + coalesce": dataclasses.replace(PAPER_ROWS["+ bundling (all)"], coalesce=True),
    "all, io_uring": dataclasses.replace(PAPER_ROWS["+ bundling (all)"], io="io_uring"),
    "all + coalesce, prefetch": dataclasses.replace(PAPER_ROWS["+ bundling (all)"], coalesce=True, prefetch=True),
    "all, oracle": dataclasses.replace(PAPER_ROWS["+ bundling (all)"], predictor="oracle"),
}


def beyond_rows(run: RunSpec) -> dict[str, Ablation]:
    """`BEYOND_ROWS`, and speculative decoding where the run has a draft model."""
    best = PAPER_ROWS["+ bundling (all)"]
    drafted = {"all + speculative": dataclasses.replace(best, speculative=True)} if run.draft else {}
    return BEYOND_ROWS | drafted


class PeakRss:
    """Peak resident bytes of this process since the last `restart`, beyond what it held then.

    None where the system does not let the peak be set back (anything but Linux).
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        gc.collect()
        self.base = process_rss()
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.known = True
        except OSError:
            self.known = False

    def beyond(self) -> int | None:
        if not self.known:
            return None
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return max(0, peak * 1024 - self.base)


def ablate(
    store: Store,
    predictors: Predictors | None,
    text: np.ndarray,
    *,
    rows: Mapping[str, Ablation] | None = None,
    run: RunSpec | None = None,
    prompt: int = 64,
    tokens: int = 64,
    row_seconds: float = 600.0,
    backend: str = "torch-cpu",
    predictors_name: str = "",
    partial: Path | None = None,
    progress: Progress | None = None,
    command: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run each row over `text` (int64 [at least prompt + 9 tokens]) and return a record of kind ablation.

    A row ends after `tokens` counted tokens, or when it has run for `row_seconds` and has counted at least 4. Finished
    rows are kept in `partial`: the same request made again goes on after them. `data`: the card of the text, kept in
    the record. AblationError when a row cannot run, DeviceError for a backend that is not there.
    """
    run = run or RunSpec()
    rows = dict(rows if rows is not None else default_rows(predictors))
    need = prompt + WARM_UP + LEAST_TOKENS
    if len(text) < need:
        raise DataError(f"ablate: the text has {len(text)} tokens, at least {need} are needed; give --data with more")
    if predictors is None and any(a.predictor == "low_rank" for a in rows.values()):
        raise AblationError(
            "ablation: predictor='low_rank' needs trained predictors; pass --predictors DIR or use predictor='oracle'"
        )
    if any(a.placement for a in rows.values()):
        read_placement(store)  # refused now, not after the rows before it
    if any(a.speculative for a in rows.values()):
        check_draft(store, run)
    check_backend(backend)
    text = text[: prompt + WARM_UP + tokens]
    request = _request(store, predictors, text, rows, run, prompt, row_seconds, backend)
    done = _load_partial(partial, request)
    memory = memory_bandwidth(backend, run.compute_threads)
    total = len(rows) * (len(text) - prompt)
    for index, (name, ablation) in enumerate(rows.items()):
        if name not in done:
            tick = None
            if progress:
                begun = index * (len(text) - prompt)
                tick = functools.partial(_tick, progress, name, begun, total)
            done[name] = _row(name, ablation, store, predictors, text, prompt, run, row_seconds, memory, tick, backend)
            if partial:
                write_json(partial, {"request": request, "rows": done})
    if progress:
        progress("done", total, total)
    engines = ", ".join(sorted({a.io for a in rows.values()}))
    return {
        "schema": SCHEMA,
        "kind": "ablation",
        "machine": {**machine(store.path, device_of(backend)), "memory_bytes_per_s": memory},
        "run": run_info(
            model_name(store), store.spec, store.dtype, tokens=len(text) - prompt - WARM_UP, io=engines,
            window=run.window, dram=run.dram,
            seed=run.seed, predictors=predictors_name, command=command, data=data, backend=backend,
        ),
        "rows": [done[name] for name in rows],
    }  # fmt: skip


def _tick(progress: Progress, name: str, begun: int, total: int, count: int) -> None:
    progress(name, begun + count, total)


def default_rows(predictors: Predictors | None) -> dict[str, Ablation]:
    """The paper's rows; with the oracle's true activations where there are no predictors."""
    if predictors is not None:
        return dict(PAPER_ROWS)
    return {
        f"{name}, oracle" if a.predictor == "low_rank" else name: dataclasses.replace(
            a, predictor="oracle" if a.predictor == "low_rank" else a.predictor
        )
        for name, a in PAPER_ROWS.items()
    }


def _row(
    name: str,
    ablation: Ablation,
    store: Store,
    predictors: Predictors | None,
    text: np.ndarray,
    prompt: int,
    run: RunSpec,
    row_seconds: float,
    memory: float,
    tick: Callable[[int], None] | None,
    backend: str,
) -> dict[str, Any]:
    peak = PeakRss()
    with open_engine(store, ablation, predictors, run, backend) as engine:
        flash = probe_flash(store, ablation, run)
        steps: list[TokenStats] = []
        spent, count, rounds = 0.0, 0, 0
        meter = EnergyMeter(gpu=device_of(backend) != "cpu")
        with meter:
            for found in _decode(engine, text, prompt):
                spent += sum(stats.total_ms + stats.oracle_ms for stats in found) / 1000
                if count >= WARM_UP:
                    steps += found
                    rounds += 1
                    meter.read()
                else:
                    meter.restart()
                count += len(found)
                if tick:
                    tick(count)
                if spent > row_seconds and len(steps) >= LEAST_TOKENS:
                    break
        energy = meter.energy
        touched = _touched_bytes(store, engine, steps)
        dram = engine.plan.total
        rss = peak.beyond()
    del engine
    read = float(np.mean([s.read_bytes for s in steps]))
    io_seconds = sum(s.io_ms for s in steps) / 1000
    flash_ms, memory_ms = 1000 * read / flash, 1000 * touched / memory
    row: dict[str, Any] = {
        "name": name,
        "ablation": dataclasses.asdict(ablation),
        "dram_bytes": dram,
        "peak_rss_bytes": rss,
        "flash_bytes": read,
        "reads": float(np.mean([s.reads for s in steps])),
        "throughput": sum(s.read_bytes for s in steps) / io_seconds if io_seconds else None,
        "tokens": len(steps),
        "floor_ms": flash_ms + memory_ms,
        "overlapped_floor_ms": max(flash_ms, memory_ms),
        "window_trims": sum(s.window_trims for s in steps),
        "energy_j_per_token": None if energy.joules is None else energy.joules / len(steps),
        "energy_source": energy.source,
    }
    for part in TIMES:
        values = [getattr(s, f"{part}_ms") for s in steps]
        row[f"{part}_ms"], row[f"{part}_ms_p95"] = float(np.median(values)), float(np.percentile(values, 95))
    if any(s.waits for s in steps):
        row["waits"] = float(np.mean([s.waits for s in steps]))
        row["wait_ms"] = float(np.median([s.wait_ms for s in steps]))
    if ablation.prefetch:
        row |= _reading_ahead(steps)
    if ablation.speculative:
        row |= _speculation(steps, rounds, run)
    for count_name in ("active", "predicted", "loaded", "in_window"):
        row[count_name] = float(np.mean([getattr(s, count_name) for s in steps]))
    return row


def _decode(engine: FlashEngine, text: np.ndarray, prompt: int) -> Iterator[list[TokenStats]]:
    """What each token cost, as many as `text` has after its prompt; those of a round of drafting together."""
    given = text.tolist()
    if not engine.speculates:
        engine.prefill(given[:prompt])
        for token in given[prompt:]:
            yield [engine.step(token)[1]]
        return
    ids = given[:prompt]
    ids.append(greedy(engine.prefill(ids)[0]))
    while len(ids) <= len(given):
        found = engine.round(ids, len(given) - len(ids) + 1)
        ids += [token for token, _ in found]
        yield [stats for _, stats in found]


def _reading_ahead(steps: list[TokenStats]) -> dict[str, Any]:
    """What a row has of prefetch, a token: neurons read ahead, those of them that were not needed, the bytes of these,
    and the time of reading beside other work, which is in no other figure of the row."""
    return {
        "prefetched": float(np.mean([s.prefetched for s in steps])),
        "wasted": float(np.mean([s.wasted for s in steps])),
        "wasted_bytes": float(np.mean([s.wasted_bytes for s in steps])),
        "hidden_io_ms": float(np.median([s.hidden_io_ms for s in steps])),
    }


def _speculation(steps: list[TokenStats], rounds: int, run: RunSpec) -> dict[str, Any]:
    """What a row has of speculative decoding. Tokens of a round share what is read of memory, so that no floor is
    given."""
    drafted = sum(s.drafted for s in steps)
    return {
        "text": OWN_TEXT,
        "draft": model_name(Store.open(run.draft)),
        "draft_tokens": run.draft_tokens,
        "acceptance": sum(s.accepted for s in steps) / drafted if drafted else None,
        "tokens_per_round": len(steps) / rounds,
        "draft_ms": float(np.median([s.draft_ms for s in steps])),
        "floor_ms": None,
        "overlapped_floor_ms": None,
    }


def probe_flash(store: Store, ablation: Ablation, run: RunSpec) -> float:
    """Bytes/s that this store's file gives, now, to random reads of the size that the row makes."""
    if ablation.predictor == "off":
        path, size = store.bundled_path, min(SEQUENTIAL, run.chunk_bytes)
    elif ablation.bundling:
        path, size = store.bundled_path, store.layout.bundle_stride
    else:
        path, size = store.split_path, store.layout.row_stride
    size = max(4096, size // 4096 * 4096)
    size = min(size, max(4096, path.stat().st_size // 8 // 4096 * 4096))
    return random_throughput(path, ablation.io, size, run.depth, PROBE_SECONDS, np.random.default_rng(run.seed))[0]


def _touched_bytes(store: Store, engine: FlashEngine, steps: list[TokenStats]) -> float:
    """Bytes of DRAM that a token's arithmetic must read: resident matrices, predictors, and of the FFN the row that
    decides of each computed neuron and the other rows of those that fire. Of the embedding, only a tied head reads it
    whole."""
    resident = sum(slot.nbytes for group in store.groups for slot in group.tensors.values())
    lookups = {"embed": sum(slot.nbytes for slot in store.group("embed").tensors.values())}
    for embedding in engine.family.tied(store.spec).values():
        lookups["embed"] -= store.group("embed").tensors[embedding].nbytes
    row = store.layout.row_bytes
    computed = float(np.mean([s.predicted for s in steps])) * row
    fired = float(np.mean([s.active for s in steps])) * (store.layout.parts - 1) * row
    return resident - lookups["embed"] + engine.plan.predictor_bytes + computed + fired


def _request(
    store: Store,
    predictors: Predictors | None,
    text: np.ndarray,
    rows: Mapping[str, Ablation],
    run: RunSpec,
    prompt: int,
    row_seconds: float,
    backend: str,
) -> str:
    """A digest of everything that decides a row's result, so that only rows of the same request are taken over."""
    parts = {
        "store": store.digest,
        "predictors": [layer.threshold for layer in predictors.layers] if predictors else None,
        "model": predictors.model_digest if predictors else None,
        "text": hashlib.sha256(np.ascontiguousarray(text).tobytes()).hexdigest(),
        "rows": {name: dataclasses.asdict(a) for name, a in rows.items()},
        "run": dataclasses.asdict(run),
        "prompt": prompt,
        "row_seconds": row_seconds,
        "backend": backend,
        "commit": commit(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _load_partial(partial: Path | None, request: str) -> dict[str, dict[str, Any]]:
    if partial is None or not partial.exists():
        return {}
    try:
        found = json.loads(partial.read_text())
        return dict(found["rows"]) if found["request"] == request else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # half a file of an earlier version: its rows are measured again
