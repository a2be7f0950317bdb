"""`workbench tables`: measure, or take records, and draw each table as soon as its parts are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import DataError, RecordError, WorkbenchError
from workbench.report.tables.drawn import Drawn, Entry
from workbench.report.tables.files import Tables, draw, table_record, write_index, write_table
from workbench.report.tables.registry import ENTRIES, entry, gather

if TYPE_CHECKING:
    from workbench.experiments.tables import Parts, Subject
    from workbench.spec import RunSpec

OUT = Path("runs", "tables")
Progress = Callable[[str, int, int], None]
Stage = Callable[[str], Progress | None]
Record = str | Path | Mapping[str, Any]


def tables(
    *names: str,
    store: str | Path | None = None,
    predictors: str | Path | None = None,
    data: str | Path | None = None,
    model: str | Path | None = None,
    records: Sequence[Record] = (),
    out: str | Path = OUT,
    run: RunSpec | None = None,
    stage: Stage | None = None,
    **settings: Any,
) -> Tables:
    """The paper's tables and figures on this machine, beside the paper's own; `names` of ENTRIES, all that can be
    measured where none is given.

    With `records` (paths, or parsed) nothing is run. Else the store, with its predictors, its dense checkpoint `model`
    and text `data`, is measured; without a store the embedded demo model. Each table is written to `out` as HTML,
    Markdown, PNG and JSON as soon as it is finished, with an index of all; what an interrupted run measured is taken
    over by the same call. `stage(title)` gives the progress function of a step. settings: further fields of
    `workbench.experiments.tables.Subject`, such as prompt, tokens, backend, tasks_dir.

    Raises RecordError for an unknown name or a record that does not fit, DataError where something that a named table
    needs was not given, and what the experiments raise.
    """
    wanted = [entry(name) for name in dict.fromkeys(names)]
    folder = Path(out)
    if records:
        return _from_records(wanted, gather(records), folder)
    subject = _subject(folder, store, predictors, data, model, run, stage or _silent, settings)
    return _measure(wanted, bool(names), subject, folder, stage or _silent)


def _silent(title: str) -> None:
    """No progress is shown."""


def _from_records(wanted: list[Entry], parts: Mapping[str, Any], folder: Path) -> Tables:
    able = [own for own in ENTRIES.values() if all(part in parts for part in own.needs)]
    drawn = [draw(own.name, parts) for own in wanted or able]
    kept = {table.name: table_record(table.name, parts) for table in drawn}
    paths = [path for table in drawn for path in write_table(folder, table, kept[table.name])]
    return Tables(tuple(drawn), (*write_index(folder, drawn, {}), *paths), records=kept)


def _subject(
    folder: Path,
    store: str | Path | None,
    predictors: str | Path | None,
    data: str | Path | None,
    model: str | Path | None,
    run: RunSpec | None,
    stage: Stage,
    settings: dict[str, Any],
) -> Subject:
    from workbench.engines import check_backend
    from workbench.experiments.tables import Subject, demo_subject
    from workbench.flash.store import Store

    check_backend(settings.get("backend", "torch-cpu"))  # refused now, not after the first parts
    if run is not None:
        settings = {**settings, "run": run}
    if store is None:
        if predictors is not None or data is not None or model is not None:
            raise DataError("tables: predictors, data and model belong to a store; pass --store STORE with them")
        return demo_subject(folder, progress=stage("convert the demo model"), **settings)
    if data is None:
        raise DataError("tables: a store is measured on text; pass --data with some")
    return Subject(
        Store.open(store), data, Path(predictors) if predictors is not None else None, model=model, **settings
    )


def _measure(wanted: list[Entry], asked: bool, subject: Subject, folder: Path, stage: Stage) -> Tables:
    from workbench.experiments.tables import Parts, lacks

    missing: dict[str, str] = {}
    failed = False
    todo: list[Entry] = []
    for own in wanted or ENTRIES.values():
        why = next((why for part in own.needs if (why := lacks(part, subject, asked=asked))), "")
        if why and asked:
            raise DataError(f"tables: {own.name} {why}")
        missing |= {own.name: why} if why else {}
        todo += [] if why else [own]
    if not todo:
        raise DataError("tables: none can be measured with what was given; see workbench tables --list")
    parts = Parts(subject, folder)
    drawn: list[Drawn] = []
    paths: list[Path] = []
    kept: dict[str, dict[str, Any]] = {}
    try:
        for own in todo:
            try:
                found = _found(own, parts, subject, stage, asked)
                table = draw(own.name, found)
            except WorkbenchError as error:
                if asked:
                    raise
                missing[own.name], failed = f"failed: {error}", True
                continue
            kept[own.name] = table_record(own.name, found)
            drawn.append(table)
            paths += write_table(folder, table, kept[own.name])
    finally:
        if drawn:
            paths = [*write_index(folder, drawn, missing), *paths]
    if not drawn:
        name, why = next(iter(missing.items()))
        raise RecordError(f"tables: none could be measured; {name}: {why}")
    if not failed:
        parts.discard()
    return Tables(tuple(drawn), tuple(paths), missing, kept)


def _found(own: Entry, parts: Parts, subject: Subject, stage: Stage, asked: bool) -> dict[str, Any]:
    """A table's parts; of those that it only uses, the ones that can be measured."""
    from workbench.experiments.tables import lacks

    wanted = [*own.needs, *(part for part in own.uses if not lacks(part, subject, asked=asked))]
    return {part: parts.get(part, stage) for part in wanted}
