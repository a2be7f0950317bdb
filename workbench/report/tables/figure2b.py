"""Figure 2b: read throughput by chunk size and reads in flight."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.report import words
from workbench.report.figures import throughput_figure
from workbench.report.numbers import NONE, chunk, count, percent, ratio, speed
from workbench.report.paper import paper
from workbench.report.reading import read_flash
from workbench.report.records import FlashPoint, FlashRecord
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Picture, Records, measured, says

TITLE = "Figure 2b: read throughput by chunk size and threads"
METHOD = (
    "Random reads of each size from the store's own file, past the page cache; the floor is what the longest reads "
    "give: a chunk's speed is shown as a share of it."
)


def draw(records: Records) -> Drawn:
    """From a record of kind bench_flash."""
    record = read_flash(records["flash"])
    table = _table(record)
    here, _, _ = words.throughput(record)
    return Drawn(
        "figure2b", TITLE, f"{here[0].upper()}{here[1:]}", says("figure2b"), METHOD, (measured("flash", record),),
        (table,), (Picture("Read throughput by chunk size", throughput_figure(record)),),
    )  # fmt: skip


def _table(record: FlashRecord) -> Table:
    series = sorted({(p.engine, p.threads) for p in record.rows})
    best = max(p.bytes_per_s for p in record.rows if p.direct or not any(q.direct for q in record.rows))
    columns = [
        Column(f"{engine}/{threads}", engine, f"{threads} in flight", rank=index)
        for index, (engine, threads) in enumerate(reversed(series))
    ]
    columns += [Column("share", "of the longest", "reads' speed"), Column("reads", "reads", "a second", rank=9)]
    columns += [Column("paper", "paper", f"{paper().source['machine']}, 32")]
    sizes = sorted({p.chunk_bytes for p in record.rows} | {p["chunk_bytes"] for p in paper().throughput})
    published = {p["chunk_bytes"]: p["gb_per_s"] for p in paper().throughput}
    blocks = []
    for size in sizes:
        points = [p for p in record.rows if p.chunk_bytes == size]
        cells = {f"{p.engine}/{p.threads}": speed(p.bytes_per_s) for p in points}
        deep = _deepest(points)
        cells |= {"share": percent(ratio(deep.bytes_per_s if deep else None, best))}
        cells |= {"reads": count(deep.reads_per_s if deep else None)}
        cells["paper"] = f"{published[size]:.2f} GB/s" if size in published else NONE
        blocks.append((Line("measured", chunk(size), {c.key: NONE for c in columns} | cells),))
    note = "Share and reads a second: of the column with the most direct reads in flight."
    return Table("Read throughput by chunk size", "chunk", tuple(columns), tuple(blocks), (note,))


def _deepest(points: Sequence[FlashPoint]) -> FlashPoint | None:
    direct = [p for p in points if p.direct] or points
    return max(direct, key=lambda p: p.threads, default=None)


ENTRY = Entry("figure2b", TITLE, ("flash",), draw)
