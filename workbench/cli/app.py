"""The commands, in the order of `workbench --help`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from workbench.ablation import Ablation, IoEngine
from workbench.cli.options import Stages, ablation_options, console, progress_bar, writable
from workbench.spec import LIMITS, DType, RunSpec

ORDER = ("demo", "convert", "verify", "train-predictors", "analyze", "ablate", "generate", "bench")


class InOrder(TyperGroup):
    """typer shows groups after commands; here each has its place in the work."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)


app = typer.Typer(
    cls=InOrder,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run language models larger than memory, and measure what each technique brings on this machine.",
)
analyze = typer.Typer(no_args_is_help=True, help="Sparsity and reuse of a model on text.")
bench = typer.Typer(no_args_is_help=True, help="What the machine gives.")

Json = Annotated[Path | None, typer.Option("--json", help="write the record to this file", callback=writable)]
Seed = Annotated[int, typer.Option(min=0, max=LIMITS["seed"][1], help="seed of every random choice")]
Data = Annotated[str, typer.Option(help="text: C4-style .json.gz (file or folder), a text file, or c4")]
Window = Annotated[int, typer.Option(min=0, max=LIMITS["window"][1], help="the paper's k, in tokens")]
Dram = Annotated[str, typer.Option(help="DRAM budget: a share of the model (50%) or a size (3GiB)")]
Context = Annotated[int, typer.Option(min=0, max=LIMITS["context"][1], help="KV cache, tokens; 0: all positions")]
Depth = Annotated[int, typer.Option(min=1, max=LIMITS["depth"][1], help="reads in flight")]
PredictorsDir = Annotated[Path | None, typer.Option(help="trained predictors")]
StorePath = Annotated[Path, typer.Argument(help="a flash store")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="where results go")] = Path("runs/demo"),
    dram: Dram = "80%",
    seed: Seed = 0,
) -> None:
    """The main job on the embedded model: predictors, ablation, report."""
    from workbench.experiments.demo import demo as run_demo
    from workbench.report import ablation_table, to_rich, write_report
    from workbench.report import read_ablation as read
    from workbench.report.words import headline

    with Stages() as stages:
        result = run_demo(out, stage=stages, seed=seed, dram=dram)
    paths = write_report(
        out, ablation=out / "ablation.json", flash=out / "flash.json", reuse=out / "reuse.json",
        predictors=result.predictors,
    )  # fmt: skip
    record = read(result.ablation)
    screen = console()
    screen.print(to_rich(ablation_table(record)))
    screen.print(headline(record))
    screen.print("\n".join(["Written:", *(f"  {path}" for path in [out / "ablation.json", *paths])]))


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="checkpoint directory or hub id")],
    store: Annotated[Path, typer.Argument(help="directory to write")],
    dtype: Annotated[
        DType | None,
        typer.Option(help="stored as [the checkpoint's]"),
    ] = None,
    force: Annotated[bool, typer.Option(help="also convert a model whose activation is not ReLU")] = False,
) -> None:
    """Checkpoint to flash store, layer by layer; resumes."""
    from workbench.experiments.convert import convert as run

    with progress_bar("convert") as progress:
        made = run(model, store, dtype=dtype, force=force, progress=progress)
    spec = made.spec
    console().print(
        f"{made.path}: {spec.model_type}, {spec.num_layers} layers, d_model {spec.d_model}, FFN {spec.d_ff}, "
        f"{made.dtype}, {made.model_bytes / 1e6:.1f} MB of weights",
        soft_wrap=True,
    )


@app.command()
def verify(store: StorePath) -> None:
    """Check every byte of a store against its digests."""
    from workbench.flash.store import verify as run

    with progress_bar("verify") as progress:
        run(store, progress)
    console().print(f"{store}: whole, every digest fits", soft_wrap=True)


