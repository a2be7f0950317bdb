"""`workbench synth`: random weights at a true geometry."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from workbench.cli.options import console, progress_bar, writable
from workbench.experiments.geometries import GEOMETRIES
from workbench.predictor.config import StoreDType
from workbench.spec import LIMITS, DType


def synth(
    geometry: Annotated[str, typer.Argument(help=f"{', '.join(GEOMETRIES)}, or a config.json")],
    store: Annotated[Path, typer.Argument(help="directory to write")],
    predictors: Annotated[Path | None, typer.Option(help="directory for the predictors (STORE-predictors)")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="also write the dense checkpoint here")] = None,
    dtype: Annotated[DType, typer.Option(help="of all weights")] = "bfloat16",
    active: Annotated[float, typer.Option(help="share of the FFN that fires, mean over layers")] = 0.03,
    predicted: Annotated[float, typer.Option(help="share of the FFN that is predicted, mean over layers")] = 0.10,
    activation: Annotated[
        Literal["relu", "relu2"] | None, typer.Option(help="in place of that of a config.json")
    ] = None,
    predictor_dtype: Annotated[StoreDType, typer.Option(help="of the predictors' factors")] = "int8",
    seed: Annotated[int, typer.Option(min=0, max=LIMITS["seed"][1], help="seed of every random choice")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="write the record here", callback=writable)] = None,
) -> None:
    """Random weights at a named model's geometry, sparse and persistent as published; resumes."""
    from workbench.experiments.record import write_json
    from workbench.experiments.synth import synth as run

    with progress_bar("synth") as progress:
        made = run(
            geometry, store, predictors=predictors, checkpoint=checkpoint, dtype=dtype, seed=seed, active=active,
            predicted=predicted, activation=activation, predictor_dtype=predictor_dtype, progress=progress,
            tell=lambda layer, row: print(_line(f"layer {layer:2d}", row), file=sys.stderr),
        )  # fmt: skip
    if json:
        write_json(json, made.record)
    record, spec = made.record, made.store.spec
    screen = console()
    window = record["run"]["window"]
    screen.print(f"{_line('mean', record['mean'])}  (new and kept at k = {window})", soft_wrap=True)
    screen.print(
        f"{made.store.path}: {record['run']['model']}, synthetic, {spec.num_layers} layers, d_model {spec.d_model}, "
        f"FFN {spec.d_ff}, {made.store.dtype}, {record['model_bytes'] / 1e9:.2f} GB of weights and "
        f"{record['predictor_bytes'] / 1e9:.2f} GB of predictors in {record['seconds']:.0f} s "
        f"({record['model_bytes'] / 1e9 / record['seconds'] * 60:.1f} GB/min)",
        soft_wrap=True,
    )


def _line(title: str, row: dict[str, Any]) -> str:
    return (
        f"{title}  active {row['active_share']:.2%}  predicted {row['predicted_share']:.2%}  "
        f"missed {row['false_negative']:.2%}  new {row['new_share']:.2%}  kept {row['kept_share']:.2%}"
    )
