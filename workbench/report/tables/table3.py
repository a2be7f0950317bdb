"""Table 3: latency of a token from end to end, here and for every model and device of the paper."""

from __future__ import annotations

from workbench.report import words
from workbench.report.figures import latency_figure
from workbench.report.numbers import NONE, ms, percent, ratio, times
from workbench.report.paper import PaperLatency, paper
from workbench.report.records import AblationRow
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Picture, Records, beside, measured
from workbench.report.tables.rows import Rows, energy, read_rows, tokens_per_j
from workbench.report.tables.table2 import beyond_notes, row_notes

TITLE = "Table 3: latency of a token, from end to end"
SAYS = (
    "All against naive: OPT-6.7B 4.8× on the CPU and 26× on the GPU (37× with speculative decoding, 1.4× over all); "
    "Falcon-7B 4.4×, Persimmon-8B 3.7×, Phi-2 2.4×, Llama 2 7B 3.1× on the CPU."
)
_PARTS = ("io", "mem", "compute", "total")
_COLUMNS = (
    *(Column(f"{part}{who}", part, f"ms {name}", group=0 if part in ("io", "mem") else 1, rank=rank)
      for part in _PARTS for who, name, rank in (("", "here", 0), ("_paper", "paper", 2))),
    Column("faster", "total, vs naive", "here", group=1),
    Column("faster_paper", "total, vs naive", "paper", group=1),
    Column("share", "mem", "of total here", group=0, rank=1),
    Column("floor", "floor", "ms", group=2),
    Column("over", "total /", "floor", group=2),
    Column("energy", "energy", "J a token", group=2),
    Column("per_j", "tokens", "per J", group=2),
)  # fmt: skip
_ALL = (
    Column("naive", "naive", "ms"),
    Column("hybrid", "hybrid", "ms", rank=2),
    Column("all", "all", "ms"),
    Column("speculative", "speculative", "ms", rank=1),
    Column("faster", "all vs", "naive"),
    Column("best", "speculative", "vs naive", rank=1),
)
_DEVICES = {"mlx-metal": "Metal (M1)", "torch-cuda": "GPU (RTX)", "mlx-cuda": "GPU (RTX)"}
_FAMILIES = {"falcon": "Falcon-7B (ReLU)", "persimmon": "Persimmon-8B", "phi": "Phi-2", "llama": "Llama 2 7B (FATReLU)"}


def draw(records: Records) -> Drawn:
    """From a record of kind ablation."""
    rows = read_rows(records["ablation"])
    record, theirs = rows.record, counterpart(rows)
    shown = [row for row in record.rows if row.name not in ("+ predictor", "+ windowing")]
    where = f"{theirs.model} on {theirs.device}"
    table = Table(
        f"Rows of table 3: {record.run.model} ({record.run.dtype}) beside the paper's {where}", "row",
        rows.columns(_COLUMNS),
        tuple((Line("measured", row.name, _cells(rows, row, theirs)),) for row in shown),
        row_notes(rows),
    )  # fmt: skip
    return Drawn(
        "table3", TITLE, _headline(rows, theirs), SAYS, words.METHOD, (measured("ablation", record),),
        (table, _every(rows, theirs)), (Picture("Latency of a token by technique", latency_figure(record)),),
        notes=beyond_notes(rows),
    )  # fmt: skip


def counterpart(rows: Rows) -> PaperLatency:
    """The part of the paper's table 3 that is nearest: the device by backend, the model by its name."""
    run = rows.record.run
    device = _DEVICES.get(run.backend, "CPU (M1 Max)")
    family = next((model for part, model in _FAMILIES.items() if part in run.model.lower()), "OPT-6.7B")
    entries = paper().table3
    fitting = [e for e in entries if e.device == device]
    return next((e for e in fitting if e.model == family), None) or next(
        (e for e in entries if e.model == family), fitting[0]
    )


def row_kind(row: AblationRow) -> str:
    """What the row is called in the paper's table 3; '' where it is not there."""
    if row.uses(speculative=True):
        return "speculative"
    published = paper().row_for(row.ablation)
    return (
        {"naive": "naive", "hybrid": "hybrid", "+ bundling (all)": "all"}.get(published.name, "") if published else ""
    )


def _cells(rows: Rows, row: AblationRow, theirs: PaperLatency) -> dict[str, str]:
    published = theirs.rows.get(row_kind(row))
    cells = {part: ms(row.times[part].median) for part in _PARTS}
    cells |= {f"{part}_paper": f"{published[f'{part}_ms']:g}" if published else NONE for part in _PARTS}
    return cells | {
        "share": percent(row.times["mem"].median / row.total),
        "faster": times(rows.faster(row)),
        "faster_paper": times(theirs.faster(row_kind(row))),
        "floor": ms(row.floor),
        "over": times(ratio(row.total, row.floor)),
        "energy": energy(row),
        "per_j": tokens_per_j(row),
    }


def _every(rows: Rows, near: PaperLatency) -> Table:
    """Each model and device of the paper, and this record in the first line."""
    record = rows.record
    found = {row_kind(row): row for row in reversed(record.rows)}
    cells = {kind: ms(found[kind].total) if kind in found else NONE for kind in ("naive", "hybrid", "all")}
    cells |= {"speculative": ms(rows.speculative.total if rows.speculative else None)}
    cells |= {"faster": times(rows.faster(record.all)), "best": times(rows.faster(rows.speculative))}
    blocks = [(Line("measured", f"{record.run.model}, this machine", cells),)]
    for entry in paper().table3:
        names = ("naive", "hybrid", "all", "speculative")
        cells = {n: f"{entry.rows[n]['total_ms']:g}" if n in entry.rows else NONE for n in names}
        cells |= {"faster": times(entry.faster()), "best": times(entry.faster("speculative"))}
        mark = ", beside it above" if entry is near else ""
        blocks.append((Line("paper", f"paper: {entry.model}, {entry.device}{mark}", cells),))
    note = "Total ms a token. Milliseconds belong to a model and a machine; ratios may be compared."
    return Table("Every model and device of the paper's table 3", "model and device", _ALL, tuple(blocks), (note,))


def _headline(rows: Rows, theirs: PaperLatency) -> str:
    best = rows.record.all
    if best is None or rows.record.naive is None:
        return words.headline(rows.record)
    ratios = beside(times(rows.faster(best)), times(theirs.faster()))
    text = f"All against naive: {ratios} ({theirs.model}, {theirs.device})"
    speculative = rows.speculative
    if speculative:
        gain = ratio(best.total, speculative.total)
        gpu = next(e for e in paper().table3 if "speculative" in e.rows)
        text += f"; speculative against all: {beside(times(gain), times(_gain(gpu)))}"
    fastest = min(rows.record.rows, key=lambda row: row.total)
    if fastest not in (best, speculative):
        text += f"; the fastest row here is {fastest.name}, {times(rows.faster(fastest))} naive"
    return f"{text}."


def _gain(entry: PaperLatency) -> float:
    return entry.rows["all"]["total_ms"] / entry.rows["speculative"]["total_ms"]


ENTRY = Entry("table3", TITLE, ("ablation",), draw, words=SAYS)
