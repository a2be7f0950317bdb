"""What a session measured, as files: an ablation record (schema 1) and its table for a paper."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

from workbench.errors import DataError, RecordError
from workbench.experiments.ablate import LEAST_TOKENS, WARM_UP
from workbench.experiments.record import SCHEMA, machine, model_name, run_info, write_json
from workbench.report import ablation_table, read_ablation, to_latex, to_markdown
from workbench.widgets.session import Session
from workbench.widgets.stretch import Summary

Kind = Literal["json", "md", "tex"]
KINDS: dict[Kind, str] = {"json": "JSON record", "md": "Markdown table", "tex": "LaTeX table"}


def session_record(session: Session) -> dict[str, Any]:
    """A record of kind ablation: one row for each setting that made tokens enough, in order, named by its change.

    What differs between rows but is no part of the ablation (window, budget, threads, thresholds) stands in the row's
    name; `run` says it where all rows agree. `peak_rss_bytes` is the most that was seen, at every 16th token. There is
    no floor, which takes flash to itself to measure. DataError when no setting has made tokens enough.
    """
    summaries = session.summaries()
    if not summaries:
        raise DataError(
            f"export: no setting has made {WARM_UP + LEAST_TOKENS} tokens yet "
            f"(the first {WARM_UP} fill the window); let it run a little longer"
        )
    store = session.store
    windows, budgets, seeds = (_values(summaries, name) for name in ("window", "dram", "seed"))
    return {
        "schema": SCHEMA,
        "kind": "ablation",
        "machine": machine(store.path),
        "run": run_info(
            model_name(store), store.spec, store.dtype, tokens=sum(s.row["tokens"] for s in summaries),
            io=", ".join(sorted({s.setting.ablation.io for s in summaries})),
            window=windows[0] if len(windows) == 1 else None, dram=", ".join(budgets),
            seed=seeds[0] if len(seeds) == 1 else None, predictors=session.predictors_name, command=session.command,
        ),
        "rows": [s.row for s in summaries],
    }  # fmt: skip


def _values(summaries: list[Summary], name: str) -> list[Any]:
    """The different values of a field of the run, in order."""
    return list(dict.fromkeys(getattr(s.setting.run, name) for s in summaries))


def table_text(record: dict[str, Any], kind: Kind) -> str:
    """The record's table as Markdown or LaTeX (booktabs)."""
    table = ablation_table(read_ablation(record))
    return to_markdown(table) if kind == "md" else to_latex(table)


def export(session: Session, path: str | Path, kind: Kind | None = None) -> Path:
    """Write what the session measured; the kind follows from the name's end (.json, .md, .tex) when it is not given.

    Folders in its path are made. DataError when there is nothing to write, RecordError when the name or the place does
    not allow it.
    """
    target = Path(path)
    if "\0" in str(target):
        raise RecordError(f"{str(target)!r}: a name cannot hold a null character; choose another path")
    wanted = kind or target.suffix.removeprefix(".")
    if wanted not in KINDS:
        raise RecordError(f"{target}: ends in none of .json, .md, .tex; choose one of them")
    if target.is_dir():
        raise RecordError(f"{target}: is a directory; choose another path")
    record = session_record(session)
    if wanted == "json":
        write_json(target, record)
        return target
    partial = target.with_name(target.name + ".writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(table_text(record, wanted), encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RecordError(f"{target}: cannot be written ({error.strerror}); choose another path") from error
    return target
