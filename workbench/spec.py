"""What a model is and how a run is set up: frozen dataclasses, checked when they are made."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any, Literal, get_args

from workbench.errors import SpecError

DType = Literal["float32", "float16", "bfloat16"]
PromptNeurons = Literal["union", "dense", "auto"]
ITEMSIZE: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class ModelSpec:
    """A model's geometry, as its checkpoint's config.json states it.

    `config` is that config, whole. `activation` is the FFN's: 'relu', 'relu2' (its square), or another name when the
    conversion was forced. `thresholds`: by layer, the value above which a pre-activation counts (FATReLU: z where
    z > threshold, else 0); empty means 0 in every layer. `parts`: rows of a neuron, 2 (up, down) or 3 with a gate.
    """

    model_type: str
    num_layers: int
    d_model: int
    d_ff: int
    vocab_size: int
    activation: str
    max_positions: int
    parts: int = 2
    thresholds: tuple[float, ...] = ()
    config: dict[str, Any] = field(default_factory=dict, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return {**asdict(self), "thresholds": list(self.thresholds)}

    @property
    def gated(self) -> bool:
        """Whether the activation sits on a gate whose result the up projection is multiplied by."""
        return self.parts == 3

    def threshold(self, layer: int) -> float:
        """A neuron of the layer is active where its pre-activation is above this."""
        return self.thresholds[layer] if self.thresholds else 0.0

    @property
    def ffn_neurons(self) -> int:
        """Neurons in all layers together."""
        return self.num_layers * self.d_ff

    def ffn_bytes(self, dtype: str) -> int:
        """Bytes of all FFN matrices stored as `dtype`."""
        return self.ffn_neurons * self.parts * self.d_model * ITEMSIZE[dtype]


LIMITS: dict[str, tuple[int, int]] = {
    "window": (0, 4096),
    "depth": (1, 4096),
    "chunk_bytes": (4096, 1 << 30),
    "coalesce_gap_bytes": (0, 1 << 30),
    "compute_threads": (0, 1024),
    "context": (0, 1 << 24),
    "seed": (0, 2**63 - 1),
    "draft_tokens": (1, 15),
}
"""The least and greatest value of each field of RunSpec that is a number."""


@dataclass(frozen=True)
class RunSpec:
    """How a pipeline runs, apart from the ablation.

    window: the paper's k; neurons of the k tokens before the present one stay in DRAM.
    dram: the budget, as a share of the model ('50%') or bytes ('3GiB').
    depth: reads in flight (threads, or io_uring entries). chunk_bytes: the longest single read.
    coalesce_gap_bytes: two reads are merged when at most this many bytes lie between them.
    compute_threads: threads of the CPU kernels; 0 means one for each core.
    context: tokens that the KV cache holds; 0 means as many as the model has positions.
    seed: of the text that is sampled, from the next text on.
    draft: the store of the model that drafts tokens for speculative decoding; empty for none.
    draft_tokens: the paper's lambda, tokens that are drafted at once.
    kv_dtype: of the keys and values in the KV cache; attention computes in float32 whatever it is.
    prompt_neurons: which neurons a prompt takes: union (each token its own, read once for all), dense (all of them, as
    the dense model does) or auto (in each layer dense where it is cheaper to read).
    """

    window: int = 4
    dram: str = "50%"
    depth: int = 32
    chunk_bytes: int = 1 << 20
    coalesce_gap_bytes: int = 16 << 10
    compute_threads: int = 0
    context: int = 512
    seed: int = 0
    draft: str = ""
    draft_tokens: int = 4
    prompt_neurons: PromptNeurons = "union"
    kv_dtype: DType = "float32"

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise SpecError(f"{name}={value!r} is not a whole number")
            if not low <= getattr(self, name) <= high:
                raise SpecError(f"{name}={getattr(self, name)} is not in {low}..{high}")
        if not isinstance(self.draft, str):
            raise SpecError(f"draft={self.draft!r} is not text; give the path of a store as text")
        if self.prompt_neurons not in get_args(PromptNeurons):
            ways = ", ".join(get_args(PromptNeurons))
            raise SpecError(f"prompt_neurons={self.prompt_neurons!r} is not one of {ways}")
        if self.kv_dtype not in get_args(DType):
            raise SpecError(f"kv_dtype={self.kv_dtype!r} is not one of {', '.join(get_args(DType))}")
        if self.chunk_bytes % 4096:
            raise SpecError(f"chunk_bytes={self.chunk_bytes} is not a multiple of 4096")


def parse_bytes(text: str) -> int:
    """'3GiB', '500 MB' or '4096' as bytes. ValueError when it is none of these."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 3GiB, 500MB or 4096")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_dram(text: str, model_bytes: int) -> int:
    """A DRAM budget: a share of the model's bytes ('50%') or an absolute size ('3GiB')."""
    if text.strip().endswith("%"):
        number = text.strip()[:-1]
        if not re.fullmatch(r"\d+(?:\.\d+)?", number):
            raise ValueError(f"{text!r} is not a share such as 50%")
        return int(model_bytes * float(number) / 100)
    return parse_bytes(text)


def format_bytes(count: float) -> str:
    """Bytes in decimal units, three digits: '93.1 MB'."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            return (
                f"{value:.0f} {unit}"
                if unit == "B"
                else f"{value:.3g} {unit}"
                if value < 100
                else f"{value:.0f} {unit}"
            )
        value /= 1000
    raise AssertionError("unreachable")
