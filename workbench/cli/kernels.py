"""`workbench kernels`: GPU kernels and their references."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from workbench.cli.options import console, progress_bar, writable
from workbench.spec import LIMITS

kernels = typer.Typer(no_args_is_help=True, help="GPU kernels against their references.")
NAMES = "sparse_ffn, sparse_ffn_quantized, gemv, predictor, slots"


@kernels.callback()
def _group() -> None:
    """Keeps `verify` a command of its own although it is the only one."""


@kernels.command("verify")
def verify(
    on: Annotated[
        Literal["auto", "emulated", "cuda", "metal"],
        typer.Option(help="where; auto: emulated, and on the GPU if there is one"),
    ] = "auto",
    kernel: Annotated[list[str] | None, typer.Option(help=f"only {NAMES}; may be given several times")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="inputs drawn for each case")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=LIMITS["seed"][1], help="seed of every random choice")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="write the record here", callback=writable)] = None,
) -> None:
    """Each kernel body against its reference in float64: emulated, as CUDA, on Metal."""
    from workbench.experiments.kernels import verify_kernels
    from workbench.experiments.record import write_json
    from workbench.report import to_rich
    from workbench.report.kernels import headline, kernels_table, read_kernels

    chosen = list(dict.fromkeys(kernel)) if kernel else None
    with progress_bar("kernels") as progress:
        try:
            record = verify_kernels(on, kernels=chosen, seeds=seeds, seed=seed, progress=progress)
        except ValueError as error:
            raise typer.BadParameter(f"--kernel: {error}") from None
    if json:
        write_json(json, record)
    read = read_kernels(record)
    console().print(to_rich(kernels_table(read)))
    console().print(headline(read), soft_wrap=True)
    if not all(row.ok for row in read.rows):
        raise typer.Exit(1)
