"""Reads records from JSON and checks them.

Only documented fields are read: a missing, misspelt, extra or non-finite field is a `RecordError` that
names it. `machine`, `run.versions` and a predictor's card may carry more than is read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from workbench.errors import RecordError
from workbench.report.records import (
    PARTS,
    AblationRecord,
    AblationRow,
    AggregatedUse,
    FlashPoint,
    FlashRecord,
    PredictorCard,
    PredictorLayer,
    ReusePoint,
    ReuseRecord,
    Run,
    Timing,
)

SCHEMA = 1
R = TypeVar("R")


class _Fields:
    """Takes documented fields out of one JSON object, and complains by name."""

    def __init__(self, data: Any, source: str, where: str) -> None:
        self.source, self.where = source, where
        if not isinstance(data, dict):
            raise RecordError(f"{source}: {where or 'the record'} is not a JSON object; write the record again")
        self.data, self.left = data, set(data)

    def fail(self, name: str, problem: str) -> RecordError:
        at = f"{self.where}.{name}" if self.where else name
        return RecordError(f"{self.source}: {at} {problem}; write the record again with this version of workbench")

    def take(self, name: str) -> Any:
        if name not in self.data:
            raise self.fail(name, "is missing")
        self.left.discard(name)
        return self.data[name]

    def number(self, name: str, high: float = math.inf) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(name, f"is {_short(value)}, not a number")
        if not 0 <= value <= high:
            raise self.fail(name, f"is {value}, outside 0 to {high:g}")
        return value

    def optional(self, name: str) -> float | None:
        if name in self.data and self.data[name] is None:
            self.left.discard(name)
            return None
        return self.number(name)

    def signed(self, name: str) -> float | None:
        """A number of either sign, or nothing."""
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.fail(name, f"is {_short(value)}, not a number")
        return value

    def integer(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise self.fail(name, f"is {value}, not a whole number")
        return int(value)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise self.fail(name, f"is {_short(value)}, not text")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.fail(name, f"is {_short(value)}, not true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name)
        if not isinstance(value, dict):
            raise self.fail(name, f"is {_short(value)}, not a JSON object")
        return value

    def items(self, name: str, least: int = 1) -> list[_Fields]:
        value = self.take(name)
        if not isinstance(value, list) or len(value) < least:
            raise self.fail(name, f"is {_short(value)}, not a list of at least {least}")
        return [_Fields(item, self.source, f"{name}[{i}]") for i, item in enumerate(value)]

    def numbers(self, name: str, length: int | None = None, high: float = math.inf) -> tuple[float, ...]:
        """A list of numbers from 0 to `high`, of that length or at least one."""
        value = self.take(name)
        if not isinstance(value, list) or len(value) != (length if length is not None else max(1, len(value))):
            wanted = f"{length} numbers" if length is not None else "numbers"
            raise self.fail(name, f"is {_short(value)}, not a list of {wanted}")
        inner = _Fields({f"{name}[{i}]": item for i, item in enumerate(value)}, self.source, self.where)
        return tuple(inner.number(key, high) for key in inner.data)

    def done(self) -> None:
        if self.left:
            raise self.fail(min(self.left), "is not a documented field of schema 1")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _label(value: Any) -> str:
    """Text as it is; a mapping as 'd_model 512, d_ff 2048'; nothing as ''."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "" if value is None else str(value)


def _run(fields: _Fields) -> Run:
    f = _Fields(fields.mapping("run"), fields.source, "run")
    window, seed = f.optional("window"), f.optional("seed")
    run = Run(
        model=f.text("model"),
        geometry=_label(f.take("geometry")),
        dtype=f.text("dtype"),
        tokens=f.integer("tokens"),
        window=None if window is None else int(window),
        dram=_label(f.take("dram")),
        seed=None if seed is None else int(seed),
        commit=f.text("commit"),
        versions={str(key): str(value) for key, value in f.mapping("versions").items()},
        io=f.text("io"),
        command=f.text("command"),
        synthetic=f.flag("synthetic"),
        predictors=_label(f.take("predictors")),
        date=f.text("date"),
        data=f.mapping("data") if "data" in f.data else {},
        backend=f.text("backend") if "backend" in f.data else "",
    )
    f.done()
    return run


