"""The paper's own figures, read from data/reference/llm_in_a_flash.toml.

They are facts about another machine and another model: the report prints them beside what was
measured here and never mixes the two.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.ablation import PAPER_ROWS, Ablation
from workbench.errors import RecordError

_FILE = Path("data", "reference", "llm_in_a_flash.toml")


@dataclass(frozen=True)
class PaperRow:
    """One row of table 2. `cpu` is table 3's split (M1 Max, CPU) in ms a token: io_ms, mem_ms,
    compute_ms, total_ms; empty for the rows that table 3 does not have. GB as the paper prints them."""

    name: str
    dram_gb: float
    flash_gb: float
    throughput_gb_per_s: float
    io_ms: float
    cpu: Mapping[str, float]


@dataclass(frozen=True)
class PaperLatency:
    """Table 3 for one model on one device: `rows` by 'naive', 'hybrid', 'all', 'speculative' (those that it has), each
    io_ms, mem_ms, compute_ms and total_ms a token."""

    model: str
    device: str
    rows: Mapping[str, Mapping[str, float]]

    def faster(self, row: str = "all") -> float | None:
        """How many times faster than naive the row is, in total."""
        return self.rows["naive"]["total_ms"] / self.rows[row]["total_ms"] if row in self.rows else None


@dataclass(frozen=True)
class Paper:
    """All figures: `rows` by name; `throughput` and `reuse` as lists of points; `sparsity` is the share of
    zeros by model; `coactivation` what it says in words; `source` says where
    they were measured. `table3` is all of it; `families` what is printed of each model; `dram` what DRAM holds in
    'all', as shares of the model's size; `figures` what each figure and appendix says, by its name in `tables`;
    `speculative` how many times faster drafting makes it (`gain`), and a model wholly in DRAM (`gain_in_dram`)."""

    source: Mapping[str, Any]
    rows: Mapping[str, PaperRow]
    throughput: tuple[Mapping[str, Any], ...]
    reuse: tuple[Mapping[str, Any], ...]
    predictors: Mapping[str, Any]
    sparsity: Mapping[str, float]
    coactivation: Mapping[str, str]
    table3: tuple[PaperLatency, ...] = ()
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dram: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    speculative: Mapping[str, float] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Model and machine: 'OPT-6.7B, M1 Max'."""
        return f"{self.source['model']}, {self.source['machine']}"

    def row_for(self, ablation: Mapping[str, Any]) -> PaperRow | None:
        """The row that used exactly these techniques (`ablation` as a dict), or None: with an oracle,
        merged reads or another engine than threads the paper has no figure."""
        defaults = {"coalesce": False, "io": "threads", "prefetch": False, "placement": False, "speculative": False}
        wanted = {**defaults, **ablation}
        for name, row in PAPER_ROWS.items():
            if all(wanted.get(key) == value for key, value in _as_dict(row).items()):
                return self.rows[name]
        return None

    @property
    def naive(self) -> PaperRow:
        return self.rows["naive"]

    @property
    def all(self) -> PaperRow:
        return self.rows["+ bundling (all)"]


def _as_dict(ablation: Ablation) -> dict[str, Any]:
    return {name: getattr(ablation, name) for name in ablation.__dataclass_fields__}


def reference_path() -> Path:
    """The TOML file: beside the package in a wheel (workbench/assets/data), else in the repository."""
    package = Path(__file__).resolve().parents[1]
    for root in (package / "assets", package.parent):
        if (root / _FILE).is_file():
            return root / _FILE
    raise RecordError(f"{_FILE}: the paper's figures are not installed; install flash-workbench again")


def _latency(entry: Mapping[str, Any]) -> PaperLatency:
    parts: tuple[str, ...] = ("io_ms", "mem_ms", "compute_ms", "total_ms")
    rows: dict[str, dict[str, float]] = {
        name: dict(zip(parts, values, strict=True)) for name, values in entry.items() if isinstance(values, list)
    }
    return PaperLatency(entry["model"], entry["device"], rows)


@functools.cache
def paper() -> Paper:
    """The paper's figures. Raises RecordError when the file is missing or damaged."""
    path = reference_path()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = {row["name"]: PaperRow(**{"cpu": {}, **row}) for row in data["rows"]}
        return Paper(data["source"], rows, tuple(data["throughput"]), tuple(data["reuse"]), data["predictors"],
                     data["sparsity"], data["coactivation"], tuple(map(_latency, data["table3"])),
                     data["families"], data["dram"], data["figures"], data["speculative"])  # fmt: skip
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path}: not the paper's figures ({error}); install flash-workbench again") from error
