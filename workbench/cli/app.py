"""The commands, in the order of `workbench --help`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from workbench.ablation import Ablation, IoEngine
from workbench.cli.analyze import analyze
from workbench.cli.kernels import kernels
from workbench.cli.options import (
    Stages,
    ablation_options,
    console,
    directory,
    made,
    numbers,
    progress_bar,
    spec_options,
    writable,
)
from workbench.cli.plan import plan
from workbench.cli.synth import synth
from workbench.cli.tables import tables
from workbench.engines import Backend
from workbench.predictor.config import PredictorSpec
from workbench.relufy.config import RelufySpec
from workbench.spec import LIMITS, DType, PromptNeurons, RunSpec

ORDER = (
    "demo", "convert", "verify", "relufy", "train-predictors", "evaluate", "analyze", "place", "ablate", "generate",
    "plan", "bench", "tables", "synth", "lab", "kernels",
)  # fmt: skip


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
bench = typer.Typer(no_args_is_help=True, help="What the machine gives.")

Json = Annotated[Path | None, typer.Option("--json", help="write the record to this file", callback=writable)]
Seed = Annotated[int, typer.Option(min=0, max=LIMITS["seed"][1], help="seed of every random choice")]
Data = Annotated[
    str, typer.Option(help="text: C4-style .json.gz, parquet, text (file or folder), c4, or hub:OWNER/NAME")
]
DraftStore = Annotated[
    Path | None, typer.Option("--draft", help="store of a smaller model of the same tokenizer, for --speculative")
]
DraftTokens = Annotated[
    int,
    typer.Option(min=LIMITS["draft_tokens"][0], max=LIMITS["draft_tokens"][1], help="tokens drafted at once (lambda)"),
]
Window = Annotated[int, typer.Option(min=0, max=LIMITS["window"][1], help="the paper's k, in tokens")]
Dram = Annotated[str, typer.Option(help="DRAM budget: a share of the model (50%) or a size (3GiB)")]
Context = Annotated[int, typer.Option(min=0, max=LIMITS["context"][1], help="KV cache, tokens; 0: all positions")]
KvDtype = Annotated[DType, typer.Option(help="of the KV cache; attention computes in float32")]
Depth = Annotated[int, typer.Option(min=1, max=LIMITS["depth"][1], help="reads in flight")]
PlacementMethod = Literal["chain", "clusters", "bisection", "spectral", "frequency", "shuffled", "own"]
AnyDType = Literal["auto", "float32", "float16", "bfloat16"]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="where to train")]
Computes = Annotated[Backend, typer.Option(help="what the engine computes with and on")]
Logs = Annotated[Path | None, typer.Option(help="directory for TensorBoard")]
CheckpointSeconds = Annotated[float, typer.Option(min=0, help="save the state this often")]
Fresh = Annotated[bool, typer.Option("--fresh", help="discard an unfinished run in OUT")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="run code that its tokenizer brings along")]
PredictorsDir = Annotated[Path | None, typer.Option(help="trained predictors")]
Threads = Annotated[int, typer.Option(min=0, max=LIMITS["compute_threads"][1], help="of the kernels; 0: all cores")]
EVALUATION = Path("runs/evaluate")
StorePath = Annotated[Path, typer.Argument(help="a flash store")]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="where results go")] = Path("runs/demo"),
    dram: Dram = "80%",
    backend: Computes = "torch-cpu",
    seed: Seed = 0,
) -> None:
    """The main job on the embedded model: predictors, ablation, report."""
    from workbench.experiments.demo import demo as run_demo
    from workbench.report import ablation_table, to_rich, write_report
    from workbench.report import read_ablation as read
    from workbench.report.words import headline

    with Stages() as stages:
        result = run_demo(out, stage=stages, seed=seed, dram=dram, backend=backend)
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
        typer.Option(help="stored as (the checkpoint's)"),
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


@app.command()
@spec_options(RelufySpec, "Distillation")
def relufy(
    model: Annotated[str, typer.Argument(help="checkpoint directory or hub id")],
    out: Annotated[Path, typer.Argument(help="checkpoint directory to write")],
    data: Annotated[list[str], typer.Option(help="text, as PATH or PATH=WEIGHT; may be given several times")],
    spec: dict[str, Any],
    device: Device = "cpu",
    dtype: Annotated[DType, typer.Option(help="of the arithmetic; weights are trained in float32")] = "float32",
    logs: Logs = None,
    checkpoint_seconds: CheckpointSeconds = 120.0,
    fresh: Fresh = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = None,
) -> None:
    """ReLU and re-train by distillation, for models that are not sparse; resumes."""
    from workbench.experiments.record import write_json
    from workbench.relufy.run import relufy as run

    with progress_bar("relufy") as progress:
        card = run(
            model, _sources(data), made(RelufySpec, spec), out=out, resume=not fresh, device=device, dtype=dtype,
            logs=logs, checkpoint_seconds=checkpoint_seconds, progress=progress, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if json:
        write_json(json, card)
    for text, measured in card["measured"].items():
        before, after = measured["before"], measured["after"]
        console().print(
            f"{out}, {text} text: perplexity {before['perplexity']:.2f} before, {after['perplexity']:.2f} after; "
            f"{100 * after['zeros']:.1f}% zeros",
            soft_wrap=True,
        )


@app.command("train-predictors")
@spec_options(PredictorSpec, "Training")
def train_predictors(
    model: Annotated[str, typer.Argument(help="dense checkpoint")],
    data: Data,
    out: Annotated[Path, typer.Option(help="directory to write")],
    spec: dict[str, Any],
    device: Device = "cpu",
    dtype: Annotated[AnyDType, typer.Option(help="of the dense model; auto: by device and memory")] = "auto",
    logs: Logs = None,
    checkpoint_seconds: CheckpointSeconds = 120.0,
    fresh: Fresh = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = None,
) -> None:
    """Low-rank predictors of all layers in one pass over the text; resumes. Runs under torchrun too."""
    from workbench.experiments.record import write_json
    from workbench.predictor.train import train_predictors as run
    from workbench.report import predictor_table, read_predictors, to_rich
    from workbench.training.distributed import is_main

    with progress_bar("train predictors", shown=is_main()) as progress:
        trained = run(
            model, data, made(PredictorSpec, spec), out=out, resume=not fresh, device=device, dtype=dtype, logs=logs,
            checkpoint_seconds=checkpoint_seconds, progress=progress, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if not is_main():
        return
    if json:
        write_json(json, trained.card)
    console().print(to_rich(predictor_table(read_predictors(out))))


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="flash store, checkpoint directory or hub id")],
    predictors: PredictorsDir = None,
    data: Annotated[str | None, typer.Option(help="text for perplexity and for what a token costs")] = None,
    documents: Annotated[tuple[int, int], typer.Option(min=0, help="from and up to which document of it")] = (0, 200),
    tokens: Annotated[int, typer.Option(min=1, help="at most so many tokens of it")] = 16384,
    tasks: Annotated[str, typer.Option(help="zero-shot tasks: arc_easy,arc_challenge,hellaswag,mmlu")] = "",
    tasks_dir: Annotated[Path | None, typer.Option(help="their data in local files (the hub)")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="documents of each task (all)")] = None,
    rates: Annotated[str, typer.Option(help="false-negative rates of the predictors")] = "0.01,0.02,0.05,0.1",
    decode: Annotated[int, typer.Option(min=4, help="tokens timed a row")] = 64,
    prompt: Annotated[list[str] | None, typer.Option(help="text to continue, dense beside predicted")] = None,
    prompt_rate: Annotated[float, typer.Option(min=0, max=1, help="false-negative rate of that text")] = 0.05,
    store: Annotated[Path | None, typer.Option(help="where a checkpoint is converted to")] = None,
    out: Annotated[Path, typer.Option(help="directory for record, page and curve", callback=directory)] = EVALUATION,
    window: Window = 4,
    dram: Dram = "100%",
    context: Context = 2048,
    depth: Depth = 32,
    io: Annotated[IoEngine, typer.Option(help="reader engine of what is timed")] = "threads",
    threads: Threads = 0,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Perplexity and zero-shot tasks through the running pipeline, dense and with predictors; resumes."""
    from workbench.experiments.evaluate import evaluate as run
    from workbench.experiments.evaluate import open_store
    from workbench.experiments.record import write_json
    from workbench.experiments.side_by_side import side_by_side
    from workbench.predictor.low_rank import Predictors
    from workbench.report import (
        evaluation_table,
        read_evaluation,
        read_side_by_side,
        side_by_side_rich,
        to_rich,
        write_evaluation,
    )
    from workbench.report.evaluation_table import headline

    if prompt and not predictors:
        raise typer.BadParameter("--prompt compares with predictors: give --predictors DIR")
    settings = RunSpec(window=window, dram=dram, context=context, depth=depth, compute_threads=threads, seed=seed)
    if prompt and predictors:
        Predictors.load(predictors).at(prompt_rate)  # refused now, not after the measurement
    wanted = numbers(rates, float, "shares such as 0.01,0.05")
    partial = out / "evaluation.json.partial"
    screen = console()
    with progress_bar("evaluate") as progress:
        record = run(
            model, predictors, store=store, data=data, tasks=[name for name in tasks.split(",") if name],
            tasks_dir=tasks_dir, rates=wanted, tokens=tokens, documents=documents, decode=decode, limit=limit,
            run=settings, io=io, tell=lambda line: print(line, file=sys.stderr), progress=progress, partial=partial,
        )  # fmt: skip
    for path in filter(None, (out / "evaluation.json", json)):
        write_json(path, record)
    read = read_evaluation(record)
    screen.print(to_rich(evaluation_table(read)))
    screen.print(headline(read), soft_wrap=True)
    texts = None
    if prompt and predictors:
        with progress_bar("side by side") as progress:
            texts = side_by_side(
                open_store(model, store), predictors, prompt, rate=prompt_rate, ablation=Ablation(io=io), run=settings,
                progress=progress,
            )  # fmt: skip
        screen.print(side_by_side_rich(read_side_by_side(texts)))
    screen.print("\n".join(["Written:", *(f"  {path}" for path in write_evaluation(out, record, side_by_side=texts))]))
    partial.unlink(missing_ok=True)


