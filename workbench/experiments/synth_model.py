"""Random weights whose sparsity and reuse are asked for: the generator behind `workbench synth`.

A naive N(0, 0.02) model is useless for latency: its neighbouring tokens share nearly all neurons, which flatters the
window. Here a token's stream is one constant direction c, half of its energy, and a part of its own; attention and FFN
add little to it. So the FFN's input, after the family's norm, is that mixture too, whatever the family. The matrix that
the activation sits on is B A + noise: the last row of A is c, and its column of B holds what each neuron has all the
time, log-normal over the neurons (few are popular, the tail is heavy); the other rows see what is the token's own.
How large the constant share of a score is decides how much a window keeps; it is solved for. B and A are a true
low-rank predictor. A layer's thresholds sit in that column of B, so that families without biases are calibrated alike.

Every tensor is drawn in blocks, each with a generator seeded by (seed, tensor, block): any row can be made again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from workbench.errors import SpecError
from workbench.models import family_of
from workbench.models.family import FfnNames
from workbench.predictor.config import StoreDType
from workbench.predictor.initialise import Factors
from workbench.predictor.low_rank import LayerPredictor
from workbench.predictor.quantise import store as stored_factors
from workbench.predictor.quantise import values as stored_values
from workbench.spec import ModelSpec

VERSION = 2
"""Of the generator: another one makes other weights of the same request."""
WINDOW = 4
PUBLISHED = {"predicted": 0.10, "kept": 0.24}
"""OPT-6.7B, shares of the FFN at k = 4 ("LLM in a flash", section 3.2): what persistence is solved for."""
RANK, LARGE_RANK = 128, 1024
"""Of the predictors: of most layers, and of the last eighth (section 3.1, OPT-6.7B), where the width allows it."""
DENSE, DENSE_PART = 2.0, 8
"""The last one in DENSE_PART layers fires DENSE times as often as the others (figure 9)."""
TAIL = 0.5  # sigma of the log-normal popularity; with it a token adds 2.4% where five use 24%, as published
NOISE = 0.1  # of the activated matrix beside its factors, relative
CONSTANT = 0.5  # share of a token's energy that all tokens have in common
ADDED = 0.14  # what attention and FFN of all layers together add to the stream, relative
LAST = 3.0  # what the last FFN adds: else the text would repeat itself, since a tied head finds the token it was given
LOGITS = 2.5  # their standard deviation, as that of trained models
FROM, TO = 16, 96  # positions that are calibrated and measured
BLOCK = 1 << 20
"""Values of a tensor that are drawn together."""
_OUTPUTS = ("out_proj.weight", "o_proj.weight", "dense.weight")


@dataclass(frozen=True)
class Request:
    """What to make: everything that decides the weights.

    `active` and `predicted`: shares of the FFN, means over the layers. SpecError unless 0 < active < predicted <= 0.5.
    """

    name: str
    spec: ModelSpec
    dtype: str = "bfloat16"
    seed: int = 0
    active: float = 0.03
    predicted: float = 0.10
    predictor_dtype: StoreDType = "int8"

    def __post_init__(self) -> None:
        if not 0 < self.active < self.predicted <= 0.5:
            raise SpecError(
                f"active={self.active:g}, predicted={self.predicted:g}: active has to be above 0, below predicted, and "
                f"predicted at most 0.5"
            )
        if self.spec.max_positions < TO:
            raise SpecError(
                f"max_positions={self.spec.max_positions} are fewer than the {TO} that are calibrated; take more"
            )
        if self.spec.vocab_size < 2 * TO:
            raise SpecError(f"vocab_size={self.spec.vocab_size} is below the {2 * TO} tokens that are calibrated with")

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them, with the generator's version."""
        return {**asdict(self), "spec": self.spec.as_dict(), "version": VERSION}

    def of_weights(self) -> dict[str, Any]:
        """What decides the weights: all but the dtype of the predictors."""
        found = self.as_dict()
        del found["predictor_dtype"]
        return found

    def density(self, layer: int) -> float:
        """How much denser than the mean a layer is."""
        layers = self.spec.num_layers
        dense = max(1, layers // DENSE_PART) if layers > 1 else 0
        base = layers / (layers + (DENSE - 1) * dense)
        return base * (DENSE if layer >= layers - dense else 1.0)

    def rank(self, layer: int) -> int:
        """Of the layer's factors."""
        small = min(RANK, self.spec.d_model // 2)
        return max(small, min(LARGE_RANK, self.spec.d_model // 4)) if self.density(layer) > 1 else small


@dataclass(frozen=True)
class LayerFacts:
    """A layer's calibration: with these and the request its weights can be made again. And what was measured.

    stream: of the hidden state at its input, and of what the FFN adds to, rms. along: the FFN input's part along c.
    spread: mean square of the rest of it, summed over d_model. offset: what a score lacks to the wanted share. down:
    standard deviation of the down matrix. edge: the predictor's threshold. quality, used: as the card has them.
    """

    stream: float
    along: float
    spread: float
    offset: float
    down: float
    edge: float
    quality: dict[str, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)


def popularity(neurons: int) -> torch.Tensor:
    """What each of `neurons` has all the time, in order, float64: log-normal, of mean 0 and variance 1."""
    at = (torch.arange(neurons, dtype=torch.float64) + 0.5) / neurons
    values = torch.exp(TAIL * torch.special.ndtri(at))
    return (values - values.mean()) / values.std()


def window_shares(constant: float, predicted: float, neurons: int = 4096) -> tuple[float, float]:
    """(kept, new) shares of the FFN: what WINDOW + 1 tokens use together, and what the last of them adds.

    A score is sqrt(constant) s + sqrt(1 - constant) t, where s is the neuron's own and t new with each token.
    """
    s = popularity(neurons)

    def firing(threshold: float) -> torch.Tensor:
        return torch.special.ndtr((math.sqrt(constant) * s - threshold) / math.sqrt(1 - constant))

    threshold = _bisect(lambda edge: float(firing(edge).mean()) > predicted, -8.0, 32.0)
    rest = 1 - firing(threshold)
    return float((1 - rest ** (WINDOW + 1)).mean()), float(((1 - rest) * rest**WINDOW).mean())


def solve_constant(request: Request) -> float:
    """The constant share of a score's variance for which the layers keep, on average, what is published."""
    densities = [request.density(layer) for layer in range(request.spec.num_layers)]
    kinds = {density: densities.count(density) / len(densities) for density in densities}

    def kept(constant: float) -> float:
        return sum(part * window_shares(constant, PUBLISHED["predicted"] * d)[0] for d, part in kinds.items())

    return _bisect(lambda constant: kept(constant) > PUBLISHED["kept"], 0.01, 0.99, 20)


def _bisect(low_side: Callable[[float], bool], low: float, high: float, steps: int = 40) -> float:
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if low_side(middle) else (low, middle)
    return low


class Generator:
    """The tensors of a request, by name. Use as a context manager: it has threads."""

    def __init__(self, request: Request, threads: int | None = None) -> None:
        self.request, self.spec = request, request.spec
        self.family = family_of(request.spec.config)
        self.dtype: torch.dtype = getattr(torch, request.dtype)
        self.shapes = self.family.tensor_shapes(request.spec)
        self.constant = solve_constant(request)
        self._threads = ThreadPoolExecutor(threads or torch.get_num_threads())
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._centre: torch.Tensor | None = None
        self._after: torch.Tensor | None = None
        self._tied = bool(self.family.tied(request.spec))
        self._common: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def outside(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of a tensor that belongs to no layer, in the storage dtype."""
        shape = self.shapes[name]
        stop = shape[0] if stop is None else stop
        if len(shape) == 1:
            return self._vector(name, final=True)[start:stop]
        width, scale = shape[1], LOGITS / math.sqrt(self.spec.d_model)
        if "embed_positions" in name:
            return self._rows(name, start, stop, lambda block: block.mul_(0.1 * scale))
        if "project" in name:  # OPT-350M's, from its embedding's width and back
            return self._rows(name, start, stop, lambda block: block.mul_(1 / math.sqrt(width)))
        u = self._seen_by_head()  # here: the threads that make blocks cannot wait for blocks
        if "embed" in name:
            return self._rows(name, start, stop, lambda block: self._tokens(block, scale))
        return self._rows(name, start, stop, lambda block: block.sub_((block @ u)[:, None] * u).mul_(scale))

    def resident(self, layer: int, stream: float) -> dict[str, torch.Tensor]:
        """A layer's tensors but for the FFN's matrices, by name; `stream` as LayerFacts has it."""
        ffn = self.ffn(layer).matrices
        names = [n for n in self.shapes if self.family.layer_of(n) == layer and n not in ffn]
        return {name: self._resident(name, stream) for name in names}

    def _resident(self, name: str, stream: float) -> torch.Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return self._vector(name)
        std = 1 / math.sqrt(shape[1])
        if name.endswith(_OUTPUTS):
            std *= self.added * stream
        return self._rows(name, 0, shape[0], lambda block: block.mul_(std))

    @property
    def added(self) -> float:
        """What a layer's attention, and its FFN, add to the stream, relative to it."""
        return ADDED / math.sqrt(2 * self.spec.num_layers)

    def ffn(self, layer: int) -> FfnNames:
        """Names of a layer's FFN tensors."""
        return self.family.ffn_names(self.spec, layer)

    def factors(self, layer: int, along: float, spread: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, d_model] and B [d_ff, rank] of a layer, float32 that holds float16 values; arguments as LayerFacts.

        The last row of A is c.
        """
        spec, rank = self.spec, self.request.rank(layer)
        c = self.common()
        a = self.normal(f"a.{layer}", rank - 1, spec.d_model)
        a = torch.cat([(a - (a @ c)[:, None] * c) / math.sqrt(spread), c[None]])
        own = math.sqrt((1 - self.constant) / (1 + NOISE**2) / (rank - 1))
        b = self.normal(f"b.{layer}", spec.d_ff, rank - 1) * own
        order = torch.randperm(spec.d_ff, generator=self._generator(f"popularity.{layer}", 0))
        held = math.sqrt(self.constant) * popularity(spec.d_ff).float()[order] + offset
        return a.half().float(), torch.cat([b, held[:, None] / along], 1).half().float()

    @property
    def noise(self) -> float:
        """Standard deviation of what a score has beside its factors."""
        return NOISE * math.sqrt((1 - self.constant) / (1 + NOISE**2))

    def activated(self, layer: int, facts: LayerFacts, factors: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The matrix that the activation sits on, [d_ff, d_model]: `factors` and noise."""
        a, b = factors
        names, std, rows = self.ffn(layer), self.noise / math.sqrt(facts.spread), _block_rows(self.spec.d_model)

        def finish(block: torch.Tensor, number: int) -> torch.Tensor:
            return block.mul_(std).addmm_(b[number * rows : number * rows + len(block)], a)

        return self._rows(names.gate or names.up, 0, self.spec.d_ff, finish_at=finish)

    def plain_up(self, layer: int) -> torch.Tensor:
        """The up matrix of a gated FFN, [d_ff, d_model]; it does not see c."""
        c, std = self.common(), 1 / math.sqrt(self.spec.d_model)
        return self._rows(
            self.ffn(layer).up, 0, self.spec.d_ff, lambda block: block.sub_((block @ c)[:, None] * c).mul_(std)
        )

    def profile(self, layer: int, facts: LayerFacts, b: torch.Tensor) -> torch.Tensor | None:
        """For the last layer, its activations' mean over tokens, [d_ff], of length 1: what its down matrix is blind to.

        Else every token would get the same addition, and text its likeliest word again and again. None for other
        layers, and with a gate, since there the mean is 0.
        """
        if layer < self.spec.num_layers - 1 or self.spec.gated:
            return None
        mean = (b[:, -1] * facts.along + self.bias(layer)).double()
        std = (b[:, :-1].double().square().sum(-1) + self.noise**2).sqrt()
        below, at = torch.special.ndtr(mean / std), torch.exp(-0.5 * (mean / std) ** 2) / math.sqrt(2 * math.pi)
        linear, squared = mean * below + std * at, (mean**2 + std**2) * below + mean * std * at
        found = squared if self.spec.activation == "relu2" else linear
        return (found / found.norm()).float()

    def down(self, layer: int, std: float, profile: torch.Tensor | None = None) -> torch.Tensor:
        """The down matrix by neuron, [d_ff, d_model]: its transpose is the checkpoint's."""
        name, width = self.ffn(layer).down, self.spec.d_model
        rows = _block_rows(width)
        if profile is None:
            return self._rows(name, 0, self.spec.d_ff, lambda block: block.mul_(std), columns=width)

        def seen(number: int) -> torch.Tensor:
            part = profile[number * rows : (number + 1) * rows]
            return part @ torch.randn(len(part), width, generator=self._generator(name, number))

        whole = torch.stack(list(self._threads.map(seen, range(-(-self.spec.d_ff // rows))))).sum(0)

        def finish(block: torch.Tensor, number: int) -> torch.Tensor:
            return block.sub_(profile[number * rows : (number + 1) * rows, None] * whole).mul_(std)

        return self._rows(name, 0, self.spec.d_ff, finish_at=finish, columns=width)

    def layer(self, layer: int, facts: LayerFacts) -> dict[str, torch.Tensor]:
        """All tensors of a layer by name, in the storage dtype; down as a transposed view."""
        names, made = self.ffn(layer), self.resident(layer, facts.stream)
        factors = self.factors(layer, facts.along, facts.spread, facts.offset)
        made[names.gate or names.up] = self.activated(layer, facts, factors)
        if names.gate:
            made[names.up] = self.plain_up(layer)
        made[names.down] = self.down(layer, facts.down, self.profile(layer, facts, factors[1])).T
        return made

    def predictor(self, layer: int, facts: LayerFacts) -> LayerPredictor:
        """The layer's factors as a predictor."""
        a, b = self.factors(layer, facts.along, facts.spread, facts.offset)
        dtype = self.request.predictor_dtype
        made = stored_factors(Factors(a, b, self.bias(layer)), dtype)
        return LayerPredictor(made.a, made.b, made.bias, facts.edge, dtype, made.a_scale, made.b_scale)

    def predicted(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors with the values that they have once they are stored as a predictor's."""
        found = stored_values(Factors(a, b, torch.zeros(len(b))), self.request.predictor_dtype)
        return found.a, found.b

    def bias(self, layer: int) -> torch.Tensor:
        """What the FFN adds to the activated matrix's product, float32 [d_ff]; zeros where the family has no bias."""
        names = self.ffn(layer)
        name = names.gate_bias if names.gate else names.up_bias
        return self._vector(name).float() if name else torch.zeros(self.spec.d_ff)

    def common(self) -> torch.Tensor:
        """The direction c that the FFN's input has in common, float32 [d_model], of length 1 and mean 0."""
        if self._centre is None:
            c = self._direction(self._embedding_width())
            project = next((name for name in self.shapes if name.endswith("project_in.weight")), None)
            if project:
                c = self.outside(project).float() @ c
            c = c - c.mean()
            self._centre = c / c.norm()
        return self._centre

    def _embedding_width(self) -> int:
        return next(s[1] for n, s in self.shapes.items() if "embed" in n and "positions" not in n)

    def _direction(self, width: int) -> torch.Tensor:
        """Half of the signs are +, float32 [width], of length 1."""
        if width not in self._common:
            order = torch.randperm(width, generator=self._generator("common", 0))
            self._common[width] = torch.where(order < width // 2, -1.0, 1.0) / math.sqrt(width)
        return self._common[width]

    def _seen_by_head(self) -> torch.Tensor:
        """What c is after the last norm, of length 1: the head does not see it, or it would prefer a few tokens."""
        if self._after is None:
            outside = [name for name in self.shapes if self.family.layer_of(name) is None]
            u = self.common()
            for name in outside:
                if len(self.shapes[name]) == 1 and name.endswith("weight"):
                    u = u * self._vector(name, final=True).float()
            for name in outside:
                if name.endswith("project_out.weight"):
                    u = self.outside(name).float() @ u
            self._after = u / u.norm()
        return self._after

    def _tokens(self, block: torch.Tensor, scale: float) -> torch.Tensor:
        width = block.shape[1]
        c = self._direction(width)
        if self._tied:
            u = self._seen_by_head()
            u = u - (u @ c) * c
            u = u / u.norm()
            block.sub_((block @ u)[:, None] * u)
        own = block.sub_((block @ c)[:, None] * c).mul_(math.sqrt(1 - CONSTANT))
        return own.add_(c * math.sqrt(CONSTANT * width)).mul_(scale)

    def _vector(self, name: str, final: bool = False) -> torch.Tensor:
        width = self.shapes[name][0]
        drawn = torch.randn(width, generator=self._generator(name, 0))
        norm = "norm" in name or "ln_" in name
        if norm and name.endswith("weight"):
            # Signs in the last norm: a tied head would else answer with the token that it was given.
            return (torch.where(drawn < 0, -1.0, 1.0) if final else torch.ones(width)).to(self.dtype)
        return (torch.zeros(width) if norm else drawn * (0.01 * LOGITS / math.sqrt(self.spec.d_model))).to(self.dtype)

    def normal(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Standard normal, float32."""
        return torch.randn(rows, columns, generator=self._generator(name, 0))

    def _rows(
        self,
        name: str,
        start: int,
        stop: int,
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        finish_at: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
        columns: int | None = None,
    ) -> torch.Tensor:
        """Rows of a drawn matrix: blocks of standard normals, each through `finish`, or `finish_at` with its number."""
        total = self.spec.d_ff if columns else self.shapes[name][0]
        width = columns or self.shapes[name][1]
        rows = _block_rows(width)
        out = torch.empty(stop - start, width, dtype=self.dtype)

        def make(number: int) -> None:
            first, last = number * rows, min((number + 1) * rows, total)
            block = self._kept.get((name, number))
            if block is None:
                drawn = torch.randn(last - first, width, generator=self._generator(name, number))
                block = finish_at(drawn, number) if finish_at else finish(drawn) if finish else drawn
                block = block.to(self.dtype)
            if last > stop:  # the next read begins within it
                self._kept = {(name, number): block}
            low, high = max(first, start), min(last, stop)
            out[low - start : high - start] = block[low - first : high - first]

        list(self._threads.map(make, range(start // rows, -(-stop // rows))))
        return out

    def _generator(self, name: str, block: int) -> torch.Generator:
        digest = hashlib.sha256(f"{self.request.seed}/{name}/{block}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _block_rows(width: int) -> int:
    return max(1, BLOCK // width)
