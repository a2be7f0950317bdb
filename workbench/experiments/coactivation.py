"""Appendix D: which neurons fire together, and why storing each with its closest friend does not pay."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.analysis.bundles import bundle_cost
from workbench.analysis.coactivation import (
    FRIENDS,
    NativePairs,
    PairCounter,
    Summary,
    popularity,
    power_law,
    rank_curve,
    rank_places,
    summarise,
)
from workbench.capture.spill import ActiveSpill, id_dtype
from workbench.capture.text import source_identity
from workbench.errors import DataError, RecordError
from workbench.experiments.active import ActiveText, Progress, ids_by_token
from workbench.experiments.record import SCHEMA, commit, machine, run_info
from workbench.models.hub import locate

COST_TOKENS = 1024
"""Tokens, at most, that the cost of bundles is measured on."""
HOTTEST = 0.01
ARRAYS = ("frequency", "friends", "friend_counts")


def analyze_coactivation(
    model: str | Path,
    data: str | Path,
    *,
    tokens: int = 10_240,
    friends: int = FRIENDS,
    window: int = 4,
    device: str = "cpu",
    threads: int = 0,
    arrays: Path | None = None,
    partial: Path | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A record of kind coactivation, one row a layer, from exact pair counts of the dense model's active neurons.

    One dense pass over the text writes the active ids to disk; then a layer at a time is counted, on the CPU or a
    CUDA card. Beside the model, memory holds one layer's ids. `friends`: closest friends kept of each neuron; with
    `arrays` a safetensors file gets them: frequency int64 [layers, d_ff], friends int32 and friend_counts uint32
    [layers, d_ff, friends]. `window`: the neuron window under which bundles of friends are also priced.

    `partial` is a directory for what is done so far, so that the same request made again goes on after the last whole
    stretch of text or layer; `discard` removes it. Without one, an interrupted run leaves nothing.
    """
    text = ActiveText(model, data, tokens, device)
    spec = text.spec
    if not 1 <= friends < spec.d_ff:
        raise DataError(f"friends={friends} is outside 1..{spec.d_ff - 1}, the other neurons of a layer")
    request = _request(model, data, text, friends, window)
    if partial is not None:
        _prepare(partial, request)
    with ActiveSpill(partial and partial / "active.ids", spec.num_layers, spec.d_ff, request) as spill:
        if not (partial and (partial / "captured").exists()):
            _capture(text, spill, progress)
            if partial:
                (partial / "captured").touch()
        rows, kept = [], {name: [] for name in ARRAYS}
        for layer in range(spec.num_layers):
            row, own = _layer(layer, spill, text, friends, window, threads, partial, progress)
            rows.append(row)
            for name in ARRAYS if arrays else ():
                kept[name].append(own[name])
        counted = len(spill.layer(0)[1]) - 1
    if arrays:
        _write_arrays(arrays, {name: np.stack(own) for name, own in kept.items()})
    return {
        "schema": SCHEMA,
        "kind": "coactivation",
        "machine": {**machine(Path(".")), "device": device},
        "run": run_info(
            text.name, spec, text.dtype, tokens=counted, io="", window=window, command=command, data=text.card
        ),
        "friends": friends,
        "hottest": HOTTEST,
        "cost_tokens": min(COST_TOKENS, counted),
        "ranks": rank_places(spec.d_ff).tolist(),
        "power_law": _law(rows, spec.d_ff),
        "rows": rows,
    }


def _law(rows: list[dict[str, Any]], d_ff: int) -> dict[str, float] | None:
    """The power law of the mean over layers."""
    law = power_law(rank_places(d_ff), np.mean([row["rank_share"] for row in rows], axis=0))
    return {"exponent": law.exponent, "scale": law.scale, "r2": max(0.0, law.r2)} if law else None


def discard(partial: Path) -> None:
    """Remove what an analysis that is finished, or will not be taken up again, kept in `partial`."""
    if partial.is_dir():
        shutil.rmtree(partial)


def _capture(text: ActiveText, spill: ActiveSpill, progress: Progress | None) -> None:
    dtype = id_dtype(text.spec.d_ff)

    def sink(layer: int, mask: torch.Tensor) -> None:
        spill.add(layer, *ids_by_token(mask, dtype))

    text.run(sink, skip=spill.stretches, progress=progress)


def pair_counter(ids: np.ndarray, offsets: np.ndarray, d_ff: int, device: str) -> PairCounter:
    """Counts of one layer's pairs, on the CPU or a CUDA card."""
    if device == "cuda":
        from workbench.analysis.coactivation_cuda import CudaPairs

        return CudaPairs(ids, offsets, d_ff)
    return NativePairs(ids, offsets, d_ff)