@app.command()
def place(
    model: Annotated[str, typer.Argument(help="the dense checkpoint that the store was made from")],
    store: StorePath,
    data: Data,
    predictors: PredictorsDir = None,
    tokens: Annotated[int, typer.Option(min=1, help="of training text, to fit the order to")] = 16384,
    held_out: Annotated[int, typer.Option(min=1, help="tokens of held-out text, to count reads on")] = 4096,
    method: Annotated[PlacementMethod, typer.Option(help="how the order is found")] = "clusters",
    compare: Annotated[bool, typer.Option("--compare", help="count every method on the held-out text")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="stretches of held-out text that the engine takes")] = 6,
    window: Window = 4,
    dram: Dram = "50%",
    context: Context = 512,
    depth: Depth = 32,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Store neurons that are loaded together side by side, and count reads before and after on held-out text."""
    from workbench.experiments.place import place as run
    from workbench.experiments.record import write_json
    from workbench.flash.store import Store
    from workbench.predictor.low_rank import Predictors
    from workbench.report import placement_table, read_placement, to_rich
    from workbench.report.placement import headline

    settings = RunSpec(window=window, dram=dram, context=context, depth=depth, seed=seed)
    with progress_bar("place") as progress:
        record = run(
            model, Store.open(store), data, predictors=Predictors.load(predictors) if predictors else None,
            predictors_name=predictors.name if predictors else "", tokens=tokens, held_out=held_out, method=method,
            run=settings, rounds=rounds, compare=compare, progress=progress,
        )  # fmt: skip
    if json:
        write_json(json, record)
    read = read_placement(record)
    console().print(to_rich(placement_table(read)))
    console().print(headline(read), soft_wrap=True)


@app.command()
@ablation_options
def ablate(
    store: StorePath,
    data: Data,
    ablation: dict[str, Any],
    predictors: PredictorsDir = None,
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens")] = 128,
    tokens: Annotated[int, typer.Option(min=4, help="tokens counted a row")] = 64,
    row: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="only this row; may be given several times (the paper's)")
    ] = None,
    row_seconds: Annotated[float, typer.Option(min=0, help="end a row after this long")] = 120.0,
    draft: DraftStore = None,
    draft_tokens: DraftTokens = 4,
    window: Window = 4,
    dram: Dram = "50%",
    context: Context = 512,
    kv_dtype: KvDtype = "float32",
    depth: Depth = 32,
    backend: Computes = "torch-cpu",
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """The paper's rows as a table; techniques given as options make one more row, and so does a draft model."""
    from workbench.experiments import ablate as experiment
    from workbench.experiments.record import write_json
    from workbench.experiments.text import window_and_card
    from workbench.flash.store import Store
    from workbench.predictor.low_rank import Predictors
    from workbench.report import ablation_table, read_ablation, to_rich

    opened = Store.open(store)
    trained = Predictors.load(predictors) if predictors else None
    rows = experiment.default_rows(trained)
    run = _run(window, dram, context, kv_dtype, depth, seed, draft, draft_tokens)
    if row:
        known = rows | (experiment.beyond_rows(run) if trained else {})
        wrong = [name for name in row if name not in known]
        if wrong:
            raise typer.BadParameter(f"--row {wrong[0]!r} is not one of {'; '.join(known)}")
        if draft and "all + speculative" not in row:
            raise typer.BadParameter("--draft is for the row 'all + speculative'; add it, or leave --draft out")
        rows = {name: known[name] for name in row}
    elif draft and trained:
        rows["all + speculative"] = experiment.beyond_rows(run)["all + speculative"]
    if ablation:
        base = Ablation(predictor="low_rank" if trained else "oracle")
        rows["asked for"] = dataclasses.replace(base, **ablation)
    text, card = window_and_card(data, opened, prompt + experiment.WARM_UP + tokens)
    partial = json.with_name(json.name + ".partial") if json else None
    with progress_bar("ablate") as progress:
        record = experiment.ablate(
            opened, trained, text, rows=rows, run=run, prompt=prompt, tokens=tokens, row_seconds=row_seconds,
            predictors_name=predictors.name if predictors else "", partial=partial, progress=progress,
            data=card, backend=backend,
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
    draft: DraftStore = None,
    draft_tokens: DraftTokens = 4,
    prompt_neurons: Annotated[
        PromptNeurons, typer.Option(help="of the prompt: its tokens' own (union), all (dense), or the cheaper (auto)")
    ] = "union",
    window: Window = 4,
    dram: Dram = "50%",
    context: Context = 512,
    kv_dtype: KvDtype = "float32",
    depth: Depth = 32,
    backend: Computes = "torch-cpu",
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Streamed text with the latency split."""
    from workbench.engines import load
    from workbench.experiments.generate import stream

    settings = Ablation(**{"predictor": "low_rank" if predictors else "oracle", **ablation})
    if draft and not settings.speculative:
        raise typer.BadParameter("--draft is for --speculative; add it, or leave --draft out")
    run = _run(window, dram, context, kv_dtype, depth, seed, draft, draft_tokens)
    run = dataclasses.replace(run, prompt_neurons=prompt_neurons)
    with load(store, ablation=settings, predictors=predictors, run=run, backend=backend) as engine:
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


@app.command()
def lab(
    folder: Annotated[Path, typer.Argument(metavar="[DIRECTORY]", help="where the notebooks are copied to")] = Path(
        "lab"
    ),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="of the server (the first free from 8888)")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open it")] = True,
) -> None:
    """JupyterLab on a copy of the notebooks; a notebook that you changed is kept."""
    import os

    from workbench.experiments.lab import copy_notebooks, lab_command

    command = lab_command(folder, port=port, browser=browser)  # refused before anything is copied
    for copied in copy_notebooks(folder):
        note = (
            "kept as you changed it; move it away to get this version's" if copied.action == "kept" else copied.action
        )
        console().print(f"{folder / copied.name}: {note}", soft_wrap=True)
    sys.stdout.flush()
    os.execv(command[0], command)


def _run(
    window: int, dram: str, context: int, kv_dtype: DType, depth: int, seed: int, draft: Path | None, draft_tokens: int
) -> RunSpec:
    return RunSpec(
        window=window, dram=dram, context=context, kv_dtype=kv_dtype, depth=depth, seed=seed, draft=str(draft or ""),
        draft_tokens=draft_tokens,
    )  # fmt: skip


def _sources(given: list[str]) -> list[tuple[str, float]]:
    """PATH or PATH=WEIGHT, each."""
    found = []
    for entry in given:
        path, _, weight = entry.rpartition("=") if not Path(entry).exists() else (entry, "", "1")
        try:
            found.append((path or entry, float(weight) if path else 1.0))
        except ValueError:
            raise typer.BadParameter(f"{entry!r} is not PATH or PATH=WEIGHT") from None
    return found


app.command()(synth)
app.command()(plan)
app.command()(tables)
app.add_typer(analyze, name="analyze")
app.add_typer(bench, name="bench")
app.add_typer(kernels, name="kernels")
