"""Figure 4a: neurons that tokens in a row use together, and what one more token adds."""

from __future__ import annotations

from workbench.report.analysis_figures import aggregated_figure
from workbench.report.figures import reuse_figure
from workbench.report.numbers import NONE
from workbench.report.paper import paper
from workbench.report.reading import read_reuse
from workbench.report.records import ReuseRecord
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Picture, Records, beside, measured, says
from workbench.report.tables.table5 import share

TITLE = "Figure 4a: aggregated neuron use, and new neurons a token"
METHOD = (
    "Exact sets of the dense model's active neurons; each stretch of 256 tokens by itself, means over stretches and "
    "layers. The floor of a window: what a token adds is read whatever the reader does."
)


def draw(records: Records) -> Drawn:
    """From a record of kind reuse."""
    record = read_reuse(records["reuse"])
    pictures = [Picture("Kept and new neurons by window", reuse_figure(record))]
    if record.aggregated:
        pictures.insert(0, Picture("Aggregated neuron use", aggregated_figure(record)))
    k = paper().source["window"]
    here = next((row for row in record.rows if row.window == k), None)
    theirs = next(p for p in paper().reuse if p["window"] == k)
    new = beside(share(here.new_share if here else None), share(theirs["new_share"]))
    kept = beside(share(here.kept_share if here else None), share(theirs["kept_share"]))
    headline = f"k = {k}: a token reads of the FFN {new}; the window keeps {kept}."
    return Drawn(
        "figure4a", TITLE, headline, says("figure4a"), METHOD, (measured("reuse", record),), (_table(record),),
        tuple(pictures), notes=("Shares have no time; table 2 has the floor of the bytes that they cause.",),
    )  # fmt: skip


def _table(record: ReuseRecord) -> Table:
    columns = (
        Column("new", "new a token", "here"),
        Column("paper_new", "new a token", "paper"),
        Column("kept", "kept in DRAM", "here"),
        Column("paper_kept", "kept in DRAM", "paper"),
        Column("used", "used by k tokens", "here"),
    )
    published = {p["window"]: p for p in paper().reuse}
    use = record.aggregated
    used = dict(zip(use.tokens, use.mean, strict=True)) if use else {}
    blocks = []
    for row in sorted(record.rows, key=lambda point: point.window):
        theirs = published.get(row.window, {})
        cells = {"new": share(row.new_share), "kept": share(row.kept_share), "used": share(used.get(row.window))}
        cells |= {"paper_new": share(theirs.get("new_share")), "paper_kept": share(theirs.get("kept_share"))}
        blocks.append((Line("measured", f"k = {row.window}", cells),))
    note = f"Shares of the FFN. Paper: {paper().source['model']}; {NONE} where it prints no number."
    return Table(f"Neuron windows: {record.run.model}", "window", columns, tuple(blocks), (note,))


ENTRY = Entry("figure4a", TITLE, ("reuse",), draw)
