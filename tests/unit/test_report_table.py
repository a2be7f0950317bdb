"""Tables: exact cells in every renderer, and nothing cut off at any width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from test_report_records import ablation_record, flash_record, predictor_card, reuse_record

from workbench.ablation import PAPER_ROWS
from workbench.report import (
    Column,
    Line,
    Table,
    ablation_table,
    flash_table,
    neuron_table,
    predictor_table,
    read_ablation,
    read_flash,
    read_predictors,
    read_reuse,
    reuse_table,
    to_html,
    to_latex,
    to_markdown,
    to_rich,
)
from workbench.report import numbers as n
from workbench.report.paper import paper


def printed(table: Table, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(to_rich(table))
    return out.getvalue()


def squeezed(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]


@pytest.fixture
def table() -> Table:
    return ablation_table(read_ablation(ablation_record()))


def test_paper_rows_are_found_by_their_techniques() -> None:
    reference = paper()
    assert list(reference.rows) == list(PAPER_ROWS)
    record = read_ablation(ablation_record())
    names = [found.name if (found := reference.row_for(row.ablation)) else None for row in record.rows]
    assert names == [*PAPER_ROWS, None]
    assert reference.row_for({**record.rows[4].ablation, "predictor": "oracle"}) is None
    assert reference.row_for({**record.rows[0].ablation, "io": "buffered"}) is None


def test_ablation_cells(table: Table) -> None:
    measured, p95, published = table.blocks[4]
    assert (measured.label, p95.label, published.label) == ("+ bundling (all)", "p95", "paper")
    assert measured.cells == {
        "total": "4.07", "faster": "17.7×", "io": "1.84", "io_faster": "36×", "mem": "0.23", "compute": "2.00",
        "predictor": "0.11", "floor": "2.50", "over_floor": "1.6×", "flash": "1.50 MB", "flash_less": "1/64",
        "reads": "366", "throughput": "815 MB/s", "dram": "48.0 MB", "peak": "50.4 MB",
    }  # fmt: skip
    assert p95.cells == {"total": "5.09", "io": "2.30", "mem": "0.29", "compute": "2.50", "predictor": "0.14"}
    assert published.cells == {
        "total": "669", "faster": "4.8×", "io": "87", "io_faster": "25×", "mem": "58", "compute": "506",
        "flash": "0.2 GB", "flash_less": "1/67", "throughput": "2.25 GB/s", "dram": "6.5 GB",
    }  # fmt: skip
    assert [line.label for line in table.blocks[5]] == ["all, merged reads", "p95"]
    assert table.blocks[0][2].cells["total"] == "3182"
    assert set(measured.cells) == {column.key for column in table.columns}


def test_without_naive_no_ratio_is_given() -> None:
    data = ablation_record()
    del data["rows"][0]
    table = ablation_table(read_ablation(data))
    assert table.blocks[0][0].cells["faster"] == "–"
    assert table.blocks[0][0].cells["flash_less"] == "–"
    assert "This record has no naive row, so no ratio to naive can be given." in table.notes


def test_notes_say_what_a_row_is_not() -> None:
    data = ablation_record(synthetic=True)
    data["rows"][4]["ablation"]["predictor"] = "oracle"
    data["rows"][5]["ablation"]["io"] = "buffered"
    data["rows"][3]["window_trims"] = 1234
    notes = "\n".join(ablation_table(read_ablation(data)).notes)
    assert "page cache (buffered), so not at flash speed: all, merged reads." in notes
    assert "(oracle), so no predictor runs: + bundling (all)." in notes
    assert "+ windowing: the window was cut short 1,234 times to keep the DRAM budget." in notes
    assert "Synthetic weights" in notes


def test_terminal_is_whole_when_wide(table: Table) -> None:
    lines = squeezed(printed(table, 200))
    assert lines[2][1:5] == ["ms", "vs naive", "ms", "vs naive"]
    row = next(line for line in lines if line[0] == "+ predictor")
    assert row[1:] == [table.blocks[2][0].cells[c.key] for c in table.columns]


@pytest.mark.parametrize("width", [100, 120])
def test_terminal_splits_in_two_at_100_and_120_columns(table: Table, width: int) -> None:
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert "Not shown" not in text
    for line in (line for block in table.blocks for line in block):
        for cell in line.cells.values():
            assert re.search(rf"(?<!\S){re.escape(cell)}(?!\S)", text), cell
    rows = [line for line in squeezed(text) if line[0] == "+ bundling (all)"]
    assert rows[0][1:] == ["4.07", "17.7×", "1.84", "36×", "0.23", "2.00", "0.11", "2.50", "1.6×"]
    assert rows[1][1:] == ["1.50 MB", "1/64", "366", "815 MB/s", "48.0 MB", "50.4 MB"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_terminal_names_what_it_leaves_out(table: Table, width: int) -> None:
    text = printed(table, width)
    flat = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    shown = re.search(rf"Not shown at {width} columns: (.*?)\. A wider terminal", flat)
    gone = shown[1].split(", ") if shown else []
    assert gone or width == 80
    titles = [column.title for column in table.columns]
    assert set(gone) <= set(titles)
    assert "…" not in text
    for column in table.columns:
        if column.title not in gone:
            assert all(line.cells.get(column.key, "") in flat for block in table.blocks for line in block)


def test_too_narrow_for_the_first_columns_folds_and_keeps_every_digit() -> None:
    table = Table("t", "row", (Column("a", "a"),), ((Line("measured", "r", {"a": "123456789012"}),),))
    assert "123456789012" in re.sub(r"\s|─|a|r", "", printed(table, 12))
    assert "…" not in printed(table, 12)


def test_markdown(table: Table) -> None:
    lines = to_markdown(table).splitlines()
    assert lines[0] == "**Ablation: demo-opt (float32), beside the paper's OPT-6.7B, M1 Max**"
    assert lines[2].startswith("| row | total ms | total vs naive | io ms | io vs naive | mem ms | compute ms |")
    assert lines[3].count("--:") == len(table.columns)
    assert lines[4].startswith(
        "| **naive** | 72.0 | 1.0× | 66.4 | 1.0× | 0 | 5.60 | 0 | 60.0 | 1.2× | 96.0 MB | 100% |"
    )
    assert lines[5].startswith("| – p95 | 90.0 |  | 83.0 |")
    assert lines[6].startswith("| – paper | 3182 | 1.0× | 2196 | 1.0× | 0 | 986 |")
    assert lines[-1].startswith("- Floor: ")


def test_html(table: Table) -> None:
    text = to_html(table)
    assert '<th scope="col">total<span class="unit">ms</span></th>' in text
    assert '<tr class="measured"><th scope="row">naive</th><td>72.0</td><td>1.0×</td><td>66.4</td>' in text
    assert '<tr class="p95"><th scope="row">p95</th><td>90.0</td>' in text
    assert '<tr class="paper"><th scope="row">paper</th><td>3182</td>' in text
    assert text.count("<tbody>") == text.count("</tbody>") == len(table.blocks)


def test_latex(table: Table) -> None:
    text = to_latex(table)
    assert (
        r"naive & 72.0 & 1.0$\times$ & 66.4 & 1.0$\times$ & 0 & 5.60 & 0 & 60.0 & 1.2$\times$ & 96.0 MB & 100\%" in text
    )
    assert r"\quad p95 & 90.0 &  & 83.0 &" in text
    assert r"\quad paper & 3182 & 1.0$\times$ & 2196" in text
    assert text.count(r"\midrule") == len(table.blocks)
    assert text.count("{") == text.count("}")


def test_hostile_names_are_escaped() -> None:
    name = r"<b>&|_%$#{}~^\x"
    table = Table(name, "row", (Column("a", "a"),), ((Line("measured", name, {"a": name}),),), (name,))
    assert "<b>" not in to_html(table)
    assert r"<b>&\|_%$#{}~^\x" in to_markdown(table)
    escaped = r"<b>\&|\_\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}x"
    assert to_latex(table).count(escaped) == 4
    assert "[b]" in printed(Table("t", "row", (), ((Line("measured", "[b]", {}),),)), 80)


def test_other_tables() -> None:
    neurons = neuron_table(read_ablation(ablation_record()))
    assert neurons.blocks[4][0].cells == {
        "active": "620", "predicted": "1,550", "over": "2.5×", "loaded": "390", "in_window": "3,900", "trims": "0",
        "tokens": "64",
    }  # fmt: skip
    flash = flash_table(read_flash(flash_record()))
    assert [(c.head, c.unit) for c in flash.columns] == [
        ("io_uring", "32 deep"), ("threads", "1 deep"), ("threads", "8 deep"), ("threads", "32 deep"),
        ("buffered", "32 deep"),
    ]  # fmt: skip
    assert flash.blocks[0][0].label == "4 KiB"
    assert flash.blocks[0][0].cells["threads/True/1"] == "41.5 MB/s"
    assert flash.notes == (
        "Fitted cost model: 92 µs a read and 2.35 GB/s; a gap of up to 12 KiB is cheaper to read than to skip.",
    )
    reuse = reuse_table(read_reuse(reuse_record()))
    assert [line.label for line in reuse.blocks[3]] == ["k = 4", "paper"]
    assert reuse.blocks[3][0].cells == {"kept": "15%", "new": "1.3%"}
    assert reuse.blocks[3][1].cells == {"kept": "24%", "new": "2.4%"}
    predictors = predictor_table(read_predictors(predictor_card()))
    assert predictors.blocks[1][0].cells["fn"] == "2.6%"
    assert predictors.blocks[-1][0].cells == {"fn": "5.0%", "fp": "7.0%", "over": "3.0×", "weights": "2.4%"}
    assert "buffered" not in printed(flash, 60).split("Not shown")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (n.ms(0), "0"),
        (n.ms(0.0311), "0.031"),
        (n.ms(9.996), "10.0"),
        (n.ms(99.96), "100"),
        (n.ms(3182), "3182"),
        (n.ms(None), "–"),
        (n.size(999), "999 B"),
        (n.size(999_600), "1.00 MB"),
        (n.size(13.4e9), "13.4 GB"),
        (n.size(2.5e12), "2.50 TB"),
        (n.speed(0), "–"),
        (n.times(19.96), "20×"),
        (n.times(0.5), "0.50×"),
        (n.percent(0.024), "2.4%"),
        (n.percent(0.9999), "100%"),
        (n.chunk(4096), "4 KiB"),
        (n.chunk(1 << 30), "1 GiB"),
        (n.count(1536.2), "1,536"),
        (n.short_commit("0123456789abcdef-dirty"), "0123456789ab-dirty"),
        (n.short_commit("0123456789ab+"), "0123456789ab+"),
        (n.short_commit("version 0.1.0"), "version 0.1.0"),
    ],
)
def test_numbers(text: str, expected: str) -> None:
    assert text == expected