_PREFETCH = ("prefetched", "wasted", "wasted_bytes", "hidden_io_ms")


def _ablation_row(f: _Fields) -> AblationRow:
    peak = f.optional("peak_rss_bytes")
    row = AblationRow(
        name=f.text("name"),
        ablation=f.mapping("ablation"),
        dram_bytes=f.integer("dram_bytes"),
        peak_rss_bytes=None if peak is None else int(peak),
        flash_bytes=f.number("flash_bytes"),
        reads=f.number("reads"),
        throughput=f.optional("throughput"),
        times={part: Timing(f.number(f"{part}_ms"), f.number(f"{part}_ms_p95")) for part in PARTS},
        tokens=f.integer("tokens"),
        active=f.optional("active"),
        predicted=f.optional("predicted"),
        loaded=f.optional("loaded"),
        in_window=f.optional("in_window"),
        floor_ms=f.optional("floor_ms"),
        overlapped_floor_ms=f.optional("overlapped_floor_ms"),
        window_trims=f.integer("window_trims"),
        waits=f.optional("waits") if "waits" in f.data else None,
        wait_ms=f.optional("wait_ms") if "wait_ms" in f.data else None,
        acceptance=f.optional("acceptance") if "acceptance" in f.data else None,
        tokens_per_round=f.optional("tokens_per_round") if "tokens_per_round" in f.data else None,
        draft_ms=f.optional("draft_ms") if "draft_ms" in f.data else None,
        text=f.text("text") if "text" in f.data else "",
        draft=f.text("draft") if "draft" in f.data else "",
        draft_tokens=f.integer("draft_tokens") if "draft_tokens" in f.data else None,
        **{name: f.optional(name) for name in _PREFETCH if name in f.data},
        energy_j_per_token=f.optional("energy_j_per_token") if "energy_j_per_token" in f.data else None,
        energy_source=f.text("energy_source") if "energy_source" in f.data else "",
    )
    for name in ("hybrid", "predictor", "windowing", "bundling"):
        if name not in row.ablation:
            raise f.fail(f"ablation.{name}", "is missing")
    if row.total == 0:
        raise f.fail("total_ms", "is 0, not a measured time")
    f.done()
    return row


def _flash_point(f: _Fields) -> FlashPoint:
    point = FlashPoint(
        f.integer("chunk_bytes"),
        f.integer("threads"),
        f.text("engine"),
        f.flag("direct"),
        f.number("bytes_per_s"),
        f.number("reads_per_s"),
    )
    if point.chunk_bytes == 0 or point.bytes_per_s == 0:
        raise f.fail("bytes_per_s" if point.chunk_bytes else "chunk_bytes", "is 0, not a measured read")
    f.done()
    return point


def _reuse_point(f: _Fields) -> ReusePoint:
    layer = f.integer("layer") if "layer" in f.data else None
    point = ReusePoint(f.integer("window"), f.number("kept_share", 1), f.number("new_share", 1), layer)
    f.done()
    return point


def _predictor_layer(f: _Fields, index: int) -> PredictorLayer:
    # A card is for more readers than this one: fields beside these (threshold, frontier ...) may stand in it.
    share = "weight_share" if "weight_share" in f.data else "share_of_weights"
    return PredictorLayer(
        layer=f.integer("layer") if "layer" in f.data else index,
        rank=f.integer("rank"),
        false_negative=f.number("false_negative", 1),
        false_positive=f.number("false_positive", 1),
        predicted=f.number("predicted"),
        active=f.number("active"),
        predicted_over_active=f.number("predicted_over_active"),
        share_of_weights=f.number(share),
        missed_activation=f.number("missed_activation", 1) if "missed_activation" in f.data else None,
    )


