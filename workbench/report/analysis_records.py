"""Records of kinds sparsity, window and coactivation: what `workbench analyze` writes, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.report.reading import _ablation_row, _Fields, _head, _parse, _run
from workbench.report.records import AblationRow, Run

QUANTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class ZerosSpread:
    """Share of zeros: mean, and percentiles over tokens by QUANTILES."""

    mean: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class SparsityLayer:
    """A layer. never: neurons that did not fire; top_tenth: share of all firing that the busiest tenth does. The last
    two, and the percentiles, are None in records of earlier versions."""

    layer: int
    zeros: float
    spread: ZerosSpread | None
    never: int | None
    top_tenth: float | None


@dataclass(frozen=True)
class SparsityPlace:
    """The tokens at places first..last of their stretch of text."""

    first: int
    last: int
    spread: ZerosSpread


@dataclass(frozen=True)
class SparsityRecord:
    """`workbench analyze sparsity --json`. by_token: over tokens, of the mean over layers."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    rows: tuple[SparsityLayer, ...]
    by_token: ZerosSpread | None
    by_place: tuple[SparsityPlace, ...]


@dataclass(frozen=True)
class WindowRow:
    """A neuron window: what it needs of DRAM, whether that fits the budget, and what was measured within it."""

    window: int
    slots: int
    slot_bytes: int
    fixed_bytes: int
    need_bytes: int
    fits: bool
    measured: AblationRow


@dataclass(frozen=True)
class WindowRecord:
    """`workbench analyze window --json`."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    budget_bytes: int
    model_bytes: int
    largest_fitting: int | None
    rows: tuple[WindowRow, ...]


@dataclass(frozen=True)
class CoactivationLayer:
    """A layer's co-activation, as `workbench.experiments.coactivation.layer_row` explains each field."""

    layer: int
    active: float
    never: int
    top_share: float
    friends_share: float
    distinct_friends: int
    hot_friends: float
    top_friend: float
    exponent: float | None
    r2: float | None
    rank_share: tuple[float, ...]
    popularity: tuple[float, ...]
    pairs: tuple[int, ...]
    bundle_bytes: float | None
    bundle_duplicates: float | None
    bundle_all_duplicates: float | None
    window_bytes: float | None
    window_duplicates: float | None
    window_all_duplicates: float | None


@dataclass(frozen=True)
class FittedLaw:
    """share = scale * rank ** -exponent, and how much of the curve that explains."""

    exponent: float
    scale: float
    r2: float


@dataclass(frozen=True)
class CoactivationRecord:
    """`workbench analyze coactivation --json`. friends: how many were kept of each neuron; hottest: the share of
    neurons that counts as hot; cost_tokens: tokens that bundles were priced on; d_ff: neurons of a layer; power_law:
    fitted to the mean over layers of rank_share, None where it could not be."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    friends: int
    hottest: float
    cost_tokens: int
    d_ff: int
    ranks: tuple[int, ...]
    rows: tuple[CoactivationLayer, ...]
    power_law: FittedLaw | None


def _spread(f: _Fields) -> ZerosSpread:
    return ZerosSpread(f.number("zeros", 1), tuple(f.number(f"p{q}", 1) for q in QUANTILES))


def _sparsity_layer(f: _Fields) -> SparsityLayer:
    layer = f.integer("layer")
    if f.left == {"zeros"}:
        return SparsityLayer(layer, f.number("zeros", 1), None, None, None)
    spread = _spread(f)
    row = SparsityLayer(layer, spread.mean, spread, f.integer("never"), f.number("top_tenth", 1))
    f.done()
    return row


def _place(f: _Fields) -> SparsityPlace:
    place = SparsityPlace(f.integer("first"), f.integer("last"), _spread(f))
    f.done()
    return place


def _sparsity(data: Any, source: str) -> SparsityRecord:
    f = _head(data, source, "sparsity")
    by_token = _spread(_Fields(f.mapping("by_token"), source, "by_token")) if "by_token" in f.data else None
    by_place = tuple(map(_place, f.items("by_place", least=0))) if "by_place" in f.data else ()
    rows = tuple(map(_sparsity_layer, f.items("rows")))
    record = SparsityRecord(source, f.mapping("machine"), _run(f), rows, by_token, by_place)
    f.done()
    return record


def _window_row(f: _Fields) -> WindowRow:
    row = WindowRow(
        f.integer("window"),
        f.integer("slots"),
        f.integer("slot_bytes"),
        f.integer("fixed_bytes"),
        f.integer("need_bytes"),
        f.flag("fits"),
        _ablation_row(_Fields(f.mapping("measured"), f.source, f"{f.where}.measured")),
    )
    f.done()
    return row


def _window(data: Any, source: str) -> WindowRecord:
    f = _head(data, source, "window")
    largest = f.optional("largest_fitting")
    record = WindowRecord(
        source,
        f.mapping("machine"),
        _run(f),
        f.integer("budget_bytes"),
        f.integer("model_bytes"),
        None if largest is None else int(largest),
        tuple(map(_window_row, f.items("rows"))),
    )
    f.done()
    return record


def _coactivation_layer(f: _Fields, places: int) -> CoactivationLayer:
    row = CoactivationLayer(
        layer=f.integer("layer"),
        active=f.number("active"),
        never=f.integer("never"),
        distinct_friends=f.integer("distinct_friends"),
        exponent=f.signed("exponent"),
        r2=f.optional("r2"),
        rank_share=f.numbers("rank_share", places, 1),
        popularity=f.numbers("popularity", places, 1),
        pairs=tuple(map(int, f.numbers("pairs"))),
        top_share=f.number("top_share", 1),
        friends_share=f.number("friends_share", 1),
        hot_friends=f.number("hot_friends", 1),
        top_friend=f.number("top_friend", 1),
        bundle_bytes=f.optional("bundle_bytes"),
        bundle_duplicates=f.optional("bundle_duplicates"),
        bundle_all_duplicates=f.optional("bundle_all_duplicates"),
        window_bytes=f.optional("window_bytes"),
        window_duplicates=f.optional("window_duplicates"),
        window_all_duplicates=f.optional("window_all_duplicates"),
    )
    f.done()
    return row


def _law(f: _Fields) -> FittedLaw | None:
    found = f.take("power_law")
    if found is None:
        return None
    own = _Fields(found, f.source, "power_law")
    law = FittedLaw(own.signed("exponent") or 0.0, own.number("scale"), own.number("r2", 1))
    own.done()
    return law


def _coactivation(data: Any, source: str) -> CoactivationRecord:
    f = _head(data, source, "coactivation")
    ranks = tuple(map(int, f.numbers("ranks")))
    record = CoactivationRecord(
        source,
        f.mapping("machine"),
        _run(f),
        f.integer("friends"),
        f.number("hottest", 1),
        f.integer("cost_tokens"),
        ranks[-1] + 1,
        ranks,
        tuple(_coactivation_layer(item, len(ranks)) for item in f.items("rows")),
        _law(f),
    )
    f.done()
    return record


def read_sparsity(record: str | Path | Mapping[str, Any] | SparsityRecord) -> SparsityRecord:
    """A sparsity record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, SparsityRecord) else _parse(record, _sparsity)


def read_window(record: str | Path | Mapping[str, Any] | WindowRecord) -> WindowRecord:
    """A window sweep's record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, WindowRecord) else _parse(record, _window)


def read_coactivation(record: str | Path | Mapping[str, Any] | CoactivationRecord) -> CoactivationRecord:
    """A co-activation record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, CoactivationRecord) else _parse(record, _coactivation)
