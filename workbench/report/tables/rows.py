"""Rows of an ablation with what goes beyond the paper: prefetch, speculative decoding, energy.

A record that does not have these figures reads as one in which they were not measured.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.report.numbers import count, percent, ratio, size, times
from workbench.report.reading import _Fields, load_json, read_ablation
from workbench.report.records import AblationRecord, AblationRow
from workbench.report.table import Column
from workbench.report.tables.drawn import NOT_MEASURED

_NUMBERS = (
    "prefetched", "wasted", "prefetch_bytes", "wasted_bytes", "hidden_io_ms", "acceptance", "tokens_per_round",
    "draft_ms", "energy_j_per_token",
)  # fmt: skip
_TEXTS = ("energy_source", "text")


@dataclass(frozen=True)
class Beyond:
    """What a row has beyond the paper's figures; None where it was not measured.

    prefetched, wasted: neurons read ahead a token, and those of them that were not needed; prefetch_bytes,
    wasted_bytes: the bytes of these. hidden_io_ms: of flash, that ran while the token computed. acceptance: share of
    drafted tokens that were kept; draft_ms: of the draft, a part of compute. energy_j_per_token, in joules, from
    `energy_source`.
    """

    prefetched: float | None = None
    wasted: float | None = None
    prefetch_bytes: float | None = None
    wasted_bytes: float | None = None
    hidden_io_ms: float | None = None
    acceptance: float | None = None
    tokens_per_round: float | None = None
    draft_ms: float | None = None
    energy_j_per_token: float | None = None
    energy_source: str = ""
    text: str = ""

    @property
    def energy(self) -> str:
        """'0.53', J a token."""
        return NOT_MEASURED if not self.energy_j_per_token else f"{self.energy_j_per_token:.3g}"

    @property
    def tokens_per_j(self) -> str:
        """'1.9'."""
        return NOT_MEASURED if not self.energy_j_per_token else f"{1 / self.energy_j_per_token:.3g}"

    def sentence(self, row: AblationRow) -> str:
        """What the row did beyond the paper's four techniques, in words; '' where nothing is known."""
        parts = []
        if self.prefetched is not None:
            wasted = ratio(self.wasted, self.prefetched) or 0.0
            parts.append(
                f"{count(round(self.prefetched, 1))} neurons a token read ahead, {percent(wasted)} of them wasted"
            )
        if self.prefetch_bytes is not None:
            parts.append(f"{size(self.prefetch_bytes)} a token read ahead")
        if self.wasted_bytes is not None:
            parts.append(f"{size(self.wasted_bytes)} a token wasted")
        if self.hidden_io_ms is not None:
            parts.append(f"{self.hidden_io_ms:.3g} ms of io hidden behind compute")
        if self.acceptance is not None:
            parts.append(f"{percent(self.acceptance)} of drafted tokens accepted")
        if self.tokens_per_round is not None:
            parts.append(f"{count(round(self.tokens_per_round, 2))} tokens a round")
        if self.draft_ms is not None:
            parts.append(f"the draft takes {self.draft_ms:.3g} ms a token")
        if self.text:
            parts.append(f"text: {self.text}")
        return f"{row.name}: {', '.join(parts)}." if parts else ""


@dataclass(frozen=True)
class Rows:
    """An ablation's record and, by the name of each row, what it has beyond the paper."""

    record: AblationRecord
    beyond: Mapping[str, Beyond]

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
        known = any(beyond.energy_j_per_token for beyond in self.beyond.values())
        return tuple(column for column in columns if known or column.key != "per_j")

    @property
    def energy_sources(self) -> str:
        """Where the energy figures come from."""
        return ", ".join(
            sorted({b.energy_source for b in self.beyond.values() if b.energy_j_per_token and b.energy_source})
        )


def read_rows(record: Any) -> Rows:
    """A record of kind ablation, from a path or parsed. RecordError, one line, where it is none."""
    data = copy.deepcopy(record) if isinstance(record, dict) else load_json(record)
    source = "record" if isinstance(record, dict) else str(record)
    found: dict[str, Beyond] = {}
    rows = data.get("rows") if isinstance(data, dict) else None
    for index, row in enumerate(rows if isinstance(rows, list) else []):
        if isinstance(row, dict):
            own = {name: row.pop(name) for name in (*_NUMBERS, *_TEXTS) if name in row}
            f = _Fields(own, source, f"rows[{index}]")
            values: dict[str, Any] = {name: f.optional(name) for name in _NUMBERS if name in own}
            values |= {name: str(own[name]) for name in _TEXTS if own.get(name) is not None}
            found[str(row.get("name"))] = Beyond(**values)
    read = read_ablation(data)
    return Rows(read, {row.name: found.get(row.name, Beyond()) for row in read.rows})


def gains(rows: Rows, row: AblationRow | None) -> str:
    """'4.8×' against naive, or a dash."""
    return times(rows.faster(row))
