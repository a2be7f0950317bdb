"""`workbench plan`: before a model is downloaded or converted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.ablation import IoEngine
from workbench.cli.options import console, progress_bar, writable
from workbench.engines import Backend
from workbench.spec import LIMITS, DType


def plan(
    model: Annotated[str, typer.Argument(help="checkpoint directory, store, config.json or hub id")],
    dram: Annotated[str, typer.Option(help="DRAM budget: a share of the model (50%) or a size (3GiB)")],
    dtype: Annotated[DType | None, typer.Option(help="of the store (the model's)")] = None,
    predictors: Annotated[Path | None, typer.Option(help="trained predictors, for what they predict (10%)")] = None,
    reuse: Annotated[
        Path | None, typer.Option(help="a record of `analyze reuse` or `analyze window` (the paper's figures)")
    ] = None,
    flash: Annotated[Path | None, typer.Option(help="a record of `bench flash` (flash is measured now)")] = None,
    store_dir: Annotated[Path, typer.Option(help="where the store would lie; flash is measured there")] = Path("."),
    backend: Annotated[Backend, typer.Option(help="what the engine would compute with and on")] = "torch-cpu",
    window: Annotated[int | None, typer.Option(min=0, max=LIMITS["window"][1], help="the paper's k (picked)")] = None,
    depth: Annotated[int | None, typer.Option(min=1, max=LIMITS["depth"][1], help="reads in flight (picked)")] = None,
    context: Annotated[int, typer.Option(min=0, max=LIMITS["context"][1], help="KV cache, tokens; 0: all")] = 512,
    kv_dtype: Annotated[DType, typer.Option(help="of the KV cache")] = "float32",
    tokens: Annotated[int, typer.Option(min=1, max=LIMITS["context"][1], help="after a prompt of 128")] = 256,
    threads: Annotated[int, typer.Option(min=0, max=LIMITS["compute_threads"][1], help="of the kernels; 0: all")] = 0,
    io: Annotated[IoEngine, typer.Option(help="reader engine that is measured")] = "threads",
    seed: Annotated[int, typer.Option(min=0, max=LIMITS["seed"][1], help="seed of every random choice")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="write the record here", callback=writable)] = None,
) -> None:
    """Does a model fit in this much DRAM, with which window, and how fast will it be; needs its config.json only."""
    from workbench.experiments.plan import plan as run
    from workbench.experiments.record import write_json
    from workbench.report import to_rich
    from workbench.report.plan import headline, plan_table, read_plan

    with progress_bar("plan") as progress:
        record = run(
            model, dram=dram, dtype=dtype, predictors=predictors, reuse=reuse, flash=flash, store_dir=store_dir,
            backend=backend, window=window, depth=depth, context=context, kv_dtype=kv_dtype, tokens=tokens,
            threads=threads, io=io, seed=seed, progress=progress,
        )  # fmt: skip
    if json:
        write_json(json, record)
    read = read_plan(record)
    console().print(to_rich(plan_table(read)))
    console().print(headline(read), soft_wrap=True)
