"""Records: what a measurement leaves behind.

Everything in the report is drawn from these, so that a stored result can be drawn again on a machine
with no GPU. `workbench.report.reading` makes them from JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARTS = ("io", "mem", "compute", "predictor", "total")
"""The measured times of a token, in ms. compute includes the predictor, which is shown apart too."""


@dataclass(frozen=True)
class Timing:
    """Median and 95th percentile of a time, ms a token."""

    median: float
    p95: float


@dataclass(frozen=True)
class Run:
    """What was run. `geometry` is text or a mapping of sizes; `io` the reader engine; `synthetic` is
    True where the weights are random, made for latency work only. `data`: the card of the text that was read
    (source, files, documents, tokens, sha256), empty where none was kept. `backend`: of the engine, '' where none
    was named."""

    model: str
    geometry: str
    dtype: str
    tokens: int
    window: int | None
    dram: str
    seed: int | None
    commit: str
    versions: Mapping[str, str]
    io: str
    command: str
    synthetic: bool
    predictors: str
    date: str
    data: Mapping[str, Any] = field(default_factory=dict)
    backend: str = ""


@dataclass(frozen=True)
class AblationRow:
    """One row of an ablation. Sizes in bytes, throughput in bytes/s while reading, counts of neurons a
    token over all layers (mean). None where a figure was not measured. `waits`, `wait_ms`: how often a token waits for
    a GPU (mean), and how long (median; a part of compute). With speculative decoding: `draft`, the model that drafts,
    and `draft_tokens` at once; `acceptance`, the share of these that were kept; `tokens_per_round`; `draft_ms`, the
    draft model's (median; a part of compute); `text`, where the row's is another than the others'. With prefetch:
    neurons `prefetched` a token, those of them `wasted` (mean), in `wasted_bytes`; `hidden_io_ms` of reading beside
    other work (median; in no other figure).
    `energy_source`: of what and by what `energy_j_per_token` is, or 'not measured'; empty in older records."""

    name: str
    ablation: Mapping[str, Any]
    dram_bytes: int
    peak_rss_bytes: int | None
    flash_bytes: float
    reads: float
    throughput: float | None
    times: Mapping[str, Timing]
    tokens: int
    active: float | None
    predicted: float | None
    loaded: float | None
    in_window: float | None
    floor_ms: float | None
    overlapped_floor_ms: float | None
    window_trims: int
    waits: float | None = None
    wait_ms: float | None = None
    acceptance: float | None = None
    tokens_per_round: float | None = None
    draft_ms: float | None = None
    text: str = ""
    draft: str = ""
    draft_tokens: int | None = None
    prefetched: float | None = None
    wasted: float | None = None
    wasted_bytes: float | None = None
    hidden_io_ms: float | None = None
    energy_j_per_token: float | None = None
    energy_source: str = ""

    @property
    def total(self) -> float:
        """Median total, ms a token."""
        return self.times["total"].median

    @property
    def floor(self) -> float | None:
        """The floor that fits the row: overlapped where the next layer is read while one computes."""
        return self.overlapped_floor_ms if self.ablation.get("prefetch") else self.floor_ms

    def uses(self, **wanted: Any) -> bool:
        """Whether the row's ablation has these values."""
        return all(self.ablation.get(name) == value for name, value in wanted.items())


@dataclass(frozen=True)
class AblationRecord:
    """`workbench ablate --json`."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    rows: tuple[AblationRow, ...]

    @property
    def naive(self) -> AblationRow | None:
        """The row that reads the whole model for each token."""
        return next((r for r in self.rows if r.uses(hybrid=False, predictor="off", windowing=False)), None)

    @property
    def all(self) -> AblationRow | None:
        """The paper's 'all': the first row with hybrid, a trained predictor, windowing and bundling."""
        return next(
            (r for r in self.rows if r.uses(hybrid=True, predictor="low_rank", windowing=True, bundling=True)), None
        )


@dataclass(frozen=True)
class FlashPoint:
    """Read throughput for one chunk size, thread count and engine."""

    chunk_bytes: int
    threads: int
    engine: str
    direct: bool
    bytes_per_s: float
    reads_per_s: float


@dataclass(frozen=True)
class FlashRecord:
    """`workbench bench flash --json`. `fit` has latency_us, bytes_per_s and gap_bytes, or is empty."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    rows: tuple[FlashPoint, ...]
    fit: Mapping[str, float]


@dataclass(frozen=True)
class ReusePoint:
    """Shares of the FFN for a neuron window of `window` tokens; `layer` is None for the whole model."""

    window: int
    kept_share: float
    new_share: float
    layer: int | None = None


@dataclass(frozen=True)
class AggregatedUse:
    """s_agg(k) as shares of the FFN: `mean` and each of `by_layer` has one for each k of `tokens`."""

    tokens: tuple[int, ...]
    mean: tuple[float, ...]
    by_layer: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ReuseRecord:
    """`workbench analyze reuse --json`. `aggregated` is None in records of earlier versions."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    rows: tuple[ReusePoint, ...]
    by_layer: tuple[ReusePoint, ...]
    aggregated: AggregatedUse | None = None


@dataclass(frozen=True)
class PredictorLayer:
    """Quality of one layer's predictor. false_negative: share of active neurons missed; false_positive:
    share of inactive neurons predicted; predicted, active: mean counts a token; share_of_weights: of
    the layer's FFN weights; missed_activation: share of the summed activation missed, None if unknown."""

    layer: int
    rank: int
    false_negative: float
    false_positive: float
    predicted: float
    active: float
    predicted_over_active: float
    share_of_weights: float
    missed_activation: float | None = None


@dataclass(frozen=True)
class PredictorCard:
    """A predictor's card.json. `about` holds the card's other fields (model, data, seed ...)."""

    source: str
    about: Mapping[str, Any]
    layers: tuple[PredictorLayer, ...]
