"""The cost model: what a token takes, from counts of neurons, reads and bytes and from measured rates of this machine.

Pure functions. `calibrate` measures the constants, `plan` counts for a model that need not be there. A call of n reads
finds flash idle and its reader asleep. What the first of them take, up to the depth of the queue, was measured as such
calls; the rest come at the rate of a queue of that depth. Where only rates are known (`bench flash`), the call takes
t1 + (min(n, depth) - 1) * t_full + max(0, n - depth) * t_depth: the first read alone, and those in flight beside it at
the rate of a full queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from workbench.ablation import Ablation, IoEngine
from workbench.flash.layout import ALIGNMENT, RecordLayout, round_up
from workbench.spec import ModelSpec, RunSpec

ALMOST_ALL = 0.9999
Mode = Literal["streamed", "dense", "sparse"]
"""How a layer runs: read whole for the token; all neurons computed, some of them read; predicted neurons only."""


@dataclass(frozen=True)
class FlashPoint:
    """At `depth` reads in flight of `chunk_bytes` each, one read more takes `seconds`."""

    depth: int
    chunk_bytes: int
    seconds: float


@dataclass(frozen=True)
class FlashCall:
    """A call of `reads` reads of `chunk_bytes` each, all in flight at once, after a while without any: `seconds`."""

    reads: int
    chunk_bytes: int
    seconds: float


@dataclass(frozen=True)
class FlashFit:
    """Flash, as `bench flash` measures it: seconds a read by size and reads in flight. `source` says where it is from.
    `calls`: whole calls of few reads, by size and number of reads; none where only rates were measured.

    Between the sizes, the depths and the numbers of reads, seconds are interpolated on logarithmic scales; beyond the
    largest size they grow with it, below the smallest they do not fall.
    """

    source: str
    engine: IoEngine
    points: tuple[FlashPoint, ...]
    calls: tuple[FlashCall, ...] = ()

    def __post_init__(self) -> None:
        if not self.points or any(p.seconds <= 0 or p.chunk_bytes < 1 or p.depth < 1 for p in self.points):
            raise ValueError("points: needs at least one, of positive size, depth and seconds")
        if any(c.seconds <= 0 or c.chunk_bytes < 1 or c.reads < 1 for c in self.calls):
            raise ValueError("calls: each needs a positive size, number of reads and seconds")

    @property
    def depths(self) -> tuple[int, ...]:
        """The numbers of reads in flight that were measured, rising."""
        return tuple(sorted({p.depth for p in self.points}))

    def read_seconds(self, nbytes: float, depth: int) -> float:
        """Seconds that one read more takes while `depth` are in flight."""
        found = [(d, self._at(d, nbytes)) for d in self.depths]
        return _between(found, depth)

    def batch_seconds(self, reads: float, nbytes: float, depth: int) -> float:
        """Seconds of one call that makes `reads` reads of `nbytes` each (see the module's first lines)."""
        if reads <= 0:
            return 0.0
        if self.calls:
            counts = sorted({call.reads for call in self.calls})
            begun = min(reads, depth, counts[-1])
            whole = _between([(n, self._call(n, nbytes)) for n in counts], begun) * min(begun, 1.0)
            return whole + (reads - begun) * self.read_seconds(nbytes, depth)
        full = min(self._at(d, nbytes) for d in self.depths)
        first, steady = self.read_seconds(nbytes, 1), self.read_seconds(nbytes, depth)
        if reads <= 1:
            return reads * first
        return first + (min(reads, depth) - 1) * full + max(0.0, reads - depth) * steady

    def _at(self, depth: int, nbytes: float) -> float:
        return _by_size([(p.chunk_bytes, p.seconds) for p in self.points if p.depth == depth], nbytes)

    def _call(self, reads: int, nbytes: float) -> float:
        return _by_size([(c.chunk_bytes, c.seconds) for c in self.calls if c.reads == reads], nbytes)


def _by_size(measured: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Seconds for a size, of (bytes, seconds) in any order."""
    curve = sorted(measured)
    size, seconds = curve[-1]
    return seconds * nbytes / size if nbytes > size else _between(curve, nbytes)


@dataclass(frozen=True)
class ComputeFit:
    """This machine beside its flash, with `threads` threads on weights of `dtype`.

    Rates in bytes a second: of weights that linear layers, the sparse FFN (scattered neurons), the dense one (all) and
    the predictor read; of keys and values that attention reads; of what is copied since it cannot be read in place.
    `layer_s`: what a layer takes beside its bytes (the calls' own cost and the framework's) in each mode; `base_s`: the
    same for all that is outside of layers. `predictor_call_s` is of one layer. `fetch_call_s`, `fetch_neuron_s`: making
    the requests of a read call, and of each of its neurons. Slots: an update, each predicted neuron, each that changes.
    """

    threads: int
    dtype: str
    linear_bytes_per_s: float
    sparse_ffn_bytes_per_s: float
    dense_ffn_bytes_per_s: float
    predictor_bytes_per_s: float
    attention_bytes_per_s: float
    copy_bytes_per_s: float
    base_s: float
    layer_s: dict[Mode, float]
    predictor_call_s: float
    fetch_call_s: float
    fetch_neuron_s: float
    slots_call_s: float
    slots_neuron_s: float
    slots_change_s: float

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layer_s"}
        values |= {f"{mode}_layer_s": self.layer_s[mode] for mode in get_args(Mode)}
        for name, value in values.items():
            if name.endswith("bytes_per_s") and not value > 0:
                raise ValueError(f"{name}={value} is not a rate")
            if name.endswith("_s") and not value >= 0:
                raise ValueError(f"{name}={value} is not a time")


@dataclass(frozen=True)
class ReadCalls:
    """`calls` calls of the reader a token, each making `reads` reads of `read_bytes` bytes for `neurons` neurons.
    `copied_bytes`: of a call, that go through a buffer since flash cannot be read to where they belong."""

    calls: float
    reads: float
    read_bytes: float
    neurons: float = 0.0
    copied_bytes: float = 0.0


@dataclass(frozen=True)
class Counts:
    """What one token does, in all layers together. Bytes are what the arithmetic must read of DRAM: `linear_bytes` of
    resident matrices, the rest as named. `changed`: neurons that came into slots or left them."""

    layers: int
    reads: tuple[ReadCalls, ...]
    predicted: float
    active: float
    loaded: float
    in_window: float
    changed: float
    linear_bytes: float
    ffn_bytes: float
    attention_bytes: float
    predictor_bytes: float
    mode: Mode

    @property
    def flash_bytes(self) -> float:
        """Bytes read of flash."""
        return sum(call.calls * call.reads * call.read_bytes for call in self.reads)

    @property
    def read_count(self) -> float:
        """Reads of flash."""
        return sum(call.calls * call.reads for call in self.reads)


@dataclass(frozen=True)
class TokenCost:
    """Milliseconds of one token; `predictor_ms` is a part of `compute_ms`."""

    io_ms: float
    mem_ms: float
    compute_ms: float
    predictor_ms: float

    @property
    def total_ms(self) -> float:
        """io, mem and compute, one after the other."""
        return self.io_ms + self.mem_ms + self.compute_ms


def token_cost(counts: Counts, flash: FlashFit, compute: ComputeFit, depth: int) -> TokenCost:
    """What `counts` take on a machine that these fits are of, with `depth` reads in flight."""
    io = sum(
        call.calls
        * (
            flash.batch_seconds(call.reads, call.read_bytes, depth)
            + call.copied_bytes / compute.copy_bytes_per_s
            + (compute.fetch_call_s + call.neurons * compute.fetch_neuron_s if call.neurons else 0.0)
        )
        for call in counts.reads
    )
    mem = predictor = 0.0
    sparse = counts.mode == "sparse"
    if sparse:
        mem = (
            counts.layers * compute.slots_call_s
            + counts.predicted * compute.slots_neuron_s
            + counts.changed * compute.slots_change_s
        )
    if counts.predictor_bytes:
        predictor = counts.layers * compute.predictor_call_s + counts.predictor_bytes / compute.predictor_bytes_per_s
    ffn_rate = compute.sparse_ffn_bytes_per_s if sparse else compute.dense_ffn_bytes_per_s
    arithmetic = (
        compute.base_s
        + counts.layers * compute.layer_s[counts.mode]
        + counts.linear_bytes / compute.linear_bytes_per_s
        + counts.attention_bytes / compute.attention_bytes_per_s
        + counts.ffn_bytes / ffn_rate
        + predictor
    )
    return TokenCost(1000 * io, 1000 * mem, 1000 * arithmetic, 1000 * predictor)


@dataclass(frozen=True)
class Reuse:
    """What a window keeps and what a token adds, as shares of the FFN, measured for neurons of which a token uses the
    share `used`. `source` says on what. points: (k, kept share, new share), k rising, at least one.

    For another share of used neurons the curve is moved as if neurons were drawn by each token alone: a window of k
    then holds as many draws, n = log(1 - kept) / log(1 - used), whatever the share is.
    """

    source: str
    used: float
    points: tuple[tuple[int, float, float], ...]

    def __post_init__(self) -> None:
        if not 0 < self.used < 1 or not self.points:
            raise ValueError(f"used={self.used} is not a share between 0 and 1, or there are no points")
        if any(not 0 < new <= kept <= 1 for _, kept, new in self.points):
            raise ValueError("points: kept and new are not shares, the new ones a part of those kept")

    @property
    def longest(self) -> int:
        """The longest window that was measured."""
        return self.points[-1][0]

    def shares(self, used: float, window: float) -> tuple[float, float]:
        """(kept, new) for a window of `window` tokens when a token uses the share `used` of a layer. With a part of a
        token, the oldest one's neurons are there in part."""
        if used >= ALMOST_ALL:
            return 1.0, 0.0
        if window == 0:
            return used, used
        known = {k: (kept, new) for k, kept, new in self.points} | {0: (self.used, self.used)}
        kept, new = (_between([(k + 1, pair[i]) for k, pair in sorted(known.items())], window + 1) for i in (0, 1))
        kept = min(kept, ALMOST_ALL)
        before = max(0.0, kept - new)
        draws = [math.log1p(-share) / math.log1p(-self.used) for share in (kept, before)]
        now, then = (-math.expm1(n * math.log1p(-used)) for n in draws)
        return now, now - then

    def window_within(self, used: float, window: int, capacity_share: float) -> float:
        """The longest window, at most `window`, whose neurons are no more than that share of the layer: what is left
        of the window when the oldest neurons leave for want of slots. -1 where one token's do not fit."""
        if self.shares(used, 0)[0] > capacity_share:
            return -1.0
        if self.shares(used, window)[0] <= capacity_share:
            return float(window)
        low, high = 0.0, float(window)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.shares(used, middle)[0] <= capacity_share else (low, middle)
        return low


def copied(layout: RecordLayout, ablation: Ablation) -> bool:
    """Whether neurons cannot be read straight to where they belong in DRAM: their offsets are not all aligned."""
    return bool((layout.bundle_stride if ablation.bundling else layout.row_bytes) % layout.alignment)


def sequential_calls(
    neurons: int, block: int, layout: RecordLayout, ablation: Ablation, chunk_bytes: int
) -> list[ReadCalls]:
    """The calls that bring `neurons` neighbours, `block` of them in a call."""
    parts, stride = (1, layout.bundle_stride) if ablation.bundling else (layout.parts, layout.row_stride)
    moved = layout.record_bytes if copied(layout, ablation) else 0
    found = []
    for count, calls in ((block, neurons // block), (neurons % block, 1)):
        if count and calls:
            span = round_up(count * stride, ALIGNMENT)
            reads = parts * (-(-count // (chunk_bytes // stride)) if stride <= chunk_bytes else -(-span // chunk_bytes))
            found.append(ReadCalls(calls, reads, parts * span / reads, count, count * moved))
    return found


def scattered_calls(
    loaded: float, spec: ModelSpec, layout: RecordLayout, ablation: Ablation, run: RunSpec
) -> ReadCalls | None:
    """The call that brings `loaded` neurons of a layer from places drawn at random; None for no neuron.

    Merged reads: the next neuron lies m records on with probability f * (1 - f)^m, f the share that is loaded; it
    joins the read while those m records are no more than the gap.
    """
    if loaded <= 0:
        return None
    if ablation.bundling:
        parts, stride, nbytes = 1, layout.bundle_stride, layout.record_bytes
    else:
        parts, stride, nbytes = layout.parts, layout.row_stride, layout.row_bytes
    cover = round_up(nbytes, ALIGNMENT)
    pieces = -(-cover // run.chunk_bytes)
    moved = loaded * layout.record_bytes if copied(layout, ablation) else 0.0
    if not ablation.coalesce or pieces > 1:
        return ReadCalls(1, parts * loaded * pieces, cover / pieces, loaded, moved)
    share = min(loaded / spec.d_ff, 1.0)
    # Reads cover whole units, which brings records that do not begin on one closer to each other.
    closer = ALIGNMENT - math.gcd(stride, ALIGNMENT)
    within = (run.coalesce_gap_bytes + closer) // stride + 1
    pairs = max(0.0, loaded - 1)
    runs = 1 + pairs * (1 - share) ** within
    between = stride * pairs * sum(m * share * (1 - share) ** m for m in range(within))
    covered = runs * cover + (loaded - runs) * stride + between
    reads = max(runs, covered / run.chunk_bytes)
    return ReadCalls(1, parts * reads, covered / reads, loaded, moved)


def _between(curve: Sequence[tuple[float, float]], at: float) -> float:
    """y at `at`, linear between points of (x, y) on logarithmic scales. Left of the first point it is that point's;
    right of the last it goes on as between the last two."""
    if len(curve) == 1 or at <= curve[0][0]:
        return curve[0][1]
    right = next((i for i, (x, _) in enumerate(curve) if x >= at), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    slope = (math.log(y1) - math.log(y0)) / (math.log(x1) - math.log(x0))
    return y0 * math.exp(slope * (math.log(at) - math.log(x0)))


def as_dict(fit: FlashFit | ComputeFit | Reuse) -> dict[str, Any]:
    """A fit as records have it."""
    import dataclasses

    return dataclasses.asdict(fit)
