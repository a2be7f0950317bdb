"""A table or figure of the paper, drawn from records: what stands in it, and as Markdown and HTML."""

from __future__ import annotations

import base64
import html
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.report import page
from workbench.report.html import provenance
from workbench.report.numbers import NONE, caption
from workbench.report.paper import paper
from workbench.report.records import Run
from workbench.report.table import Line, Table, to_html, to_markdown

NOT_MEASURED = "not measured"
NO_NUMBER = "The paper prints no number here."
SHOWN = 920
"""Pixels of a picture in a notebook."""
Records = Mapping[str, Any]
"""Parsed JSON by the name of what was measured: 'ablation', 'flash', 'predictors' and so on."""


@dataclass(frozen=True)
class Measured:
    """Where a part of it comes from: a record's run and machine, and the file that it was read from."""

    what: str
    run: Run
    machine: Mapping[str, Any]
    source: str = "record"

    @property
    def line(self) -> str:
        """Model, machine, tokens and commit; 'synthetic weights' first where they are."""
        return f"{'synthetic weights · ' if self.run.synthetic else ''}{caption(self.run, self.machine)}"


@dataclass(frozen=True)
class Picture:
    """A PNG and what it shows, in a sentence."""

    alt: str
    png: bytes = field(repr=False)


@dataclass(frozen=True)
class Drawn:
    """A table or figure of the paper with this machine's numbers beside the paper's.

    name: as `workbench tables` takes it. headline: what was found, a sentence. says: what the paper says. method: how
    it was measured. extra_html, extra_markdown: what no table holds. stem: of the files that it is written to.
    """

    name: str
    title: str
    headline: str
    says: str
    method: str
    measured: tuple[Measured, ...]
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()
    extra_html: str = ""
    extra_markdown: str = ""
    stem: str = ""

    @property
    def files(self) -> str:
        """The name of its files, without their endings."""
        return self.stem or self.name

    @property
    def synthetic(self) -> bool:
        """Whether any of it comes from random weights."""
        return any(part.run.synthetic for part in self.measured)

    def called(self, stem: str) -> Drawn:
        """The same, for files of another name."""
        return replace(self, stem=stem)

    def _ipython_display_(self) -> None:
        """How a notebook shows it: the tables, then each picture as an output of its own, so that it can be saved."""
        from IPython.display import HTML, Image, display

        display(HTML(replace(self, pictures=())._repr_html_()))
        for picture in self.pictures:
            display(Image(picture.png, width=SHOWN, alt=picture.alt))

    def _repr_html_(self) -> str:
        """All of it as HTML, for what shows HTML only."""
        parts = [f"<h4>{html.escape(self.title)}</h4>", page.element("p", self.headline)]
        if self.synthetic:
            parts.append("<p><b>Synthetic weights: latency and bytes only.</b></p>")
        parts += [table._repr_html_() for table in self.tables]
        parts += [
            f'<img width="{SHOWN}" alt="{html.escape(p.alt, quote=True)}" src="{_data(p.png)}">' for p in self.pictures
        ]
        parts += [self.extra_html, page.bullets(self.notes) if self.notes else ""]
        about = "".join(f"<br>{html.escape(part.what)}: {html.escape(part.line)}" for part in self.measured)
        return "\n".join(parts) + f"<p><i>Paper: {html.escape(self.says)}</i><small>{about}</small></p>"


@dataclass(frozen=True)
class Entry:
    """One NAME of `workbench tables`: its title, the records that it is drawn from (`needs`, and `uses` where they are
    there) and how (`draw` raises RecordError for a record that does not fit). `words`: what the paper says, where the
    reference has no sentence for NAME; `number`: whether the paper prints any."""

    name: str
    title: str
    needs: tuple[str, ...]
    draw: Callable[[Records], Drawn]
    uses: tuple[str, ...] = ()
    words: str = ""
    number: bool = True

    @property
    def says(self) -> str:
        """What the paper says."""
        return self.words or (says(self.name) if self.number else f"{says(self.name)} {NO_NUMBER}")


def says(name: str) -> str:
    """What the paper says of a figure or appendix, as a sentence."""
    words = paper().figures[name]
    return f"{words[0].upper()}{words[1:]}."


def measured(what: str, record: Any) -> Measured:
    """Of any record that has `run` and `machine`."""
    return Measured(what, record.run, record.machine, record.source)


