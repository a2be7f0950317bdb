"""The main job on the embedded model: convert, train predictors, ablate, bench, reuse, report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench import assets
from workbench.ablation import PAPER_ROWS
from workbench.capture.text import documents, split_of
from workbench.engines import check_backend
from workbench.errors import ReaderError
from workbench.experiments.ablate import BEYOND_ROWS, WARM_UP, ablate
from workbench.experiments.convert import convert
from workbench.experiments.flash_bench import bench_flash
from workbench.experiments.record import write_json
from workbench.experiments.reuse import analyze_reuse
from workbench.experiments.text import window_and_card
from workbench.flash.reader import FlashReader
from workbench.flash.store import Store
from workbench.predictor.config import PredictorSpec
from workbench.predictor.low_rank import Predictors
from workbench.predictor.train import train_predictors
from workbench.spec import RunSpec

PROMPT, TOKENS = 64, 64
DRAM = "80%"
"""Of the demo model, whose embedding and attention alone are 46% (a large model's are 35%, which leaves 50% room)."""
TRAINING = PredictorSpec(tokens=100_000, rank=128, last_rank=128, false_negative=0.05)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Demo:
    """Where a demo's results lie."""

    store: Store
    predictors: Path
    ablation: dict[str, Any]
    flash: dict[str, Any]
    reuse: dict[str, Any]


def demo(
    out: str | Path,
    *,
    stage: Callable[[str], Progress],
    seed: int = 0,
    dram: str = DRAM,
    tokens: int = TOKENS,
    backend: str = "torch-cpu",
    training: PredictorSpec = TRAINING,
    command: str | None = None,
) -> Demo:
    """Run all of it into `out` and return the records, which are written there too.

    `stage(title)` is told each step as it begins and gives the progress function for it. Steps that are done already
    are not done again: an interrupted demo goes on where it was.
    """
    check_backend(backend)  # refused now, not after the training
    root = Path(out)
    model, text = assets.path("data/demo-model"), assets.path("data/text")
    store = convert(model, root / "store", dtype="float32", progress=stage("convert the model to a flash store"))
    predictors = train_predictors(
        model,
        text,
        dataclasses.replace(training, seed=seed),
        out=root / "predictors",
        progress=stage("train predictors for all layers"),
    )
    window, card = window_and_card(text, store, PROMPT + WARM_UP + tokens, _held_out)
    rows = {**PAPER_ROWS, **_beyond()}
    ablation = ablate(
        store, predictors, window, rows=rows, run=RunSpec(dram=dram, seed=seed, context=256),
        prompt=PROMPT, tokens=tokens,
        predictors_name="trained by this run", partial=root / "ablation.partial.json",
        progress=stage("run every row of table 2"), command=command, data=card, backend=backend,
    )  # fmt: skip
    write_json(root / "ablation.json", ablation)
    (root / "ablation.partial.json").unlink(missing_ok=True)
    flash = bench_flash(store, seed=seed, progress=stage("measure flash"), command=command)
    write_json(root / "flash.json", flash)
    reuse = analyze_reuse(model, text, tokens=2048, progress=stage("analyse window reuse"), command=command)
    write_json(root / "reuse.json", reuse)
    return Demo(store, root / "predictors", ablation, flash, reuse)


def _beyond() -> dict[str, Any]:
    """The rows beyond the paper that this machine can run."""
    rows = dict(BEYOND_ROWS)
    try:
        FlashReader("io_uring", 1).close()
    except ReaderError:
        rows.pop("all, io_uring")  # the row's absence is seen in the table; the others do not depend on it
    return rows


def held_out(text: str | Path) -> Iterator[str]:
    """The documents of a corpus that predictors were not trained on."""
    return (doc for doc in documents(text) if _held_out(doc))


def _held_out(text: str) -> bool:
    return split_of(text, TRAINING.validation_share) == "test"


def shipped_predictors() -> Predictors:
    """The predictors of the demo model that come with the package."""
    return Predictors.load(assets.path("predictors/demo-model"))