def _head(data: Any, source: str, kind: str) -> _Fields:
    f = _Fields(data, source, "")
    schema = f.take("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise f.fail("schema", f"is {_short(schema)}, this version reads schema {SCHEMA}")
    found = f.text("kind")
    if found != kind:
        raise RecordError(f"{source}: is a record of kind {found!r}, not {kind!r}; pass the file that fits")
    return f


def _ablation(data: Any, source: str) -> AblationRecord:
    f = _head(data, source, "ablation")
    record = AblationRecord(source, f.mapping("machine"), _run(f), tuple(map(_ablation_row, f.items("rows"))))
    f.done()
    return record


def _flash(data: Any, source: str) -> FlashRecord:
    f = _head(data, source, "bench_flash")
    fit = f.mapping("fit") if "fit" in f.data and f.data["fit"] is not None else {}
    f.left.discard("fit")
    if fit:
        fields = _Fields(fit, source, "fit")
        fit = {name: fields.number(name) for name in ("latency_us", "bytes_per_s", "gap_bytes")}
        fields.done()
    record = FlashRecord(source, f.mapping("machine"), _run(f), tuple(map(_flash_point, f.items("rows"))), fit)
    f.done()
    return record


def _aggregated(f: _Fields) -> AggregatedUse:
    tokens = f.numbers("tokens")
    if any(k != int(k) for k in tokens) or list(tokens) != sorted(set(tokens)):
        raise f.fail("tokens", "are not whole numbers that rise")
    lists = f.take("by_layer")
    if not isinstance(lists, list):
        raise f.fail("by_layer", f"is {_short(lists)}, not a list")
    layers = _Fields({f"by_layer[{i}]": own for i, own in enumerate(lists)}, f.source, f.where)
    mean = f.numbers("mean", len(tokens), 1)
    by_layer = tuple(layers.numbers(name, len(tokens), 1) for name in layers.data)
    f.done()
    return AggregatedUse(tuple(map(int, tokens)), mean, by_layer)


def _reuse(data: Any, source: str) -> ReuseRecord:
    f = _head(data, source, "reuse")
    by_layer = tuple(map(_reuse_point, f.items("by_layer", least=0))) if "by_layer" in f.data else ()
    aggregated = _aggregated(_Fields(f.mapping("aggregated"), source, "aggregated")) if "aggregated" in f.data else None
    rows = tuple(map(_reuse_point, f.items("rows")))
    record = ReuseRecord(source, f.mapping("machine"), _run(f), rows, by_layer, aggregated)
    f.done()
    return record


def _card(data: Any, source: str) -> PredictorCard:
    f = _Fields(data, source, "")
    if "schema" in f.data and f.data["schema"] != SCHEMA:
        raise f.fail("schema", f"is {_short(f.data['schema'])}, this version reads schema {SCHEMA}")
    layers = tuple(_predictor_layer(item, i) for i, item in enumerate(f.items("layers")))
    return PredictorCard(source, {key: value for key, value in f.data.items() if key != "layers"}, layers)


def load_json(path: str | Path) -> Any:
    """A record file's JSON. RecordError when it is missing, not JSON, or holds NaN."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise RecordError(f"{path}: could not be read ({error.strerror}); pass the path of a record") from error
    except ValueError as error:
        raise RecordError(f"{path}: is not a whole JSON record ({error}); write the record again") from error


def _parse(record: str | Path | Mapping[str, Any], parse: Callable[[Any, str], R]) -> R:
    return parse(load_json(record), str(record)) if isinstance(record, str | Path) else parse(record, "record")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def read_ablation(record: str | Path | Mapping[str, Any] | AblationRecord) -> AblationRecord:
    """An ablation record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, AblationRecord) else _parse(record, _ablation)


def read_flash(record: str | Path | Mapping[str, Any] | FlashRecord) -> FlashRecord:
    """A flash benchmark's record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, FlashRecord) else _parse(record, _flash)


def read_reuse(record: str | Path | Mapping[str, Any] | ReuseRecord) -> ReuseRecord:
    """A window reuse record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, ReuseRecord) else _parse(record, _reuse)


def read_predictors(record: str | Path | Mapping[str, Any] | PredictorCard) -> PredictorCard:
    """A predictor's card from its card.json, the directory that holds it, or a parsed object."""
    if isinstance(record, PredictorCard):
        return record
    if isinstance(record, str | Path) and Path(record).is_dir():
        record = Path(record) / "card.json"
    return _parse(record, _card)