def plain(text: str) -> str:
    """Text that Markdown shows as it is, whatever it holds."""
    for mark, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(mark, instead)
    for mark in ("\\", "`", "*", "_", "[", "]", "!"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def markdown(drawn: Drawn, pictures: Iterable[str]) -> str:
    """The page as Markdown; `pictures` are the paths of its pictures, relative to the page."""
    parts = [f"# {plain(drawn.title)}", "", plain(drawn.headline), ""]
    if drawn.synthetic:
        parts += ["**Synthetic weights: latency and bytes only; text and accuracy mean nothing.**", ""]
    for picture, path in zip(drawn.pictures, pictures, strict=True):
        parts += [f"![{plain(picture.alt)}]({path})", ""]
    for table in drawn.tables:
        parts += [to_markdown(_plain_table(table))]
    parts += [drawn.extra_markdown] if drawn.extra_markdown else []
    if drawn.notes:
        parts += [*(f"- {plain(note)}" for note in drawn.notes), ""]
    parts += [f"Paper: {plain(drawn.says)}", "", f"Measured: {plain(drawn.method)}", ""]
    for part in drawn.measured:
        parts += [f"- {part.what}: {plain(part.line)}", f"  `{_command(part.run.command)}`"]
    return "\n".join(parts).rstrip() + "\n"


def _command(text: str) -> str:
    """A command line inside backticks."""
    return " ".join(text.replace("`", "'").split()) or "not kept"


def _plain_table(table: Table) -> Table:
    def line(old: Line) -> Line:
        return replace(old, label=plain(old.label), cells={key: plain(text) for key, text in old.cells.items()})

    columns = tuple(replace(c, head=plain(c.head), unit=plain(c.unit)) for c in table.columns)
    blocks = tuple(tuple(line(old) for old in block) for block in table.blocks)
    return replace(
        table, title=plain(table.title), head=plain(table.head), columns=columns, blocks=blocks,
        notes=tuple(map(plain, table.notes)),
    )  # fmt: skip


def body(drawn: Drawn, *, full: bool = True) -> list[str]:
    """Its part of an HTML page, all text escaped; `full`: with versions and the commands to run it again."""
    parts = [f'<section id="{html.escape(drawn.files, quote=True)}">', page.element("h2", drawn.title)]
    if drawn.synthetic:
        parts.append(page.element("div", "synthetic weights: latency and bytes only", "badge"))
    parts += [page.element("p", drawn.headline)]
    parts += [page.element("p", f"{part.what}: {part.line}", "meta") for part in drawn.measured]
    parts += [to_html(table) for table in drawn.tables]
    for picture in drawn.pictures:
        parts.append(page.drawing(picture.png, picture.alt, picture.alt, drawn.says, drawn.method))
    parts += [drawn.extra_html]
    if drawn.notes:
        parts.append(page.bullets(drawn.notes))
    if not drawn.pictures:
        parts += [page.element("p", f"Paper: {drawn.says}"), page.element("p", f"Measured: {drawn.method}")]
    if full:
        for part in drawn.measured:
            parts += [page.element("h2", f"Record: {part.what}")]
            parts += provenance(part.run, part.machine, part.source, drawn.method)
    return [*parts, "</section>"]


def page_html(drawn: Drawn) -> str:
    """A page of its own, self-contained."""
    head = ["<header>", page.element("h1", "LLM in a flash, table by table"), "</header>", "<main>"]
    return page.page(drawn.title, [*head, *body(drawn), "</main>"])


def index_html(all_drawn: Iterable[Drawn], missing: Mapping[str, str]) -> str:
    """Every table on one page; `missing`: why the others are not there, by title."""
    shown = list(all_drawn)
    links = "".join(
        f'<li><a href="#{html.escape(d.files, quote=True)}">{html.escape(d.title)}</a>: {html.escape(d.headline)}</li>'
        for d in shown
    )
    parts = ["<header>", page.element("h1", "The tables and figures of the paper, on this machine"), "</header>"]
    parts += ["<main>", f"<ul>{links}</ul>"]
    parts += [part for d in shown for part in body(d, full=False)]
    if missing:
        parts += [page.element("h2", "Not measured"), page.bullets(f"{k}: {why}" for k, why in missing.items())]
    return page.page("LLM in a flash: tables and figures on this machine", [*parts, "</main>"])


def index_markdown(all_drawn: Iterable[Drawn], missing: Mapping[str, str]) -> str:
    """A list of every table, with what was found, and of those that were not measured."""
    parts = ["# The tables and figures of the paper, on this machine", ""]
    for d in all_drawn:
        mark = " (synthetic weights)" if d.synthetic else ""
        parts.append(f"- [{plain(d.title)}]({d.files}.md){mark}: {plain(d.headline)}")
    if missing:
        parts += ["", "Not measured:", "", *(f"- {plain(k)}: {plain(why)}" for k, why in missing.items())]
    return "\n".join(parts) + "\n"


def command_of(name: str, records: Iterable[str | Path]) -> str:
    """The command that draws it again from its records."""
    return shlex.join(["workbench", "tables", name, *(part for path in records for part in ("--record", str(path)))])


def beside(here: str, theirs: str) -> str:
    """'4.8× here, 4.8× in the paper', or only what there is."""
    if theirs == NONE:
        return f"{here} here"
    return f"{here} here, {theirs} in the paper"


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
