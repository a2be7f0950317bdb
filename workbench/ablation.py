"""The techniques of "LLM in a flash", each switched on or off.

One frozen dataclass; command line options, notebook toggles and tests are generated from its fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, get_args

from workbench.errors import AblationError

PredictorMode = Literal["off", "low_rank", "oracle"]
IoEngine = Literal["threads", "io_uring", "buffered"]


@dataclass(frozen=True)
class Ablation:
    """Which techniques are on. The default is the paper's 'all'.

    `hybrid`, `predictor`, `windowing` and `bundling` are the paper's four (table 2); the others go
    beyond it. An undefined combination raises `AblationError` when it is made, naming both fields.
    """

    hybrid: bool = field(default=True, metadata={"help": "half of the model stays in DRAM"})
    predictor: PredictorMode = field(
        default="low_rank",
        metadata={"help": "which neurons to load: off (all), low_rank (trained), oracle (the true ones)"},
    )
    windowing: bool = field(default=True, metadata={"help": "neurons of the last k tokens stay in DRAM"})
    bundling: bool = field(default=True, metadata={"help": "all weights of a neuron are one record on flash"})
    coalesce: bool = field(default=True, metadata={"help": "near records are merged into one read"})
    io: IoEngine = field(default="threads", metadata={"help": "reader engine: threads, io_uring, buffered"})
    prefetch: bool = field(default=False, metadata={"help": "read for layer l+1 while layer l computes"})
    placement: bool = field(
        default=False, metadata={"help": "neurons that are loaded together are stored side by side (see place)"}
    )
    speculative: bool = field(default=False, metadata={"help": "draft-and-verify decoding"})

    def __post_init__(self) -> None:
        for name, allowed in (("predictor", PredictorMode), ("io", IoEngine)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise AblationError(f"ablation: {name}={value!r} is not one of {', '.join(get_args(allowed))}")
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool) and not isinstance(value, bool):
                raise AblationError(f"ablation: {f.name}={value!r} is not true or false")
        if self.windowing and self.predictor == "off":
            raise AblationError(
                "ablation: windowing=True with predictor='off' is undefined, since every neuron is loaded "
                "for every token; set windowing=False or predictor='low_rank'"
            )
        if self.prefetch and self.predictor == "off":
            raise AblationError(
                "ablation: prefetch=True with predictor='off' is undefined, since nothing says which neurons the next "
                "layer will need; set prefetch=False or predictor='low_rank'"
            )
        if self.placement and not self.bundling:
            raise AblationError(
                "ablation: placement=True with bundling=False is undefined, since only whole records are placed; "
                "set bundling=True or placement=False"
            )

    def describe(self) -> str:
        """The settings on one line, in field order: `hybrid=on predictor=low_rank ...`."""
        return " ".join(f"{f.name}={_word(getattr(self, f.name))}" for f in dataclasses.fields(self))


def _word(value: object) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _row(hybrid: bool, predictor: PredictorMode, windowing: bool, bundling: bool) -> Ablation:
    return Ablation(
        hybrid=hybrid, predictor=predictor, windowing=windowing, bundling=bundling, coalesce=False, io="threads"
    )


PAPER_ROWS: dict[str, Ablation] = {
    "naive": _row(False, "off", False, False),
    "hybrid": _row(True, "off", False, False),
    "+ predictor": _row(True, "low_rank", False, False),
    "+ windowing": _row(True, "low_rank", True, False),
    "+ bundling (all)": _row(True, "low_rank", True, True),
}
"""Table 2 of the paper, row by row; each adds one technique to the row before."""
