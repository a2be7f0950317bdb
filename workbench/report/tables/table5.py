"""Table 5: what DRAM holds, as shares of the model's size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.report.numbers import NONE, ratio, size
from workbench.report.paper import paper
from workbench.report.reading import _Fields, _head, _parse, _run
from workbench.report.records import Run
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import Drawn, Entry, Records, measured
from workbench.report.tables.rows import read_rows

TITLE = "Table 5: what DRAM holds"
SAYS = (
    "OPT-6.7B: predictors 1.25%, embeddings 3%, attention 32.3%, FFN neurons 15.5%, together 52.1% of the model's size."
)
METHOD = (
    "The engine's own plan of 'all', made before anything is read; the peak is measured by the ablation. The floor of "
    "DRAM is the resident part with the predictors: what remains goes to neurons."
)
_PARTS = {
    "predictor_bytes": ("predictors", "predictors"),
    "embedding_bytes": ("embeddings", "embeddings"),
    "attention_bytes": ("attention, norms", "attention"),
    "slots_bytes": ("FFN neurons (slots)", "ffn"),
    "kv_bytes": ("KV cache", ""),
    "scratch_bytes": ("scratch", ""),
}


@dataclass(frozen=True)
class DramRecord:
    """Bytes by use of the row 'all', its budget, and the model's size."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    model_bytes: int
    budget_bytes: int
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def read_dram(record: str | Path | Mapping[str, Any]) -> DramRecord:
    """A record of kind dram, from a path or a parsed object. Raises RecordError, one line."""
    return _parse(record, _dram)


def _dram(data: Any, source: str) -> DramRecord:
    f = _head(data, source, "dram")
    record = DramRecord(
        source, f.mapping("machine"), _run(f), f.integer("model_bytes"), f.integer("budget_bytes"), _bytes(f)
    )
    f.done()
    if record.model_bytes == 0:
        raise f.fail("model_bytes", "is 0, not a model's size")
    return record


def _bytes(f: _Fields) -> dict[str, int]:
    own = _Fields(f.mapping("parts"), f.source, "parts")
    parts = {name: own.integer(name) for name in _PARTS}
    own.done()
    return parts


def draw(records: Records) -> Drawn:
    """From a record of kind dram; with an ablation also the peak that was measured."""
    record = read_dram(records["dram"])
    parts = [measured("plan", record)]
    columns = (
        Column("bytes", "DRAM", "here"),
        Column("share", "of the model", "here"),
        Column("paper", "of the model", f"paper ({paper().source['model']})"),
    )
    blocks = []
    for name, (label, theirs) in _PARTS.items():
        cells = _line(record.parts[name], record)
        cells["paper"] = share(paper().dram.get(theirs))
        blocks.append((Line("measured", label, cells),))
    floor = sum(record.parts[name] for name in ("predictor_bytes", "embedding_bytes", "attention_bytes"))
    paper_floor = sum(paper().dram[name] for name in ("predictors", "embeddings", "attention"))
    lines: list[tuple[str, int | None, str]] = [
        ("total planned", record.total, share(paper().dram["total"])),
        ("floor: resident", floor, share(paper_floor)),
    ]
    lines.append(("budget", record.budget_bytes, share(paper().source["dram_share"])))
    if "ablation" in records:
        rows = read_rows(records["ablation"])
        best = rows.record.all or next(
            (row for row in rows.record.rows if row.uses(windowing=True, bundling=True)), None
        )
        parts.append(measured("ablation", rows.record))
        lines.append(("peak measured", best.peak_rss_bytes if best else None, NONE))
    blocks += [(Line("measured", label, {**_line(value, record), "paper": theirs}),) for label, value, theirs in lines]
    table = Table(f"DRAM of 'all': {record.run.model} ({record.run.dtype})", "what", columns, tuple(blocks))
    headline = (
        f"'All' plans {share(record.total / record.model_bytes)} of the model's size here ({size(record.total)} of "
        f"{size(record.model_bytes)}), {share(paper().dram['total'])} in the paper."
    )
    return Drawn("table5", TITLE, headline, SAYS, METHOD, tuple(parts), (table,))


def _line(value: float | None, record: DramRecord) -> dict[str, str]:
    return {"bytes": size(value), "share": share(ratio(value, record.model_bytes) if value != 0 else 0.0)}


def share(value: float | None) -> str:
    """'32.3%', '1.25%'."""
    return NONE if value is None else f"{100 * value:.3g}%"


ENTRY = Entry("table5", TITLE, ("dram",), draw, ("ablation",), SAYS)
