"""Records of kind kernels_verify: how far each kernel is from its reference, and where it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.report.reading import _Fields, _head, _parse
from workbench.report.table import Column, Line, Table

WHERE = ("emulated", "as CUDA", "on Metal")
"""Three different claims; docs/kernels.md says what each is worth."""


@dataclass(frozen=True)
class KernelRow:
    """An operation on a machine, for one type and shape. worst: the largest relative error over `cases` inputs, None
    where it was not finite. fault: what the emulator caught, or empty."""

    kernel: str
    where: str
    dtype: str
    shape: str
    cases: int
    worst: float | None
    limit: float
    fault: str
    ok: bool


@dataclass(frozen=True)
class KernelsRecord:
    """`workbench kernels verify --json`."""

    source: str
    machine: Mapping[str, Any]
    run: Mapping[str, Any]
    rows: tuple[KernelRow, ...]


def read_kernels(record: str | Path | Mapping[str, Any]) -> KernelsRecord:
    """A record of kind kernels_verify, checked. RecordError when it is not one."""
    return _parse(record, _kernels)


def _kernels(data: Any, source: str) -> KernelsRecord:
    f = _head(data, source, "kernels_verify")
    read = KernelsRecord(source, f.mapping("machine"), f.mapping("run"), tuple(map(_row, f.items("rows"))))
    f.done()
    return read


def _row(f: _Fields) -> KernelRow:
    where = f.text("where")
    if where not in WHERE:
        raise f.fail("where", f"is {where!r}, not one of {', '.join(WHERE)}")
    row = KernelRow(
        f.text("kernel"), where, f.text("dtype"), f.text("shape"), f.integer("cases"), f.optional("worst"),
        f.number("limit"), f.text("fault"), f.flag("ok"),
    )  # fmt: skip
    f.done()
    return row


def kernels_table(record: KernelsRecord) -> Table:
    """A line for each operation, machine and type: the worst of its shapes; failures one by one below it."""
    columns = (
        Column("where", "ran"),
        Column("dtype", "weights"),
        Column("cases", "cases"),
        Column("worst", "worst error", "relative"),
        Column("limit", "limit"),
        Column("ok", ""),
    )
    groups: dict[tuple[str, str, str], list[KernelRow]] = {}
    for row in record.rows:
        groups.setdefault((row.where, row.kernel, row.dtype), []).append(row)
    blocks = []
    for (where, kernel, dtype), rows in groups.items():
        errors = [row.worst for row in rows]
        worst = None if None in errors else max(error for error in errors if error is not None)
        cells = {
            "where": where,
            "dtype": dtype,
            "cases": str(sum(row.cases for row in rows)),
            "worst": _error(worst, rows[0].limit),
            "limit": f"{rows[0].limit:.0e}" if rows[0].limit else "exact",
            "ok": "ok" if all(row.ok for row in rows) else "FAILED",
        }
        blocks.append((Line("measured", kernel, cells),))
    failed = [row for row in record.rows if not row.ok]
    notes = tuple(
        f"{row.kernel} {row.where}, {row.dtype}, {row.shape}: {row.fault or _error(row.worst, row.limit)}"
        for row in failed
    )
    return Table("Kernels against float64", "kernel", columns, tuple(blocks), notes)


def _error(worst: float | None, limit: float) -> str:
    if worst is None:
        return "not equal" if not limit else "not finite"
    return f"{worst:.1e}" if worst else "0"


def headline(record: KernelsRecord) -> str:
    """The outcome in a sentence, a machine at a time."""
    parts = []
    for where in WHERE:
        rows = [row for row in record.rows if row.where == where]
        if rows:
            good = sum(row.ok for row in rows)
            parts.append(f"{good} of {len(rows)} lines hold {where}")
    missing = [where for where in WHERE if not any(row.where == where for row in record.rows)]
    return f"{'; '.join(parts)}." + (f" Not run: {', '.join(missing)}." if missing else "")
