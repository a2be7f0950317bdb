"""`workbench tables`: the paper's tables and figures beside this machine's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.options import Stages, console, directory, writable
from workbench.errors import RecordError
from workbench.spec import LIMITS, DType, RunSpec


def tables(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="table1 ... appendix_g (all)")] = None,
    store: Annotated[Path | None, typer.Option(help="a flash store (the embedded demo model)")] = None,
    predictors: Annotated[Path | None, typer.Option(help="trained predictors of the store's model")] = None,
    model: Annotated[str | None, typer.Option(help="the dense checkpoint that the store was made from")] = None,
    data: Annotated[str | None, typer.Option(help="text: JSON lines, parquet, text, c4, hub:OWNER/NAME")] = None,
    record: Annotated[
        list[Path] | None, typer.Option(help="draw from this record, run nothing; may be given several times")
    ] = None,
    stored: Annotated[bool, typer.Option("--stored", help="draw every record of docs/results/tables")] = False,
    out: Annotated[Path | None, typer.Option(help="directory for pages and records (runs/tables)")] = None,
    list_names: Annotated[bool, typer.Option("--list", help="every NAME and what it needs")] = False,
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens of each row")] = 64,
    tokens: Annotated[int, typer.Option(min=4, help="tokens counted a row")] = 64,
    row_seconds: Annotated[float, typer.Option(min=0, help="end a row after this long")] = 120.0,
    text_tokens: Annotated[int, typer.Option(min=1, help="tokens that activations are analysed on")] = 4096,
    quality_tokens: Annotated[int, typer.Option(min=1, help="tokens that perplexity is measured on")] = 2048,
    long_tokens: Annotated[int | None, typer.Option(min=10, help="of figure 8 (1000; of the demo model 440)")] = None,
    tasks_dir: Annotated[Path | None, typer.Option(help="data of the zero-shot tasks in local files (the hub)")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="documents of each task (all)")] = None,
    window: Annotated[int, typer.Option(min=0, max=LIMITS["window"][1], help="the paper's k, in tokens")] = 4,
    dram: Annotated[str | None, typer.Option(help="DRAM budget (50%; of the demo model 80%)")] = None,
    context: Annotated[int | None, typer.Option(min=0, max=LIMITS["context"][1], help="KV cache, tokens")] = None,
    kv_dtype: Annotated[DType, typer.Option(help="of the KV cache; attention computes in float32")] = "float32",
    depth: Annotated[int, typer.Option(min=1, max=LIMITS["depth"][1], help="reads in flight")] = 32,
    draft: Annotated[Path | None, typer.Option(help="store of a draft model, for speculative decoding")] = None,
    backend: Annotated[str, typer.Option(help="of the rows that decode")] = "torch-cpu",
    seed: Annotated[int, typer.Option(min=0, max=LIMITS["seed"][1], help="seed of every random choice")] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", help="write all records to this file", callback=writable)
    ] = None,
) -> None:
    """The paper's tables and figures beside this machine's, from a run or from records; resumes."""
    from workbench.report.tables import OUT, Tables, entry, stored_tables
    from workbench.report.tables import tables as run

    wanted = list(dict.fromkeys(names or []))
    for name in wanted:
        entry(name)
    if list_names:
        _list()
        return
    if stored and record:
        raise typer.BadParameter("--stored draws the records of docs/results/tables: give it or --record, not both")
    folder = directory(out) if out is not None else None
    if stored:
        found = stored_tables(*wanted, out=folder)
        if not found.drawn:
            raise RecordError("tables: no record is stored in docs/results/tables; give --record FILE, or measure")
    elif record:
        found = run(*wanted, records=record, out=folder or directory(OUT))
    else:
        given: dict[str, Any] = {"long_tokens": long_tokens} if long_tokens is not None else {}
        settings = _run_spec(store is None, window, dram, context, kv_dtype, depth, seed, draft)
        with Stages() as stages:
            found = run(
                *wanted, store=store, predictors=predictors, model=model, data=data, out=folder or directory(OUT),
                run=settings, stage=stages, prompt=prompt, tokens=tokens, row_seconds=row_seconds,
                text_tokens=text_tokens, quality_tokens=quality_tokens, tasks_dir=tasks_dir, limit=limit,
                backend=backend, **given,
            )  # fmt: skip
    assert isinstance(found, Tables)
    if json:
        from workbench.experiments.record import write_json

        write_json(json, {"schema": 1, "kind": "tables", "tables": list(found.records.values())})
    _show(found, bool(wanted))


def _run_spec(
    demo: bool, window: int, dram: str | None, context: int | None, kv_dtype: DType, depth: int, seed: int,
    draft: Path | None,
) -> RunSpec:  # fmt: skip
    own: dict[str, Any] = {"dram": "80%", "context": 256} if demo else {}
    own |= {"dram": dram} if dram is not None else {}
    own |= {"context": context} if context is not None else {}
    return RunSpec(window=window, kv_dtype=kv_dtype, depth=depth, seed=seed, draft=str(draft) if draft else "", **own)


def _show(found: Any, whole: bool) -> None:
    """Each table where some were named, else a line each; then what is missing and what was written."""
    from workbench.report import to_rich

    screen = console()
    for drawn in found:
        screen.rule(drawn.title, align="left")
        if drawn.synthetic:
            screen.print("synthetic weights: latency and bytes only", style="bold yellow")
        screen.print(drawn.headline, soft_wrap=True, markup=False)
        for table in drawn.tables if whole else ():
            screen.print(to_rich(table))
        if whole:
            for note in drawn.notes:
                screen.print(note, soft_wrap=True, markup=False)
            screen.print(f"Paper: {drawn.says}", soft_wrap=True, markup=False)
    for name, why in found.missing.items():
        print(f"not measured: {name} {why}", file=sys.stderr)
    if found.paths:
        pages = [path for path in found.paths if path.suffix in (".html", ".md")]
        shown = [path for path in pages if path.suffix == ".html"] or pages
        screen.print("\n".join(["Written:", *(f"  {path}" for path in shown)]), soft_wrap=True, markup=False)


def _list() -> None:
    from workbench.report.tables import ENTRIES

    screen = console()
    for own in ENTRIES.values():
        parts = ", ".join([*own.needs, *(f"{part} (if there)" for part in own.uses)]).replace("_", " ")
        screen.print(f"{own.name}: {own.title.partition(': ')[2]}", style="bold", markup=False, highlight=False)
        screen.print(f"  from: {parts}\n  paper: {own.says}", soft_wrap=True, markup=False, highlight=False)
