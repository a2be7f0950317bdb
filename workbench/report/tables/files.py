"""Tables as files: NAME.html, NAME.md, NAME.png and NAME.json, and an index of all that lie in a folder."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import RecordError
from workbench.pictures import smaller
from workbench.report.html import write_file
from workbench.report.reading import load_json
from workbench.report.tables.drawn import Drawn, index_html, index_markdown, markdown, page_html
from workbench.report.tables.registry import ENTRIES, TABLE, entry, name_of, parts_of

STORED = Path("docs", "results", "tables")


@dataclass(frozen=True)
class Tables(Sequence[Drawn]):
    """Tables that were drawn, the files that were written, and why others are missing, by NAME."""

    drawn: tuple[Drawn, ...]
    paths: tuple[Path, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    def __getitem__(self, index: Any) -> Any:
        """By number, or by NAME. KeyError where that was not drawn."""
        if isinstance(index, str):
            return {drawn.name: drawn for drawn in reversed(self.drawn)}[index]
        return self.drawn[index]

    def __len__(self) -> int:
        return len(self.drawn)

    def __iter__(self) -> Iterator[Drawn]:
        return iter(self.drawn)

    def _ipython_display_(self) -> None:
        """How a notebook shows them."""
        from IPython.display import HTML, display

        for drawn in self.drawn:
            display(drawn)
        if self.missing or not self.drawn:
            display(HTML(Tables((), missing=self.missing)._repr_html_()))

    def _repr_html_(self) -> str:
        """All of them as HTML, for what shows HTML only."""
        parts = [drawn._repr_html_() for drawn in self.drawn]
        parts += [f"<p>{html.escape(name)}: {html.escape(why)}</p>" for name, why in self.missing.items()]
        return "\n".join(parts) or "<p>No stored tables are here.</p>"


def table_record(name: str, records: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one table: the records that it is drawn from, whole."""
    own = entry(name)
    held = {part: records[part] for part in (*own.needs, *own.uses) if part in records}
    return {"schema": 1, "kind": TABLE, "table": name, "title": own.title, "records": held}


def draw(name: str, records: Mapping[str, Any]) -> Drawn:
    """A table from its parts. RecordError where one that it needs is missing or broken."""
    own = entry(name)
    for part in own.needs:
        if part not in records:
            raise RecordError(
                f"tables: {name} is drawn from a record of {part.replace('_', ' ')}; pass it with --record"
            )
    return own.draw(records)


def write_table(folder: Path, drawn: Drawn, record: Mapping[str, Any] | None, *, page: bool = True) -> list[Path]:
    """Write a table's files into `folder`; its paths, the page first. `record` None: no JSON; `page`: with HTML."""
    names = [f"{drawn.files}{'' if index == 0 else f'-{index + 1}'}.png" for index in range(len(drawn.pictures))]
    files = {f"{drawn.files}.html": page_html(drawn).encode("utf-8")} if page else {}
    files[f"{drawn.files}.md"] = markdown(drawn, names).encode("utf-8")
    files |= {n: p.png if page else smaller(p.png) for n, p in zip(names, drawn.pictures, strict=True)}
    if record is not None:
        files[f"{drawn.files}.json"] = (json.dumps(record, indent=1) + "\n").encode("utf-8")
    return [write_file(folder, name, content) for name, content in files.items()]


def write_index(folder: Path, drawn: Iterable[Drawn], missing: Mapping[str, str], *, page: bool = True) -> list[Path]:
    """index.md and, with `page`, index.html of these tables and of those that lie in `folder` already."""
    shown = {table.files: table for table in drawn}
    lost = {entry(name).title: why for name, why in missing.items()}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        if path.stem.partition("-")[0] in ENTRIES and path.stem not in shown:
            try:
                shown[path.stem] = from_file(path)
            except RecordError as error:
                lost[path.stem] = str(error)
    lost = {title: why for title, why in lost.items() if title not in {table.title for table in shown.values()}}
    order = list(ENTRIES)
    ordered = sorted(shown.values(), key=lambda table: (order.index(table.name), table.files))
    files = {"index.md": index_markdown(ordered, lost)} | ({"index.html": index_html(ordered, lost)} if page else {})
    return [write_file(folder, name, text.encode("utf-8")) for name, text in reversed(files.items())]


def from_file(path: Path) -> Drawn:
    """A table from a stored record NAME.json or NAME-what.json. RecordError where it is none."""
    name = name_of(path.stem)
    return draw(name, parts_of(load_json(path), str(path))).called(path.stem)


def stored_folder() -> Path:
    """Where stored records lie: below the working directory, else in the checkout."""
    return STORED if STORED.is_dir() else Path(__file__).resolve().parents[3] / STORED


def stored_tables(
    *names: str, folder: str | Path | None = None, out: str | Path | None = None, page: bool = False
) -> Tables:
    """Every stored record, or those of these NAMEs, drawn without running anything; none where none are stored.

    folder: where NAME.json and NAME-what.json lie (default: docs/results/tables). out: also write them there, Markdown
    and pictures, and with `page` HTML. Raises RecordError for a record that no table can be drawn from.
    """
    for name in names:
        entry(name)
    root = Path(folder) if folder is not None else stored_folder()
    files = [path for path in sorted(root.glob("*.json")) if not names or name_of(path.stem) in names]
    order = list(ENTRIES)
    drawn = sorted(map(from_file, files), key=lambda table: (order.index(table.name), table.files))
    kept = {path.stem: table_record(name_of(path.stem), parts_of(load_json(path), str(path))) for path in files}
    paths: list[Path] = []
    if out is not None:
        for table in drawn:
            paths += write_table(Path(out), table, None, page=page)
        paths = [*write_index(Path(out), drawn, {}, page=page), *paths]
    return Tables(tuple(drawn), tuple(paths), records=kept)
