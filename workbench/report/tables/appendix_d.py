"""Appendix D: co-activation, and why bundling closest friends does not pay."""

from __future__ import annotations

from workbench.report.analysis_records import CoactivationRecord, read_coactivation
from workbench.report.analysis_tables import coactivation_table
from workbench.report.coactivation_figure import coactivation_figure
from workbench.report.numbers import percent, times
from workbench.report.tables.drawn import NO_NUMBER, Drawn, Entry, Picture, Records, measured, says

TITLE = "Appendix D: co-activation and bundles of friends"
METHOD = (
    "Exact counts of all pairs of the dense model's active neurons. The floor of bundles is 1.00×: every wanted neuron "
    "read once, alone."
)


def draw(records: Records) -> Drawn:
    """From a record of kind coactivation."""
    record = read_coactivation(records["coactivation"])
    return Drawn(
        "appendix_d", TITLE, _headline(record), f"{says('appendix_d')} {NO_NUMBER}", METHOD,
        (measured("co-activation", record),), (coactivation_table(record),),
        (Picture("Co-activation, closest friends and bundles", coactivation_figure(record)),),
    )  # fmt: skip


def _headline(record: CoactivationRecord) -> str:
    rows = [row for row in record.rows if row.window_bytes is not None and row.window_all_duplicates is not None]
    law = record.power_law
    text = f"Co-activation falls as rank^-{law.exponent:.2f} (r² {law.r2:.2f})" if law else "No power law fits"
    hot = sum(row.hot_friends for row in record.rows) / len(record.rows)
    text += f"; {percent(hot)} of the closest friends are among the hottest {percent(record.hottest)}"
    if rows:
        more = sum(row.window_bytes or 0.0 for row in rows) / len(rows)
        wasted = sum(row.window_all_duplicates or 0.0 for row in rows) / len(rows)
        text += f"; bundles of friends read {times(more)} the bytes of single records, {percent(wasted)} duplicates"
    return f"{text}."


ENTRY = Entry("appendix_d", TITLE, ("coactivation",), draw, number=False)
