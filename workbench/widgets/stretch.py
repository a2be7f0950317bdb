"""What tokens cost under one setting: the last tokens in a ring, and their medians as a row of an ablation record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.ablation import PAPER_ROWS
from workbench.engines.setting import Setting
from workbench.engines.stats import TokenStats
from workbench.experiments.ablate import LEAST_TOKENS, TIMES, WARM_UP
from workbench.report.numbers import percent

KEPT_TOKENS = 512
"""Tokens that a ring holds; older ones are forgotten, so that no session grows."""
_STATS = tuple(f.name for f in dataclasses.fields(TokenStats))
COLUMNS = (*_STATS, "number", "wall_ms")
"""Of a ring: TokenStats' fields, the token's number in the session, and the time from the token before to this one
(NaN for the first after a start)."""
INDEX = {name: i for i, name in enumerate(COLUMNS)}
_values = attrgetter(*_STATS)
_WORDS = {True: "on", False: "off"}


class Ring:
    """The last `capacity` tokens, float64 [capacity, len(COLUMNS)], allocated once."""

    def __init__(self, capacity: int = KEPT_TOKENS):
        self._rows = np.zeros((capacity, len(COLUMNS)))
        self.count = 0  # tokens appended in all

    def append(self, stats: TokenStats, number: int, wall_ms: float) -> None:
        """Add a token; the oldest goes when the ring is full."""
        self._rows[self.count % len(self._rows)] = (*_values(stats), number, wall_ms)
        self.count += 1

    def rows(self) -> NDArray[np.float64]:
        """A copy [tokens, len(COLUMNS)], oldest first."""
        held, at = min(self.count, len(self._rows)), self.count % len(self._rows)
        return self._rows[:held].copy() if self.count == held else np.roll(self._rows, -at, axis=0)


@dataclass
class Stretch:
    """Tokens made one after the other under one setting. The first `WARM_UP`, which fill the window, do not count."""

    number: int
    label: str
    setting: Setting
    dram_bytes: int
    ring: Ring = field(default_factory=Ring)
    rss_bytes: int | None = None  # the most seen, beyond what the process held before the engine

    def counted(self) -> NDArray[np.float64]:
        """The rows that count, [tokens, len(COLUMNS)]."""
        return self.ring.rows()[max(0, WARM_UP - max(0, self.ring.count - KEPT_TOKENS)) :]

    @property
    def enough(self) -> bool:
        """Whether there are tokens enough for a row."""
        return self.ring.count >= WARM_UP + LEAST_TOKENS

    def summary(self) -> Summary | None:
        """Medians and means over the tokens that count; None while there are fewer than LEAST_TOKENS."""
        return Summary.of(self, self.counted()) if self.enough else None


@dataclass(frozen=True)
class Summary:
    """A stretch in figures. `row` is a row of an ablation record (schema 1)."""

    number: int
    label: str
    setting: Setting
    tokens_per_s: float
    row: dict[str, Any]

    @classmethod
    def of(cls, stretch: Stretch, rows: NDArray[np.float64]) -> Summary:
        """From the rows that count, [tokens, len(COLUMNS)]."""

        def column(name: str) -> NDArray[np.float64]:
            return rows[:, INDEX[name]]

        read, io_s = column("read_bytes"), column("io_ms").sum() / 1000
        row: dict[str, Any] = {
            "name": f"{stretch.number}. {stretch.label}",
            "ablation": dataclasses.asdict(stretch.setting.ablation),
            "dram_bytes": stretch.dram_bytes,
            "peak_rss_bytes": stretch.rss_bytes,
            "flash_bytes": float(read.mean()),
            "reads": float(column("reads").mean()),
            "throughput": float(read.sum() / io_s) if io_s else None,
            "tokens": len(rows),
            "floor_ms": None,  # needs flash to itself: `workbench ablate` measures it
            "overlapped_floor_ms": None,
            "window_trims": int(column("window_trims").sum()),
        }
        for part in TIMES:
            values = column(f"{part}_ms")
            row[f"{part}_ms"], row[f"{part}_ms_p95"] = float(np.median(values)), float(np.percentile(values, 95))
        for name in ("active", "predicted", "loaded", "in_window"):
            row[name] = float(column(name).mean())
        return cls(stretch.number, stretch.label, stretch.setting, tokens_per_s(rows), row)


def tokens_per_s(rows: NDArray[np.float64]) -> float:
    """Tokens a second of wall-clock time, everything included but what no pipeline has (finding the oracle's true
    activations). 0 where nothing was timed."""
    wall = rows[:, INDEX["wall_ms"]] - rows[:, INDEX["oracle_ms"]]
    wall = wall[np.isfinite(wall)]
    return 1000 * len(wall) / float(wall.sum()) if len(wall) else 0.0


def first_label(setting: Setting) -> str:
    """What the first stretch is called: the paper's name of its techniques, merged reads apart."""
    for name, ablation in PAPER_ROWS.items():
        if dataclasses.replace(setting.ablation, coalesce=ablation.coalesce) == ablation:
            return name.partition("(")[2].rstrip(")") or name
    return "start"


def in_words(changes: dict[str, Any]) -> str:
    """Changed values on one line: 'bundling off, window 8, false negatives 2%'."""
    return ", ".join(_phrase(name, value) for name, value in changes.items())


def _phrase(name: str, value: Any) -> str:
    if name == "false_negative":
        return f"false negatives {'as trained' if value is None else percent(value)}"
    return f"{name.replace('_', ' ')} {_WORDS[value] if isinstance(value, bool) else value}"
