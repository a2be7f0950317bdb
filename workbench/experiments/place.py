"""Reads a token before and after the neurons are placed: an order fitted on training text, measured on held-out text.

Beyond the paper, which found that bundling a neuron with its closest friend fails (appendix D). The order is fitted to
what the engine loads, the neurons that are predicted and not in the window, in a dense run of the training part of the
text; the records are written into the store in that order. Then the held-out part is counted, exactly, as the reader
would plan it, and run through the engine with placement off and on, in turn and over the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.ablation import Ablation
from workbench.analysis import placement as orders
from workbench.capture.activations import FfnTap, dense, run_trunk, tokenizer
from workbench.capture.text import DataCard, split_of, windows_and_card
from workbench.engines import open_engine
from workbench.engines.budget import context_tokens, plan_dram
from workbench.engines.ffn import PackedPredictor
from workbench.engines.stats import TokenStats
from workbench.errors import BudgetError, DataError, StoreError
from workbench.experiments.record import SCHEMA, machine, model_name, run_info
from workbench.flash.placement import Placement, is_placed, read_placement, write_placement
from workbench.flash.store import Store
from workbench.models import family
from workbench.models.checkpoint import Checkpoint
from workbench.models.hub import locate
from workbench.models.weights import Weights
from workbench.predictor.low_rank import Predictors
from workbench.spec import RunSpec

SEQUENCE = 256
"""Tokens of a stretch of text that is read from an empty context."""
HELD_OUT_SHARE = 0.2
"""Of the documents, by their own hash: never fitted on."""
GAPS = (0, 4096)
"""Merging gaps that are looked at beside the run's own, in bytes."""
PROMPT, WARM_UP, COUNTED = 32, 8, 48
"""Tokens of each stretch that the engine takes at once, then one by one and not counted, then counted."""
MOST_RUN = 8
"""Runs of so many neurons and more are counted together."""
SPECTRAL_MOST = 4096
Progress = Callable[[str, int, int], None]
Layers = list[orders.PackedLoads]
"""By layer and token: sorted ids."""


