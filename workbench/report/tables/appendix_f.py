"""Appendix F: other model families and smaller models, beside this one."""

from __future__ import annotations

from workbench.report.analysis_records import read_sparsity
from workbench.report.numbers import NONE, percent, times
from workbench.report.paper import paper
from workbench.report.reading import read_predictors, read_reuse
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Measured, Records, measured
from workbench.report.tables.rows import read_rows
from workbench.report.tables.table4 import card_means
from workbench.report.tables.table5 import share

TITLE = "Appendix F: other families and smaller models"
SAYS = (
    "No figures of this appendix are in the package's reference; the lines are what the paper prints of each family "
    "elsewhere: zeros, prediction, window, DRAM and the gain of all over naive on the CPU."
)
METHOD = "Zeros on text, predictors from their card, kept neurons by exact sets, the gain from the ablation's rows."
_COLUMNS = (
    Column("zeros", "zeros", "of the FFN"),
    Column("over", "predicted /", "active"),
    Column("missed", "false", "negatives"),
    Column("kept", "kept in DRAM", "k = 4"),
    Column("new", "new a token", "k = 4", rank=1),
    Column("dram", "DRAM", "of the model"),
    Column("faster", "all vs", "naive"),
    Column("floor", "all: total /", "floor", rank=2),
)


def draw(records: Records) -> Drawn:
    """From a record of kind sparsity; with a card, a reuse record and an ablation also what these say."""
    record = read_sparsity(records["sparsity"])
    parts: list[Measured] = [measured("sparsity", record)]
    zeros = sum(row.zeros for row in record.rows) / len(record.rows)
    cells = {c.key: NONE for c in _COLUMNS} | {"zeros": share(zeros)}
    if "predictors" in records:
        means = card_means(read_predictors(records["predictors"]))
        cells |= {"over": times(means["predicted_over_active"]), "missed": percent(means["false_negative"])}
    if "reuse" in records:
        reuse = read_reuse(records["reuse"])
        parts.append(measured("reuse", reuse))
        point = next((row for row in reuse.rows if row.window == paper().source["window"]), None)
        if point:
            cells |= {"kept": share(point.kept_share), "new": share(point.new_share)}
    if "ablation" in records:
        rows = read_rows(records["ablation"])
        parts.append(measured("ablation", rows.record))
        best = rows.record.all
        cells |= {"dram": rows.record.run.dram or NONE, "faster": times(rows.faster(best))}
        cells["floor"] = times(best.total / best.floor if best and best.floor else None)
    blocks = [(Line("measured", record.run.model, cells),)]
    for family, figures in paper().families.items():
        published = next(e for e in paper().table3 if e.model == family)
        theirs = {
            "zeros": share(figures.get("zeros")),
            "over": times(figures.get("predicted_over_active")),
            "missed": percent(figures.get("false_negative")),
            "kept": share(figures.get("kept_share")),
            "new": share(figures.get("new_share")),
            "dram": share(figures.get("dram_share")),
            "faster": times(published.faster()),
            "floor": NONE,
        }
        blocks.append((Line("paper", f"paper: {family}", theirs),))
    known = [f for f, figures in paper().families.items() if "zeros" in figures]
    headline = (
        f"{record.run.model} has {share(zeros)} zeros; the paper's families "
        + ", ".join(f"{f} {share(paper().families[f]['zeros'])}" for f in known)
        + "."
    )
    table = Table("Families", "model", _COLUMNS, tuple(blocks), (f"{NONE}: not measured here, or not printed there.",))
    return Drawn("appendix_f", TITLE, headline, SAYS, METHOD, tuple(parts), (table,))


ENTRY = Entry("appendix_f", TITLE, ("sparsity",), draw, ("predictors", "reuse", "ablation"), SAYS)