def _layer(
    layer: int,
    spill: ActiveSpill,
    text: ActiveText,
    friends: int,
    window: int,
    threads: int,
    partial: Path | None,
    progress: Progress | None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A layer's row and arrays, from `partial` where they are there."""
    file = partial / f"layer-{layer}.npz" if partial else None
    if file and file.exists():
        with np.load(file, allow_pickle=False) as stored:
            return json.loads(str(stored["row"])), {name: stored[name] for name in ARRAYS}
    spec, d_ff = text.spec, text.spec.d_ff
    ids, offsets = spill.layer(layer)

    def tick(done: int, total: int) -> None:
        if progress:
            progress(f"layer {layer}, pairs", layer * total + done, spec.num_layers * total)

    frequency = np.bincount(ids, minlength=d_ff).astype(np.int64)
    counter = pair_counter(ids, offsets, d_ff, text.device)
    found = summarise(counter, d_ff, friends, threads=threads, progress=tick)
    counted = min(COST_TOKENS, len(offsets) - 1)
    uses = [ids[offsets[t] : offsets[t + 1]].astype(np.int64) for t in range(counted)]
    row = {"layer": layer, **layer_row(found, frequency, len(offsets) - 1, uses, window, text.sequence)}
    own = {"frequency": frequency, "friends": found.friends, "friend_counts": found.friend_counts}
    if file:
        writing = file.with_suffix(".writing.npz")
        np.savez(writing, row=np.array(json.dumps(row)), **own)  # type: ignore[arg-type]
        os.replace(writing, file)
    return row, own


def layer_row(
    found: Summary, frequency: np.ndarray, tokens: int, uses: list[np.ndarray], window: int, sequence: int
) -> dict[str, Any]:
    """What a record says of a layer. uses: active ids of the tokens that bundles are priced on.

    active: neurons a token; never: neurons that did not fire. top_share, friends_share: of all firing together with
    others, what falls to each neuron's closest friend, and to the friends kept. distinct_friends: neurons that are
    anyone's closest friend; hot_friends: share of neurons whose closest friend is among the 1% that fire most;
    top_friend: share of neurons that have the most popular one. rank_share: by `ranks`, how often the friend of that
    rank fires when the neuron does, mean over neurons, with a power law's exponent and r2 over the first tenth.
    popularity: by `ranks` as places, the share of neurons whose closest friend is the one at that place. pairs: by
    count 0, 1, 2..3, 4..7 and so on. The last fields are those of `bundle_cost`, without a window and with one; null
    where no token has an active neuron.
    """
    ranks = rank_places(len(frequency))
    totals, with_friends = float(found.totals.sum()), found.friend_counts.astype(np.float64)
    curve = rank_curve(found, frequency)
    law, friends = power_law(ranks, curve), popularity(found.friends[:, 0], frequency, HOTTEST)
    places = np.zeros(len(frequency))
    places[: len(friends.by_place)] = friends.by_place
    having = max(1, friends.with_friend)
    seen, pairs = int(np.flatnonzero(found.pairs).max(initial=0)) + 1, found.pairs // np.uint64(2)
    row: dict[str, Any] = {
        "active": float(frequency.sum() / tokens),
        "never": int((frequency == 0).sum()),
        "top_share": float(with_friends[:, 0].sum() / totals) if totals else 0.0,
        "friends_share": float(with_friends.sum() / totals) if totals else 0.0,
        "distinct_friends": len(friends.by_place),
        "hot_friends": friends.hot / having,
        "top_friend": float(places[0] / having),
        "exponent": law.exponent if law else None,
        "r2": max(0.0, law.r2) if law else None,
        "rank_share": curve.tolist(),
        "popularity": (places[ranks - 1] / having).tolist(),
        "pairs": [int(count) for count in pairs[:seen]],
    }
    fires = any(len(ids) for ids in uses)
    for name, k in (("bundle", 0), ("window", window)):
        cost = bundle_cost(uses, found.friends[:, 0], k, sequence) if fires else None
        row[f"{name}_bytes"] = cost.bytes_ratio if cost else None
        row[f"{name}_duplicates"] = cost.duplicates if cost else None
        row[f"{name}_all_duplicates"] = cost.all_duplicates if cost else None
    return row


def _request(model: str | Path, data: str | Path, text: ActiveText, friends: int, window: int) -> str:
    """A digest of everything that decides the result, so that only work on the same request is taken over."""
    path, name = locate(model)
    files = sorted(p for p in Path(path).iterdir() if p.is_file())
    parts = {
        "model": [name, [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]],
        "data": source_identity(data),
        "asked": [text.wanted, text.sequence, text.device, friends, window],
        "commit": commit(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _prepare(partial: Path, request: str) -> None:
    """The directory, empty unless what it holds belongs to the same request."""
    mark = partial / "request"
    try:
        if partial.is_dir() and not (mark.is_file() and mark.read_text() == request):
            if any(partial.iterdir()) and not mark.is_file():
                raise RecordError(f"{partial}: holds something else than an unfinished analysis; move it away")
            shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
        mark.write_text(request)
    except OSError as error:
        raise RecordError(f"{partial}: cannot be written ({error.strerror}); choose another --json") from error


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    writing = path.with_name(path.name + ".writing")
    try:
        save_file(arrays, str(writing))
        os.replace(writing, path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror or error}); choose another --arrays") from error
