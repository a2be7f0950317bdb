"""How the report writes numbers: units stated, three significant digits, nothing cut off."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from workbench.report.records import Run

NONE = "–"
"""Stands where there is no figure."""
_UNITS = ("B", "kB", "MB", "GB", "TB")


def ms(value: float | None) -> str:
    """Milliseconds without the unit: '3182', '91.2', '8.40', '0.031'."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.0995 else f"{value:.3f}"


def times(value: float | None) -> str:
    """A ratio: '1.0×', '4.8×', '25×', '0.05×'."""
    if value is None:
        return NONE
    return f"{value:.0f}×" if value >= 19.95 else f"{value:.1f}×" if value >= 0.95 else f"{value:.2f}×"


def count(value: float | None) -> str:
    """A count, thousands apart: '1,536', '12.4', '0'."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 99.95 or value == int(value) else f"{value:.1f}"


def size(value: float | None) -> str:
    """Bytes with a decimal unit, three digits: '13.4 GB', '1.50 MB', '512 B'."""
    if value is None:
        return NONE
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def speed(value: float | None) -> str:
    """Bytes a second: '2.25 GB/s'; nothing was read at 0."""
    return f"{size(value)}/s" if value else NONE


def percent(value: float | None) -> str:
    """A share: '24%', '2.4%', '0.3%'."""
    if value is None:
        return NONE
    return f"{100 * value:.0f}%" if value >= 0.0995 or value == 0 else f"{100 * value:.1f}%"


def chunk(value: float) -> str:
    """A chunk size in binary units: '4 KiB', '1 MiB'."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} {unit}"
        value /= 1024
    return f"{value:g} GiB"


def ratio(over: float | None, under: float | None) -> float | None:
    """over / under, or None where either is missing or zero."""
    return None if not over or not under else over / under


def machine_line(machine: Mapping[str, Any]) -> str:
    """'AMD EPYC, 2 cores, 16.0 GB DRAM, Linux 6.1, nvme': what is known, in a fixed order."""
    cores, memory = machine.get("cores"), machine.get("memory_bytes")
    parts = [
        machine.get("cpu"),
        f"{cores} core{'' if cores == 1 else 's'}" if cores else None,
        f"{size(memory)} DRAM" if isinstance(memory, int | float) and memory else None,
        machine.get("os"),
        machine.get("device"),
        machine.get("disk"),
    ]
    return ", ".join(str(part) for part in parts if part)


def short_commit(commit: str) -> str:
    """Twelve digits of a commit; a mark behind them ('+': the checkout had changes) stays, and so does a version."""
    digits, mark = re.fullmatch(r"([0-9a-f]{7,40}(?![0-9a-z]))?(.*)", commit, re.DOTALL).groups()  # type: ignore[union-attr]
    return (digits or "")[:12] + mark


def caption(run: Run, machine: Mapping[str, Any]) -> str:
    """The line under each figure: model, machine, tokens, commit."""
    parts = [
        f"{run.model} ({run.dtype})",
        run.backend if run.backend != "torch-cpu" else "",
        machine_line(machine),
        f"{run.tokens:,} tokens" if run.tokens else "",
        f"io: {run.io}" if run.io else "",
        f"commit {short_commit(run.commit)}" if run.commit else "",
        run.date,
    ]
    return " · ".join(part for part in parts if part)
