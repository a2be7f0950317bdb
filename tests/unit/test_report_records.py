"""Reading records. The builders below make the test data of every report test: numbers of no machine."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.errors import RecordError
from workbench.report.reading import read_ablation, read_flash, read_predictors, read_reuse
from workbench.report.words import card_caption

MACHINE = {
    "cpu": "Test CPU 9000",
    "cores": 2,
    "memory_bytes": 16_000_000_000,
    "os": "Linux 6.1",
    "device": "cpu",
    "disk": "test nvme",
}
RUN = {
    "model": "demo-opt",
    "geometry": "8 layers, d_model 512, FFN 2048",
    "dtype": "float32",
    "tokens": 64,
    "window": 4,
    "dram": "50%",
    "seed": 0,
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "versions": {"workbench": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
    "io": "threads",
    "command": "workbench ablate store --predictors predictors/demo --json ablation.json",
    "synthetic": False,
    "predictors": "predictors/demo",
    "date": "2031-02-03",
}
# name: io, mem, compute, predictor (ms a token), flash MB, reads, GB/s, DRAM MB, floor ms
_ROWS = {
    "naive": (66.4, 0.0, 5.6, 0.0, 96.0, 104, 1.446, 4, 60.0),
    "hybrid": (31.2, 0.0, 5.5, 0.0, 48.0, 56, 1.538, 48, 30.0),
    "+ predictor": (9.61, 0.21, 2.1, 0.11, 6.4, 3120, 0.666, 40, 5.1),
    "+ windowing": (3.02, 0.24, 2.1, 0.11, 1.6, 780, 0.53, 48, 2.6),
    "+ bundling (all)": (1.84, 0.23, 2.0, 0.11, 1.5, 366, 0.815, 48, 2.5),
}


def ablation_row(name: str, ablation: Ablation, numbers: tuple[float, ...]) -> dict[str, Any]:
    io, mem, compute, predictor, flash, reads, gb_per_s, dram, floor = numbers
    parts = {"io": io, "mem": mem, "compute": compute, "predictor": predictor, "total": io + mem + compute}
    row: dict[str, Any] = {
        "name": name,
        "ablation": dataclasses.asdict(ablation),
        "dram_bytes": round(dram * 1e6),
        "peak_rss_bytes": round(dram * 1.05e6),
        "flash_bytes": round(flash * 1e6),
        "reads": reads,
        "throughput": gb_per_s * 1e9,
        "tokens": 64,
        "active": 620.0,
        "predicted": 16384.0 if ablation.predictor == "off" else 1550.0,
        "loaded": 16384.0 if ablation.predictor == "off" else 390.5 if ablation.windowing else 1550.0,
        "in_window": 3900.0 if ablation.windowing else 0.0,
        "floor_ms": floor,
        "overlapped_floor_ms": floor * 0.8,
        "window_trims": 0,
    }
    for part, value in parts.items():
        row |= {f"{part}_ms": value, f"{part}_ms_p95": value * 1.25}
    return row


def ablation_record(**run: Any) -> dict[str, Any]:
    rows = [ablation_row(name, PAPER_ROWS[name], numbers) for name, numbers in _ROWS.items()]
    rows.append(ablation_row("all, merged reads", Ablation(), (1.21, 0.23, 2.0, 0.11, 1.7, 160, 1.405, 48, 2.5)))
    head = {"schema": 1, "kind": "ablation", "machine": MACHINE, "run": RUN | run}
    return copy.deepcopy(head | {"rows": rows})


def flash_record() -> dict[str, Any]:
    rows = []
    for threads, latency_us, top in ((1, 95, 1.1e9), (8, 14, 2.2e9), (32, 4.6, 2.4e9)):
        for power in range(12, 23):
            chunk = 1 << power
            speed = chunk / (latency_us * 1e-6 + chunk / top)
            row = {"chunk_bytes": chunk, "threads": threads, "engine": "threads", "direct": True}
            rows.append(row | {"bytes_per_s": speed, "reads_per_s": speed / chunk})
            if threads == 32:
                row = {"chunk_bytes": chunk, "threads": threads, "engine": "io_uring", "direct": True}
                rows.append(row | {"bytes_per_s": speed * 1.04, "reads_per_s": speed * 1.04 / chunk})
                row = {"chunk_bytes": chunk, "threads": threads, "engine": "buffered", "direct": False}
                rows.append(row | {"bytes_per_s": 3.1 * speed, "reads_per_s": 3.1 * speed / chunk})
    fit = {"latency_us": 92.0, "bytes_per_s": 2.35e9, "gap_bytes": 12288}
    return copy.deepcopy({"schema": 1, "kind": "bench_flash", "machine": MACHINE, "run": RUN, "rows": rows, "fit": fit})


def reuse_record() -> dict[str, Any]:
    shares = {
        0: (0.04, 0.0400),
        1: (0.07, 0.021),
        2: (0.10, 0.017),
        4: (0.15, 0.013),
        8: (0.22, 0.010),
        16: (0.32, 0.007),
    }
    rows = [{"window": k, "kept_share": kept, "new_share": new} for k, (kept, new) in shares.items()]
    by_layer = [
        {"layer": layer, "window": k, "kept_share": kept * (0.5 + layer / 7), "new_share": new * (0.5 + layer / 7)}
        for layer in range(8)
        for k, (kept, new) in shares.items()
    ]
    return copy.deepcopy(
        {"schema": 1, "kind": "reuse", "machine": MACHINE, "run": RUN, "rows": rows, "by_layer": by_layer}
    )


def predictor_card(layers: int = 8) -> dict[str, Any]:
    rows = []
    for layer in range(layers):
        active, over = 30.0 + 9 * layer, 2.1 + 0.15 * (layer % 3)
        row: dict[str, Any] = {"rank": 64, "threshold": -1.5, "frontier": [], "missed_activation": 0.01}
        row |= {"false_negative": 0.02 + 0.006 * layer, "false_positive": 0.03 + 0.01 * layer, "weight_share": 0.04}
        row |= {"predicted": active * over, "active": active, "predicted_over_active": over}
        rows.append(row)
    text = {"source": "/somewhere/demo_text", "documents": 900, "tokens": 400_000}
    about: dict[str, Any] = {"schema": 1, "model": {"name": "demo-opt", "d_ff": 2048}, "store_dtype": "float32"}
    about |= {"data": {"train": text, "test": {"tokens": 20_480}}, "versions": {"flash-workbench": "0.1.0"}}
    return about | {"layers": rows}


READERS = {
    "ablation": (read_ablation, ablation_record),
    "flash": (read_flash, flash_record),
    "reuse": (read_reuse, reuse_record),
    "predictors": (read_predictors, predictor_card),
}


def test_importing_the_report_needs_no_torch() -> None:
    code = "import sys, workbench.report, workbench.report.html; print([m for m in ('torch', 'transformers', "
    code += "'matplotlib.pyplot', 'workbench._native') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ablation_record_is_read_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "ablation.json"
    path.write_text(json.dumps(ablation_record()))
    record = read_ablation(path)
    assert record.source == str(path)
    assert record.run.tokens == 64
    assert record.run.versions["torch"] == "2.13.0"
    assert record.machine == MACHINE
    assert [row.name for row in record.rows] == [*PAPER_ROWS, "all, merged reads"]
    assert record.naive is record.rows[0]
    assert record.all is record.rows[4]
    row = record.rows[4]
    assert (row.flash_bytes, row.reads, row.loaded, row.in_window) == (1_500_000, 366, 390.5, 3900.0)
    assert (row.times["io"].median, row.times["io"].p95) == pytest.approx((1.84, 2.3))
    assert row.floor == 2.5
    assert read_ablation(record) is record


def test_prefetch_rows_are_held_to_the_overlapped_floor() -> None:
    data = ablation_record()
    data["rows"][5]["ablation"]["prefetch"] = True
    assert read_ablation(data).rows[5].floor == 2.0


def test_unmeasured_figures_may_be_null() -> None:
    data = ablation_record()
    for name in ("peak_rss_bytes", "throughput", "active", "predicted", "floor_ms", "overlapped_floor_ms"):
        data["rows"][0][name] = None
    row = read_ablation(data).rows[0]
    assert (row.peak_rss_bytes, row.throughput, row.active, row.floor) == (None, None, None, None)


def test_flash_reuse_and_card() -> None:
    flash, reuse, card = read_flash(flash_record()), read_reuse(reuse_record()), read_predictors(predictor_card())
    assert (flash.rows[0].chunk_bytes, flash.rows[0].threads, flash.rows[0].direct) == (4096, 1, True)
    assert flash.fit == {"latency_us": 92.0, "bytes_per_s": 2.35e9, "gap_bytes": 12288}
    assert (reuse.rows[3].window, reuse.rows[3].kept_share, reuse.rows[3].new_share) == (4, 0.15, 0.013)
    assert reuse.by_layer[0].layer == 0
    assert (card.layers[1].layer, card.layers[1].active, card.layers[1].rank) == (1, 39.0, 64)
    assert (card.layers[1].share_of_weights, card.layers[1].missed_activation) == (0.04, 0.01)


def test_card_is_found_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(json.dumps(predictor_card()))
    assert len(read_predictors(tmp_path).layers) == 8


@pytest.mark.parametrize("kind", ["ablation", "flash", "reuse"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"schema": 2}, "schema is 2, this version reads schema 1"),
        ({"kind": "other"}, "is a record of kind 'other'"),
        ({"rows": []}, "rows is [], not a list of at least 1"),
        ({"rows": [3]}, "rows[0] is not a JSON object"),
        ({"run": {}}, "run."),
        ({"extra": 1}, "extra is not a documented field of schema 1"),
    ],
)
def test_another_schema_is_refused(kind: str, change: dict[str, Any], expected: str) -> None:
    read, build = READERS[kind]
    with pytest.raises(RecordError) as caught:
        read(build() | change)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("io_ms", None, "rows[2].io_ms is None, not a number"),
        ("io_ms", True, "rows[2].io_ms is True, not a number"),
        ("reads", -1, "rows[2].reads is -1, outside 0 to inf"),
        ("tokens", 1.5, "rows[2].tokens is 1.5, not a whole number"),
        ("total_ms", 0, "rows[2].total_ms is 0, not a measured time"),
        ("ablation", {"hybrid": True}, "rows[2].ablation.predictor is missing"),
        ("io_msec", 1.0, "rows[2].io_msec is not a documented field of schema 1"),
    ],
)
def test_a_broken_field_is_named(field: str, value: Any, expected: str) -> None:
    data = ablation_record()
    data["rows"][2][field] = value
    with pytest.raises(RecordError) as caught:
        read_ablation(data)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", READERS)
def test_every_required_field_is_required(kind: str) -> None:
    read, build = READERS[kind]
    rows = "layers" if kind == "predictors" else "rows"
    optional = {"threshold", "frontier", "missed_activation", "weight_share"}
    for name in build()[rows][0].keys() - optional:
        data = build()
        del data[rows][0][name]
        with pytest.raises(RecordError) as caught:
            read(data)
        assert f"{rows}[0].{name} is missing" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "could not be read (No such file or directory)"),
        (b"", "is not a whole JSON record"),
        (b'{"schema": 1, "rows": [', "is not a whole JSON record"),
        (b'{"schema": NaN}', "NaN is not a number"),
        (b"\xff\xfe", "is not a whole JSON record"),
        (b"[]", "the record is not a JSON object"),
    ],
)
@pytest.mark.parametrize("kind", READERS)
def test_broken_files(kind: str, content: bytes | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        READERS[kind][0](path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_card_may_name_layers_and_shares_itself() -> None:
    card = predictor_card(2)
    for number, layer in zip((5, 3), card["layers"], strict=True):
        layer |= {"layer": number, "share_of_weights": layer.pop("weight_share")}
    read = read_predictors(card)
    assert [(layer.layer, layer.share_of_weights) for layer in read.layers] == [(5, 0.04), (3, 0.04)]
    del card["layers"][0]["share_of_weights"]
    with pytest.raises(RecordError, match=r"layers\[0\]\.share_of_weights is missing"):
        read_predictors(card)


def test_a_card_caption_gives_no_path() -> None:
    assert card_caption(read_predictors(predictor_card())) == (
        "demo-opt · rank 64 · trained on demo_text · measured on 20,480 held-out tokens · stored as float32 · "
        "flash-workbench 0.1.0"
    )
    assert card_caption(read_predictors({"layers": predictor_card()["layers"]})) == "rank 64"
