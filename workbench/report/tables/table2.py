"""Table 2: what each technique reads from flash, how fast, and what that takes."""

from __future__ import annotations

from workbench.report import words
from workbench.report.numbers import NONE, ms, ratio, size, speed, times
from workbench.report.paper import paper
from workbench.report.records import AblationRow
from workbench.report.rows import less, notes_without_prefetch
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Records, measured
from workbench.report.tables.rows import Rows, energy, read_rows, sentence, tokens_per_j

TITLE = "Table 2: flash bytes, throughput and io latency, technique by technique"
SAYS = (
    "OPT-6.7B on M1 Max: 13.4 GB and 2196 ms of io a token for naive, 0.2 GB and 87 ms for all; energy is compared in "
    "words only (section 5.3)."
)
_COLUMNS = (
    Column("flash", "flash to DRAM", "here", rank=0),
    Column("paper_flash", "flash to DRAM", "paper", rank=3),
    Column("less", "flash, vs naive", "here", rank=1),
    Column("paper_less", "flash, vs naive", "paper", rank=2),
    Column("speed", "throughput", "here", rank=5),
    Column("paper_speed", "throughput", "paper", rank=6),
    Column("io", "io", "ms here", group=1),
    Column("paper_io", "io", "ms paper", group=1, rank=4),
    Column("faster", "io, vs naive", "here", group=1),
    Column("paper_faster", "io, vs naive", "paper", group=1),
    Column("floor", "floor", "ms", group=1, rank=1),
    Column("total", "total", "ms here", group=1, rank=1),
    Column("over", "total /", "floor", group=1, rank=2),
    Column("dram", "DRAM", "here", group=2),
    Column("peak", "DRAM", "peak here", group=2),
    Column("paper_dram", "DRAM", "paper", group=2),
    Column("energy", "energy", "J a token", group=2),
    Column("per_j", "tokens", "per J", group=2),
)


def draw(records: Records) -> Drawn:
    """From a record of kind ablation."""
    rows = read_rows(records["ablation"])
    record = rows.record
    table = Table(
        f"Rows of table 2: {record.run.model} ({record.run.dtype}) beside the paper's {paper().where}", "row",
        rows.columns(_COLUMNS),
        tuple((Line("measured", row.name, _cells(rows, row)),) for row in record.rows), row_notes(rows),
    )  # fmt: skip
    return Drawn(
        "table2", TITLE, _headline(rows), SAYS, words.METHOD, (measured("ablation", record),), (table,),
        notes=beyond_notes(rows),
    )  # fmt: skip


def _cells(rows: Rows, row: AblationRow) -> dict[str, str]:
    naive, theirs, base = rows.record.naive, paper().row_for(row.ablation), paper().naive
    cells = {
        "flash": size(row.flash_bytes),
        "less": less(naive.flash_bytes if naive else None, row.flash_bytes),
        "speed": speed(row.throughput),
        "io": ms(row.times["io"].median),
        "faster": times(ratio(naive.times["io"].median, row.times["io"].median) if naive else None),
        "floor": ms(row.floor),
        "total": ms(row.total),
        "over": times(ratio(row.total, row.floor)),
        "dram": size(row.dram_bytes),
        "peak": size(row.peak_rss_bytes),
        "energy": energy(row),
        "per_j": tokens_per_j(row),
    }
    if theirs is None:
        return cells | dict.fromkeys((c.key for c in _COLUMNS if c.key.startswith("paper_")), NONE)
    return cells | {
        "paper_flash": f"{theirs.flash_gb:g} GB",
        "paper_less": less(base.flash_gb, theirs.flash_gb),
        "paper_speed": f"{theirs.throughput_gb_per_s:.2f} GB/s",
        "paper_io": f"{theirs.io_ms:g}",
        "paper_faster": times(ratio(base.io_ms, theirs.io_ms)),
        "paper_dram": f"{theirs.dram_gb:g} GB",
    }


def _headline(rows: Rows) -> str:
    naive, best, base, theirs = rows.record.naive, rows.record.all, paper().naive, paper().all
    if naive is None or best is None:
        return words.headline(rows.record)
    here = ratio(naive.times["io"].median, best.times["io"].median)
    return (
        f"All techniques read {less(naive.flash_bytes, best.flash_bytes)} of naive's flash bytes here and "
        f"{less(base.flash_gb, theirs.flash_gb)} in the paper, and make io {times(here)} faster here and "
        f"{times(base.io_ms / theirs.io_ms)} in the paper."
    )


def row_notes(rows: Rows) -> tuple[str, ...]:
    """Notes of an ablation without p95: what medians they are, then what else a reader has to know."""
    first = f"Medians a token over {rows.record.run.tokens:,} tokens; compute includes the predictor."
    return (first, *notes_without_prefetch(rows.record, paper())[1:])


def beyond_notes(rows: Rows) -> tuple[str, ...]:
    """Prefetch, speculative decoding and energy in words, where they were measured."""
    found = [text for row in rows.record.rows if (text := sentence(row))]
    if rows.energy_sources:
        found.append(f"Energy: {rows.energy_sources}.")
    else:
        found.append("Energy was not measured: this record has no meter's reading.")
    return tuple(found)


ENTRY = Entry("table2", TITLE, ("ablation",), draw, words=SAYS)