@app.command("train-predictors")
def train_predictors(
    model: Annotated[str, typer.Argument(help="dense checkpoint")],
    data: Data,
    out: Annotated[Path, typer.Option(help="directory to write")],
    tokens: Annotated[int, typer.Option(min=1, help="training tokens")] = 100_000,
    rank: Annotated[int | None, typer.Option(min=1, help="rank of the first layers [by the model's size]")] = None,
    last_rank: Annotated[int | None, typer.Option(min=1, help="rank of the last layers [by the model's size]")] = None,
    last_layers: Annotated[int | None, typer.Option(min=0, help="how many are last [an eighth]")] = None,
    false_negative: Annotated[float, typer.Option(help="share of active neurons that may be missed")] = 0.05,
    device: Annotated[Literal["cpu", "cuda"], typer.Option()] = "cpu",
    dtype: Annotated[DType, typer.Option(help="of the dense model")] = "float32",
    fresh: Annotated[bool, typer.Option("--fresh", help="discard an unfinished run in OUT")] = False,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Low-rank predictors of all layers in one pass over the text; resumes."""
    from workbench.experiments.record import write_json
    from workbench.predictor.config import PredictorSpec
    from workbench.predictor.train import train_predictors as run
    from workbench.report import predictor_table, read_predictors, to_rich

    try:
        spec = PredictorSpec(
            tokens=tokens, rank=rank, last_rank=last_rank, last_layers=last_layers,
            false_negative=false_negative, seed=seed,
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with progress_bar("train predictors") as progress:
        made = run(model, data, spec, out=out, resume=not fresh, device=device, dtype=dtype, progress=progress)
    if json:
        write_json(json, made.card)
    console().print(to_rich(predictor_table(read_predictors(out))))


@analyze.command("sparsity")
def sparsity(
    model: Annotated[str, typer.Argument(help="dense checkpoint")],
    data: Data,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of text")] = 4096,
    json: Json = None,
) -> None:
    """Share of zeros in each layer's FFN activations."""
    from workbench.experiments.record import write_json
    from workbench.experiments.reuse import analyze_sparsity

    with progress_bar("sparsity") as progress:
        record = analyze_sparsity(model, data, tokens=tokens, progress=progress)
    if json:
        write_json(json, record)
    for row in record["rows"]:
        console().print(f"layer {row['layer']:3d}  {100 * row['zeros']:.1f}% zeros")


@analyze.command("reuse")
def reuse(
    model: Annotated[str, typer.Argument(help="dense checkpoint")],
    data: Data,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of text")] = 4096,
    json: Json = None,
) -> None:
    """Share of the FFN that a neuron window keeps, and that each token adds."""
    from workbench.experiments.record import write_json
    from workbench.experiments.reuse import analyze_reuse
    from workbench.report import read_reuse, reuse_table, to_rich

    with progress_bar("reuse") as progress:
        record = analyze_reuse(model, data, tokens=tokens, progress=progress)
    if json:
        write_json(json, record)
    console().print(to_rich(reuse_table(read_reuse(record))))


@app.command()
@ablation_options
def ablate(
    store: StorePath,
    data: Data,
    ablation: dict[str, Any],
    predictors: PredictorsDir = None,
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens")] = 128,
    tokens: Annotated[int, typer.Option(min=4, help="tokens counted a row")] = 64,
    row_seconds: Annotated[float, typer.Option(min=0, help="end a row after this long")] = 120.0,
    window: Window = 4,
    dram: Dram = "50%",
    context: Context = 512,
    depth: Depth = 32,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """The paper's rows as a table; techniques given as options make one more row."""
    from workbench.experiments import ablate as experiment
    from workbench.experiments.record import write_json
    from workbench.experiments.text import window_of
    from workbench.flash.store import Store
    from workbench.predictor.low_rank import Predictors
    from workbench.report import ablation_table, read_ablation, to_rich

    opened = Store.open(store)
    trained = Predictors.load(predictors) if predictors else None
    rows = experiment.default_rows(trained)
    if ablation:
        base = Ablation(predictor="low_rank" if trained else "oracle")
        rows["asked for"] = dataclasses.replace(base, **ablation)
    text = window_of(data, opened, prompt + experiment.WARM_UP + tokens)
    run = RunSpec(window=window, dram=dram, context=context, depth=depth, seed=seed)
    partial = json.with_name(json.name + ".partial") if json else None
    with progress_bar("ablate") as progress:
        record = experiment.ablate(
            opened, trained, text, rows=rows, run=run, prompt=prompt, tokens=tokens, row_seconds=row_seconds,
            predictors_name=predictors.name if predictors else "", partial=partial, progress=progress,
        )  # fmt: skip
    if json:
        write_json(json, record)
    if partial:
        partial.unlink(missing_ok=True)
    console().print(to_rich(ablation_table(read_ablation(record))))


@app.command()
@ablation_options
def generate(
    store: StorePath,
    prompt: Annotated[str, typer.Option(help="text to continue")],
    ablation: dict[str, Any],
    predictors: PredictorsDir = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="nucleus: keep the likeliest tokens up to this")] = 1.0,
    window: Window = 4,
    dram: Dram = "50%",
    context: Context = 512,
    depth: Depth = 32,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Streamed text with the latency split."""
    from workbench.engines import load
    from workbench.experiments.generate import stream

    settings = Ablation(**{"predictor": "low_rank" if predictors else "oracle", **ablation})
    run = RunSpec(window=window, dram=dram, context=context, depth=depth, seed=seed)
    with load(store, ablation=settings, predictors=predictors, run=run) as engine:
        record = stream(
            engine, prompt, max_new_tokens, temperature=temperature, top_p=top_p,
            write=lambda text: (sys.stdout.write(text), sys.stdout.flush()),
        )  # fmt: skip
    sys.stdout.write("\n")
    print(record["summary"], file=sys.stderr)
    if json:
        from workbench.experiments.record import write_json

        write_json(json, record)


@bench.command("flash")
def flash(
    store: StorePath,
    io: Annotated[IoEngine, typer.Option(help="reader engine")] = "threads",
    seconds: Annotated[float, typer.Option(min=0.01, help="for each point")] = 0.25,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Throughput by chunk size and threads; fits the cost model."""
    from workbench.experiments.flash_bench import bench_flash
    from workbench.experiments.record import write_json
    from workbench.flash.store import Store
    from workbench.report import flash_table, read_flash, to_rich

    with progress_bar("bench flash") as progress:
        record = bench_flash(Store.open(store), engines=(io,), seconds=seconds, seed=seed, progress=progress)
    if json:
        write_json(json, record)
    console().print(to_rich(flash_table(read_flash(record))))
    fit = record["fit"]
    console().print(
        f"A read costs {fit['latency_us']:.1f} us and its bytes at {fit['bytes_per_s'] / 1e6:.0f} MB/s: "
        f"gaps up to {fit['gap_bytes'] / 1024:.0f} KiB are cheaper to read than to skip.",
        soft_wrap=True,
    )


app.add_typer(analyze, name="analyze")
app.add_typer(bench, name="bench")
