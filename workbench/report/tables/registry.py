"""Every NAME of `workbench tables`, in the paper's order, and which records are which part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import RecordError
from workbench.report.reading import load_json
from workbench.report.tables import (
    appendix_d,
    appendix_f,
    appendix_g,
    figure2b,
    figure4a,
    figure7,
    figure8,
    figure9,
    figure10,
    table1,
    table2,
    table3,
    table4,
    table5,
)
from workbench.report.tables.drawn import Entry

ENTRIES: dict[str, Entry] = {
    module.ENTRY.name: module.ENTRY
    for module in (
        table1, table2, table3, table4, table5, figure2b, figure4a, figure7, figure8, figure9, figure10, appendix_d,
        appendix_f, appendix_g,
    )
}  # fmt: skip
TABLE = "table"
"""The kind of a record that holds the records of one table."""
_KINDS = {"ablation": "ablation", "bench_flash": "flash", "reuse": "reuse", "sparsity": "sparsity", "dram": "dram",
          "coactivation": "coactivation", "window": "window", "side_by_side": "side_by_side",
          "long_run": "long_run"}  # fmt: skip


def entry(name: str) -> Entry:
    """A NAME's entry. RecordError, with the known ones, for another."""
    if name not in ENTRIES:
        raise RecordError(f"tables: {name!r} is not a table or figure; choose of {', '.join(ENTRIES)}")
    return ENTRIES[name]


def name_of(stem: str) -> str:
    """'table2' of a stored record's 'table2-opt-6.7b'. RecordError where it begins with no NAME."""
    name = stem.partition("-")[0]
    if name not in ENTRIES:
        raise RecordError(f"tables: {stem}.json is not named NAME-what.json with NAME one of {', '.join(ENTRIES)}")
    return name


def parts_of(data: Any, source: str) -> dict[str, Any]:
    """The parts that a parsed record holds, by name: several of a table's own record, one of any other.

    RecordError for what is no record that a table is drawn from.
    """
    if not isinstance(data, Mapping):
        raise RecordError(f"{source}: is not a JSON object; pass a record")
    kind = data.get("kind")
    if kind == TABLE:
        held = data.get("records")
        if not isinstance(held, Mapping) or not held:
            raise RecordError(f"{source}: has no records; write it again with `workbench tables`")
        return dict(held)
    if kind == "evaluation":
        return _evaluation_parts(data)
    if kind in _KINDS:
        return {_KINDS[kind]: data}
    if kind is None and "layers" in data:
        return {"predictors": data}
    raise RecordError(f"{source}: no table is drawn from a record of kind {kind!r}; pass another record")


def _evaluation_parts(data: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation may have text, the tasks of table 1 and MMLU."""
    tasks = data.get("tasks")
    names = {task.get("name") for task in tasks if isinstance(task, dict)} if isinstance(tasks, list) else set()
    found = {}
    if data.get("data") is not None:
        found["evaluation"] = data
    if "mmlu" in names:
        found["mmlu"] = data
    if names - {"mmlu"} or not found:
        found["tasks"] = data
    return found


def gather(records: Iterable[str | Path | Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of several records, given as paths or parsed. RecordError where two hold the same part."""
    found: dict[str, Any] = {}
    of: dict[str, str] = {}
    for record in records:
        source = str(record) if isinstance(record, str | Path) else "record"
        path = Path(source)
        if isinstance(record, str | Path) and path.is_dir():
            path = path / "card.json"
        data = load_json(path) if isinstance(record, str | Path) else record
        for name, part in parts_of(data, source).items():
            if name in found and found[name] != part:
                raise RecordError(f"{source}: holds the part {name!r}, and so does {of[name]}; give one of them")
            found[name], of[name] = part, source
    return found