def place(
    model: str | Path,
    store: Store,
    data: str | Path,
    *,
    predictors: Predictors | None = None,
    predictors_name: str = "",
    tokens: int = 16384,
    held_out: int = 4096,
    method: str = "clusters",
    run: RunSpec | None = None,
    rounds: int = 6,
    compare: bool = False,
    progress: Progress | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Place the neurons of `store`, the store of the dense checkpoint `model`, and return a record of kind placement.

    The order is fitted on `tokens` tokens of the training part of `data` under the window of `run`, to what
    `predictors` predict (without them, to the neurons that fire), and counted on `held_out` tokens of the rest. The
    engine then takes `rounds` stretches of held-out text. method: one of `workbench.analysis.placement.METHODS`.
    compare: count every method on the held-out text. A placement that the same request wrote before is kept, so an
    interrupted run goes on with the measurement.

    StoreError: another model's store, cannot be written. DataError: too little text.
    """
    run = run or RunSpec()
    if method not in orders.METHODS:
        raise StoreError(f"{store.path}: no placement method {method!r}; choose one of {', '.join(orders.METHODS)}")
    _check_model(model, store)
    if predictors is not None:
        predictors.check(store.spec)
    layout = store.layout
    flash = orders.Flash(layout.bundle_stride, layout.record_bytes, run.coalesce_gap_bytes, run.chunk_bytes)
    text = _Text(model, data)
    test, test_card = text.windows(held_out, train=False)
    if context_tokens(store, run) < (needed := PROMPT + WARM_UP + COUNTED):
        raise BudgetError(f"{store.path}: {needed} tokens are measured at a time; pass --context {needed} or more")
    plan_dram(store, _measured_with(predictors), predictors, run)  # refused now, not when the store is placed
    capture = _Capture(model, store, predictors, run.window, progress)
    train, card = text.windows(tokens, train=True)
    request = {
        "method": method,
        "reach": flash.reach if method == "clusters" else 1,
        "window": run.window,
        "seed": run.seed,
        "tokens": len(train) * SEQUENCE,
        "loads": "predicted" if predictors is not None else "active",
        "predictors": predictors_name,
        "thresholds": [layer.threshold for layer in predictors.layers] if predictors is not None else [],
        "data": card.as_dict(),
    }
    placement, fitted = _placed_before(store, request), None
    if placement is None or compare:
        fitted = _Fitted(capture.loads(train, "training text"), flash, run.seed, store.spec.d_ff)
    if placement is None:
        assert fitted is not None
        order, counted = fitted.order(method, progress)
        placement = write_placement(store, order, {"request": request, "fitted": counted}, progress)
    loads = capture.loads(test, "held-out text")
    del capture.model
    by_layer = [_layer_row(layer, own, placement, flash) for layer, own in enumerate(loads)]
    methods = fitted.compare(loads, progress) if compare and fitted is not None else []
    rows = _measure(store, predictors, test, run, rounds, progress)
    return {
        "schema": SCHEMA,
        "kind": "placement",
        "machine": machine(store.path),
        "run": run_info(
            model_name(store), store.spec, store.dtype, tokens=sum(len(own) for own in loads[:1]), io=Ablation().io,
            window=run.window, dram=run.dram, seed=run.seed, predictors=predictors_name, command=command,
            data=test_card.as_dict(),
        ),
        "placement": {**placement.card["provenance"]["request"], "digest": placement.digest},
        "fitted": placement.card["provenance"]["fitted"],
        "gap_bytes": flash.gap,
        "stride": flash.stride,
        "rows": rows,
        "planned": _planned(loads, placement, flash),
        "by_layer": by_layer,
        "runs": _run_shares(loads, placement, flash),
        "methods": methods,
    }  # fmt: skip


def _check_model(model: str | Path, store: Store) -> None:
    path, name = locate(model)
    with Checkpoint(path, name) as checkpoint:
        digest = Weights(checkpoint).source()["digest"]
    if digest != store.source_digest:
        raise StoreError(
            f"{store.path}: made from {model_name(store)}, which is not the checkpoint {name}; give the model that the "
            "store was converted from"
        )


def _placed_before(store: Store, request: dict[str, Any]) -> Placement | None:
    """The placement that this very request wrote before, if it is sound."""
    if not is_placed(store):
        return None
    try:
        placement = read_placement(store)
    except StoreError:
        return None  # it is written again
    return placement if placement.card["provenance"].get("request") == request else None


class _Text:
    """Stretches of one source, its documents parted by their own hash."""

    def __init__(self, model: str | Path, data: str | Path) -> None:
        self._data, self._tokenizer = data, tokenizer(model)

    def windows(self, tokens: int, *, train: bool) -> tuple[list[np.ndarray], DataCard]:
        """At least `tokens` tokens in stretches of SEQUENCE, or as many as there are, and the card of what was read."""

        def keep(text: str) -> bool:
            return (split_of(text, HELD_OUT_SHARE) == "train") == train

        found, card = windows_and_card(self._data, self._tokenizer, SEQUENCE, -(-tokens // SEQUENCE), keep)
        if not found:
            part = "training" if train else "held-out"
            raise DataError(f"{self._data}: its {part} part has fewer than {SEQUENCE} tokens; give --data with more")
        return found, card


class _Capture:
    """The dense model, and what an engine would load on text."""

    def __init__(
        self, model: str | Path, store: Store, predictors: Predictors | None, window: int, progress: Progress | None
    ) -> None:
        self.model = dense(model)
        self._ups = list(family(store.spec.model_type).activated_linears(self.model))
        self._packed = [PackedPredictor(layer) for layer in predictors.layers] if predictors is not None else None
        self._spec, self._window, self._progress = store.spec, window, progress
        self._dtype = np.uint16 if store.spec.d_ff <= 1 << 16 else np.uint32

    def loads(self, windows: Sequence[np.ndarray], what: str) -> Layers:
        """The neurons loaded by layer and token, each stretch from empty slots; the tokens that fill the window are
        left out."""
        found: Layers = [orders.PackedLoads() for _ in self._ups]
        window = self._window

        def tap(layer: int, x: torch.Tensor, z: torch.Tensor) -> None:
            mask = (self._packed[layer].mask(x) if self._packed is not None else z > 0).numpy()
            uses = [np.flatnonzero(row).astype(self._dtype) for row in mask]
            found[layer].extend(orders.loads_of(uses, window)[window:])

        if window >= SEQUENCE:
            raise DataError(
                f"a window of {window} tokens has no room in stretches of {SEQUENCE}; ask for a smaller one"
            )
        for done, ids in enumerate(windows):
            with FfnTap(self._ups, tap, self._spec.thresholds):
                run_trunk(self.model, ids[None, :])
            if self._progress:
                self._progress(what, (done + 1) * SEQUENCE, len(windows) * SEQUENCE)
        return found


class _Fitted:
    """Orders fitted to training loads, layer by layer, so that one layer's co-loads are held at a time."""

    def __init__(self, loads: Layers, flash: orders.Flash, seed: int, d_ff: int) -> None:
        self._loads, self._flash, self._seed, self._d_ff = loads, flash, seed, d_ff

    def order(self, method: str, progress: Progress | None) -> tuple[np.ndarray, dict[str, float]]:
        """The order of every layer, int32 [layers, d_ff], and the reads a token it gives on the text of the fit."""
        found, before, after = [], 0.0, 0.0
        for layer, loads in enumerate(self._loads):
            counts = orders.co_loads(loads, self._d_ff)
            order = orders.place_layer(method, counts, reach=self._flash.reach, seed=self._seed)
            before += orders.reads(loads, orders.own(counts), self._flash)[0].mean()
            after += orders.reads(loads, order, self._flash)[0].mean()
            found.append(order)
            if progress:
                progress("order", layer + 1, len(self._loads))
        return np.stack(found), {"own_reads": float(before), "placed_reads": float(after)}

    def compare(self, test: Layers, progress: Progress | None) -> list[dict[str, Any]]:
        """Every method's reads and bytes a token on other text, by gap, summed over the layers."""
        names = [name for name in orders.METHODS if name != "spectral" or self._d_ff <= SPECTRAL_MOST]
        gaps = gaps_of(self._flash)
        totals = np.zeros((len(names), len(gaps), 2))
        for layer, loads in enumerate(self._loads):
            counts = orders.co_loads(loads, self._d_ff)
            for i, name in enumerate(names):
                order = orders.place_layer(name, counts, reach=self._flash.reach, seed=self._seed)
                for j, gap in enumerate(gaps):
                    totals[i, j] += _means(test[layer], order, dataclasses.replace(self._flash, gap=gap))
            if progress:
                progress("methods", layer + 1, len(self._loads))
        return [
            {"method": name, "gap_bytes": gap, "reads": float(totals[i, j, 0]), "flash_bytes": float(totals[i, j, 1])}
            for i, name in enumerate(names)
            for j, gap in enumerate(gaps)
        ]


def gaps_of(flash: orders.Flash) -> list[int]:
    """The merging gaps that are looked at: the run's own first."""
    return [flash.gap, *(gap for gap in GAPS if gap != flash.gap)]


def _means(loads: orders.Loads, order: np.ndarray, flash: orders.Flash) -> tuple[float, float]:
    reads, nbytes = orders.reads(loads, order, flash)
    return float(reads.mean()), float(nbytes.mean())


def _pair(placement: Placement, layer: int) -> tuple[np.ndarray, np.ndarray]:
    order = placement.order[layer]
    return np.arange(len(order), dtype=np.int32), order


def _layer_row(layer: int, loads: orders.Loads, placement: Placement, flash: orders.Flash) -> dict[str, Any]:
    (own_reads, own_bytes), (reads, nbytes) = (_means(loads, order, flash) for order in _pair(placement, layer))
    return {
        "layer": layer,
        "loaded": float(np.mean([len(ids) for ids in loads])),
        "own_reads": own_reads,
        "placed_reads": reads,
        "own_bytes": own_bytes,
        "placed_bytes": nbytes,
    }


def _planned(loads: Layers, placement: Placement, flash: orders.Flash) -> list[dict[str, Any]]:
    """Reads and bytes a token, all layers together, that the reader's plan has for the held-out text: exact counts."""
    rows = []
    for gap in gaps_of(flash):
        own = dataclasses.replace(flash, gap=gap)
        sums = np.zeros((2, 2))
        for layer, ids in enumerate(loads):
            sums += [_means(ids, order, own) for order in _pair(placement, layer)]
        rows += [
            {"placement": placed, "gap_bytes": gap, "reads": float(reads), "flash_bytes": float(nbytes)}
            for placed, (reads, nbytes) in zip((False, True), sums, strict=True)
        ]
    return rows


def _run_shares(loads: Layers, placement: Placement, flash: orders.Flash) -> dict[str, list[float]]:
    """The share of loaded neurons that come in runs of 1, 2 .. MOST_RUN and more, for both orders."""
    found = np.zeros((2, MOST_RUN))
    for layer, ids in enumerate(loads):
        for i, order in enumerate(_pair(placement, layer)):
            counts = orders.run_lengths(ids, order, flash)
            neurons = counts * np.arange(len(counts))
            np.add.at(found[i], np.minimum(np.arange(1, len(counts)), MOST_RUN) - 1, neurons[1:])
    shares = found / np.maximum(found.sum(1, keepdims=True), 1)
    return {"own": shares[0].tolist(), "placed": shares[1].tolist()}


def _measured_with(predictors: Predictors | None) -> Ablation:
    return Ablation(predictor="low_rank" if predictors is not None else "oracle")


def _measure(
    store: Store,
    predictors: Predictors | None,
    windows: Sequence[np.ndarray],
    run: RunSpec,
    rounds: int,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """The held-out text through the engine, each stretch under every setting, the settings in turn."""
    base = _measured_with(predictors)
    gaps = [run.coalesce_gap_bytes, *(gap for gap in GAPS if gap != run.coalesce_gap_bytes)]
    settings = [(gap, placed) for gap in gaps for placed in (False, True)]
    steps: dict[tuple[int, bool], list[TokenStats]] = {setting: [] for setting in settings}
    total = rounds * len(settings)
    with open_engine(store, base, predictors, run) as engine:
        for turn in range(rounds):
            ids = windows[turn % len(windows)].tolist()
            # backwards every other round, so that neither order always runs in the other's wake
            for done, (gap, placed) in enumerate(settings if turn % 2 == 0 else settings[::-1]):
                engine.run = dataclasses.replace(run, coalesce_gap_bytes=gap)
                engine.ablation = dataclasses.replace(base, placement=placed)
                engine.reset()
                engine.prefill(ids[:PROMPT])
                for count, token in enumerate(ids[PROMPT : PROMPT + WARM_UP + COUNTED]):
                    stats = engine.step(token)[1]
                    if count >= WARM_UP:
                        steps[gap, placed].append(stats)
                if progress:
                    progress("measured", turn * len(settings) + done + 1, total)
    return [_row(gap, placed, steps[gap, placed]) for gap, placed in settings]


def _row(gap: int, placed: bool, steps: list[TokenStats]) -> dict[str, Any]:
    io = np.array([stats.io_ms for stats in steps])
    seconds, nbytes = io.sum() / 1000, sum(stats.read_bytes for stats in steps)
    return {
        "placement": placed,
        "gap_bytes": gap,
        "tokens": len(steps),
        "reads": float(np.mean([stats.reads for stats in steps])),
        "flash_bytes": nbytes / len(steps),
        "loaded": float(np.mean([stats.loaded for stats in steps])),
        "throughput": nbytes / seconds if seconds else None,
        "io_ms": float(np.median(io)),
        "io_ms_p95": float(np.percentile(io, 95)),
        "total_ms": float(np.median([stats.total_ms for stats in steps])),
    }
