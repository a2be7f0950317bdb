"""Figure 7: latency against DRAM as the neuron window grows."""

from __future__ import annotations

from workbench.report import words
from workbench.report.analysis_figures import window_figure
from workbench.report.analysis_records import WindowRecord, WindowRow, read_window
from workbench.report.analysis_tables import fitting_sentence
from workbench.report.numbers import ms, percent, ratio, size, times
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import NO_NUMBER, Drawn, Entry, Picture, Records, measured, says

TITLE = "Figure 7: latency against DRAM as the window grows"


def draw(records: Records) -> Drawn:
    """From a record of kind window."""
    record = read_window(records["window"])
    fitting = [row for row in record.rows if row.fits]
    best = min(fitting or record.rows, key=lambda row: row.measured.total)
    which = "that fits" if fitting else "of them, cut short,"
    headline = (
        f"{fitting_sentence(record)} The fastest {which} is k = {best.window}, {ms(best.measured.total)} ms a token "
        f"(whole, it takes {percent(best.need_bytes / record.model_bytes)} of the model's size); the paper takes k = 4."
    )
    return Drawn(
        "figure7", TITLE, headline, f"{says('figure7')} {NO_NUMBER}", words.METHOD, (measured("window", record),),
        (_table(record),), (Picture("Latency and DRAM as the window grows", window_figure(record)),),
    )  # fmt: skip


def _table(record: WindowRecord) -> Table:
    columns = (
        Column("need", "DRAM", "needed"),
        Column("share", "DRAM", "of the model"),
        Column("fits", "fits", "budget", rank=3),
        Column("total", "total", "ms"),
        Column("io", "io", "ms", rank=2),
        Column("flash", "flash", "a token"),
        Column("floor", "floor", "ms"),
        Column("over", "total /", "floor", rank=1),
        Column("cuts", "window", "cuts", rank=4),
    )
    rows = sorted(record.rows, key=lambda row: row.window)
    blocks = tuple((Line("measured", f"k = {row.window}", _cells(record, row)),) for row in rows)
    title = f"Neuron windows within {size(record.budget_bytes)}: {record.run.model} ({record.run.dtype})"
    return Table(title, "window", columns, blocks, ("A window that does not fit is cut short; cuts say how often.",))


def _cells(record: WindowRecord, row: WindowRow) -> dict[str, str]:
    run = row.measured
    return {
        "need": size(row.need_bytes),
        "share": percent(row.need_bytes / record.model_bytes if record.model_bytes else None),
        "fits": "yes" if row.fits else "no",
        "total": ms(run.total),
        "io": ms(run.times["io"].median),
        "flash": size(run.flash_bytes),
        "floor": ms(run.floor),
        "over": times(ratio(run.total, run.floor)),
        "cuts": f"{run.window_trims:,}",
    }


ENTRY = Entry("figure7", TITLE, ("window",), draw, number=False)
