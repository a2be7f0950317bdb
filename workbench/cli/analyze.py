"""`workbench analyze`: what a model's activations are like on text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from workbench.cli.options import console, numbers, png, progress_bar, writable
from workbench.spec import LIMITS, RunSpec

analyze = typer.Typer(no_args_is_help=True, help="Sparsity, reuse, windows and co-activation of a model on text.")

Model = Annotated[str, typer.Argument(help="dense checkpoint")]
Data = Annotated[str, typer.Option(help="text: JSON lines, parquet or text (file or folder), c4, hub:OWNER/NAME")]
Tokens = Annotated[int, typer.Option(min=1, help="tokens of text")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="where the model runs")]
Json = Annotated[Path | None, typer.Option("--json", help="write the record to this file", callback=writable)]
Figure = Annotated[Path | None, typer.Option(help="draw the figure to this PNG file", callback=png)]


@analyze.command("sparsity")
def sparsity(
    model: Model,
    data: Data,
    tokens: Tokens = 4096,
    device: Device = "cpu",
    predictors: Annotated[Path | None, typer.Option(help="their card, for the figure")] = None,
    figure: Figure = None,
    json: Json = None,
) -> None:
    """Share of zeros in the FFN activations, by layer and by token."""
    from workbench.experiments.sparsity import analyze_sparsity
    from workbench.report import read_predictors, read_sparsity, sparsity_figure, sparsity_table

    card = read_predictors(predictors) if predictors else None
    with progress_bar("sparsity") as progress:
        record = analyze_sparsity(model, data, tokens=tokens, device=device, progress=progress)
    read = read_sparsity(record)
    _show(record, json, sparsity_table(read), figure, lambda: sparsity_figure(read, card))


@analyze.command("reuse")
def reuse(
    model: Model, data: Data, tokens: Tokens = 4096, device: Device = "cpu", figure: Figure = None, json: Json = None
) -> None:
    """Share of the FFN that a neuron window keeps, and that each token adds."""
    from workbench.experiments.reuse import analyze_reuse
    from workbench.report import aggregated_figure, read_reuse, reuse_table

    with progress_bar("reuse") as progress:
        record = analyze_reuse(model, data, tokens=tokens, device=device, progress=progress)
    read = read_reuse(record)
    _show(record, json, reuse_table(read), figure, lambda: aggregated_figure(read))


@analyze.command("window")
def window(
    store: Annotated[Path, typer.Argument(help="a flash store")],
    data: Data,
    predictors: Annotated[Path, typer.Option(help="trained predictors")],
    windows: Annotated[str, typer.Option(help="the paper's k, several")] = "0,1,2,4,8,16,32",
    dram: Annotated[str, typer.Option(help="DRAM budget: a share of the model (50%) or a size (3GiB)")] = "50%",
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens")] = 64,
    tokens: Annotated[int, typer.Option(min=4, help="tokens counted a window")] = 64,
    row_seconds: Annotated[float, typer.Option(min=0, help="end a window after this long")] = 120.0,
    context: Annotated[int, typer.Option(min=0, max=LIMITS["context"][1], help="KV cache, tokens")] = 512,
    depth: Annotated[int, typer.Option(min=1, max=LIMITS["depth"][1], help="reads in flight")] = 32,
    seed: Annotated[int, typer.Option(min=0, max=LIMITS["seed"][1], help="seed of every random choice")] = 0,
    figure: Figure = None,
    json: Json = None,
) -> None:
    """DRAM that each neuron window needs, and the latency that it gives within a budget; resumes."""
    from workbench.experiments.window import window_sweep
    from workbench.report import read_window, window_figure, window_table

    chosen = _windows(windows)
    partial = _partial(json)
    with progress_bar("window") as progress:
        record = window_sweep(
            store, predictors, data, windows=chosen, prompt=prompt, tokens=tokens, row_seconds=row_seconds,
            run=RunSpec(dram=dram, context=context, depth=depth, seed=seed), partial=partial, progress=progress,
        )  # fmt: skip
    read = read_window(record)
    _show(record, json, window_table(read), figure, lambda: window_figure(read))
    if partial:
        partial.unlink(missing_ok=True)


@analyze.command("coactivation")
def coactivation(
    model: Model,
    data: Data,
    tokens: Tokens = 10_240,
    friends: Annotated[int, typer.Option(min=1, help="closest friends kept of each neuron")] = 8,
    window: Annotated[int, typer.Option(min=0, max=LIMITS["window"][1], help="k that bundles are priced with")] = 4,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="where the model runs and pairs are counted")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=0, max=LIMITS["compute_threads"][1], help="that count pairs; 0: all cores")
    ] = 0,
    arrays: Annotated[
        Path | None, typer.Option(help="write frequencies and friends to this .safetensors file", callback=writable)
    ] = None,
    figure: Figure = None,
    json: Json = None,
) -> None:
    """Which neurons fire together, and what bundling closest friends would cost; resumes."""
    from workbench.experiments.coactivation import analyze_coactivation, discard
    from workbench.report import coactivation_figure, coactivation_table, read_coactivation

    partial = _partial(json)
    with progress_bar("coactivation") as progress:
        record = analyze_coactivation(
            model, data, tokens=tokens, friends=friends, window=window, device=device, threads=threads, arrays=arrays,
            partial=partial, progress=progress,
        )  # fmt: skip
    read = read_coactivation(record)
    _show(record, json, coactivation_table(read), figure, lambda: coactivation_figure(read))
    if partial:
        discard(partial)


def _show(record: dict[str, Any], json: Path | None, table: Any, figure: Path | None, draw: Any) -> None:
    """The record to its file, the table to the screen, the figure to its file."""
    from workbench.experiments.record import write_json
    from workbench.report import to_rich
    from workbench.report.html import write_file

    if json:
        write_json(json, record)
    console().print(to_rich(table))
    if figure:
        console().print(f"Written: {write_file(figure.parent, figure.name, draw())}", soft_wrap=True)


def _partial(json: Path | None) -> Path | None:
    """Where an unfinished run is kept: beside the record that it will be."""
    return json.with_name(json.name + ".partial") if json else None


def _windows(text: str) -> list[int]:
    """'0,1,2,4' as windows."""
    most, found = LIMITS["window"][1], numbers(text, int, "whole numbers such as 0,1,2,4")
    if len(set(found)) < len(found) or any(not 0 <= k <= most for k in found):
        raise typer.BadParameter(f"{text!r} is not a list of different windows, each 0 to {most}")
    return found
