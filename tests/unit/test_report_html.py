"""The page and the figures: whole, self-contained, drawn alike twice, and refused without a trace."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from test_report_records import ablation_record, flash_record, predictor_card, reuse_record

from workbench.errors import RecordError, WorkbenchError
from workbench.report import (
    latency_figure,
    predictor_figure,
    read_ablation,
    read_flash,
    read_predictors,
    read_reuse,
    reuse_figure,
    throughput_figure,
    write_report,
)
from workbench.report.figures import enlarged_limit, segments
from workbench.report.style import spread
from workbench.report.words import comparable, headline

PNG = b"\x89PNG\r\n\x1a\n"


class _Page(HTMLParser):
    """Collects text and every attribute that could fetch something; checks that elements close."""

    VOID = frozenset({"meta", "img", "br", "!doctype"})

    def __init__(self) -> None:
        super().__init__()
        self.fetches: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "srcset", "data", "action", "poster", "background", "style"}:
                self.fetches.append((tag, name, value or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def everything(out: Path, **run: Any) -> list[Path]:
    return write_report(
        out, ablation=ablation_record(**run), flash=flash_record(), reuse=reuse_record(), predictors=predictor_card()
    )


def test_report_writes_the_page_and_a_figure_for_each_record(tmp_path: Path) -> None:
    record = tmp_path / "ablation.json"
    record.write_text(json.dumps(ablation_record()))
    assert write_report(tmp_path / "a", ablation=record) == [tmp_path / "a/report.html", tmp_path / "a/latency.png"]
    names = [path.name for path in everything(tmp_path / "b" / "c")]
    assert names == ["report.html", "latency.png", "throughput.png", "reuse.png", "predictors.png"]
    assert sorted(path.name for path in (tmp_path / "b" / "c").iterdir()) == sorted(names)
    assert all((tmp_path / "b" / "c" / name).read_bytes().startswith(PNG) for name in names[1:])


def test_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    path = everything(tmp_path)[0]
    page = parsed(path)
    assert len(page.fetches) == 4
    assert all(tag == "img" and value.startswith("data:image/png;base64,") for tag, _, value in page.fetches)
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(|src=\"(?!data:)", text)
    assert "default-src 'none'" in text


def test_page_states_numbers_units_and_provenance(tmp_path: Path) -> None:
    text = " ".join("".join(parsed(everything(tmp_path)[0]).words).split())
    for expected in (
        "All techniques together make a token 17.7× faster than naive, 4.07 ms against 72.0 ms, and read 1.50 MB of "
        "flash where naive reads 96.0 MB.",
        "The paper: 4.8× faster in total (OPT-6.7B, M1 Max, CPU, its table 3), 0.2 GB of flash where naive reads "
        "13.4 GB (its table 2).",
        "The fastest row here, all, merged reads, takes 3.44 ms (21×).",
        "p95",
        "GB/s",
        "naive: io 66.4, mem 0, compute 5.60 ms; + bundling (all): io 1.84, mem 0.23, compute 2.00 ms.",
        "naive: io 2196, mem 0, compute 986 ms; all: io 105, mem 58, compute 506 ms (OPT-6.7B, M1 Max, CPU, table 3).",
        "32 deep, 675 MB/s at 4 KiB and 2.39 GB/s at 4 MiB",
        "k = 4 keeps 15% of the FFN and reads 1.3% a token.",
        "mean over 8 layers: 4.1% false negatives, 6.5% false positives, 2.2 predicted for each active",
        "Test CPU 9000, 2 cores, 16.0 GB DRAM, Linux 6.1",
        "0123456789abcdef0123456789abcdef01234567",
        "torch2.13.0",
        "workbench ablate store --predictors predictors/demo --json ablation.json",
        "naive reads 1.45 GB/s here, 6.10 GB/s in the paper.",
    ):
        assert expected in text
    assert "synthetic" not in text


def test_hostile_text_in_a_record_stays_text(tmp_path: Path) -> None:
    hostile = '<script src="x">$\\frac{</script>'
    data = ablation_record(model=hostile, command=hostile)
    data["rows"][0]["name"] = hostile
    page = parsed(write_report(tmp_path, ablation=data)[0])
    assert "script" not in page.tags
    assert "".join(page.words).count(hostile) >= 3


def test_synthetic_is_printed_on_page_and_figure(tmp_path: Path) -> None:
    real, synthetic = everything(tmp_path / "real"), everything(tmp_path / "synthetic", synthetic=True)
    assert "synthetic weights: latency only" in synthetic[0].read_text(encoding="utf-8")
    assert real[1].read_bytes() != synthetic[1].read_bytes()
    assert real[2].read_bytes() == synthetic[2].read_bytes()  # its own record is not synthetic


def test_headline_without_all_or_naive_and_when_slower() -> None:
    data = ablation_record()
    data["rows"] = data["rows"][1:3]
    assert headline(read_ablation(data)) == (
        "The fastest row, + predictor, takes 11.9 ms a token and reads 6.40 MB of flash; this record has no naive row "
        "to compare with."
    )
    data = ablation_record()
    data["rows"][0]["total_ms"] = 2.035
    assert "make a token 2.0× slower than naive" in headline(read_ablation(data))


def test_limits_of_comparison_follow_the_record() -> None:
    data = ablation_record(synthetic=True)
    data["rows"][1]["ablation"]["io"] = "buffered"
    flash = flash_record()
    flash["machine"] = {"cpu": "Another CPU"}
    items = "\n".join(comparable(read_ablation(data), read_flash(flash), None))
    assert "Synthetic weights: latency and bytes may be compared, text and accuracy may not." in items
    assert "page cache (buffered)" in items
    assert "The throughput figure is of another machine: Another CPU." in items


def test_segments_take_the_predictor_out_of_compute() -> None:
    row = read_ablation(ablation_record()).rows[4]
    assert segments(row) == pytest.approx({"io": 1.84, "mem": 0.23, "compute": 1.89, "predictor": 0.11})


def test_enlarged_panel_holds_the_fast_rows_only() -> None:
    rows = read_ablation(ablation_record()).rows
    assert enlarged_limit(rows) == pytest.approx(1.04 * rows[2].times["total"].p95)
    assert enlarged_limit(rows[:2]) is None


def test_labels_are_moved_apart() -> None:
    placed = spread([50.0, 51.0, 49.0, 99.0], 10, 0, 100)
    assert all(b - a >= 10 - 1e-6 for a, b in itertools.pairwise(sorted(placed)))
    assert placed[2] < placed[0] < placed[1] < placed[3] <= 100


def test_drawing_is_repeatable_and_leaves_settings_alone() -> None:
    before = dict(mpl.rcParams)
    record = read_ablation(ablation_record())
    assert latency_figure(record) == latency_figure(record)
    assert dict(mpl.rcParams) == before


def test_figures_draw_the_smallest_and_odd_records() -> None:
    one = ablation_record(model="a model with a very long name indeed, " * 6)
    one["rows"] = one["rows"][4:5]
    many = ablation_record()
    many["rows"] = many["rows"] * 3
    flash, reuse, card = flash_record(), reuse_record(), predictor_card(1)
    flash["rows"] = flash["rows"][:1]
    flash["fit"] = {}
    reuse["rows"] = reuse["rows"][:1]
    del reuse["by_layer"]
    for drawn in (
        latency_figure(read_ablation(one)),
        latency_figure(read_ablation(many)),
        throughput_figure(read_flash(flash)),
        reuse_figure(read_reuse(reuse)),
        predictor_figure(read_predictors(card)),
    ):
        assert drawn.startswith(PNG)


def test_a_broken_record_writes_nothing(tmp_path: Path) -> None:
    broken = reuse_record()
    broken["rows"][0]["kept_share"] = 1.5
    with pytest.raises(RecordError, match=r"rows\[0\]\.kept_share is 1\.5, outside 0 to 1") as caught:
        write_report(tmp_path / "out", ablation=ablation_record(), reuse=broken)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_unwritable_target_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorkbenchError, match="report: could not write") as caught:
        write_report(tmp_path / "file", ablation=ablation_record())
    assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "in the way"
