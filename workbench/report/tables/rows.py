"""Rows of an ablation with what goes beyond the paper: prefetch, speculative decoding, energy.

A record that does not have these figures reads as one in which they were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.report.numbers import count, percent, ratio
from workbench.report.reading import read_ablation
from workbench.report.records import AblationRecord, AblationRow
from workbench.report.rows import reading_ahead
from workbench.report.table import Column
from workbench.report.tables.drawn import NOT_MEASURED


def energy(row: AblationRow) -> str:
    """'0.53', J a token."""
    return NOT_MEASURED if not row.energy_j_per_token else f"{row.energy_j_per_token:.3g}"


def tokens_per_j(row: AblationRow) -> str:
    """'1.9'."""
    return NOT_MEASURED if not row.energy_j_per_token else f"{1 / row.energy_j_per_token:.3g}"


def sentence(row: AblationRow) -> str:
    """What the row did beyond the paper's four techniques, in words; '' where nothing is known."""
    parts = reading_ahead(row)
    if row.acceptance is not None:
        parts.append(f"{percent(row.acceptance)} of drafted tokens accepted")
    if row.tokens_per_round is not None:
        parts.append(f"{count(round(row.tokens_per_round, 2))} tokens a round")
    if row.draft_ms is not None:
        parts.append(f"the draft takes {row.draft_ms:.3g} ms a token")
    if row.text:
        parts.append(f"text: {row.text}")
    return f"{row.name}: {', '.join(parts)}." if parts else ""


@dataclass(frozen=True)
class Rows:
    """An ablation's record, as the tables ask for it."""

    record: AblationRecord

    @property
    def speculative(self) -> AblationRow | None:
        """The first row with draft-and-verify decoding."""
        return next((row for row in self.record.rows if row.uses(speculative=True)), None)

    def faster(self, row: AblationRow | None) -> float | None:
        """Than naive, in total."""
        naive = self.record.naive
        return ratio(naive.total, row.total) if naive and row else None

    def columns(self, columns: tuple[Column, ...]) -> tuple[Column, ...]:
        """Those of a table; one column says where energy was not measured, not two."""
        known = any(row.energy_j_per_token for row in self.record.rows)
        return tuple(column for column in columns if known or column.key != "per_j")

    @property
    def energy_sources(self) -> str:
        """Where the energy figures come from."""
        metered = (row for row in self.record.rows if row.energy_j_per_token)
        return ", ".join(sorted({row.energy_source for row in metered if row.energy_source}))


def read_rows(record: Any) -> Rows:
    """A record of kind ablation, from a path or parsed. RecordError, one line, where it is none."""
    return Rows(read_ablation(record))
