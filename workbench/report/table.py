"""A small table model and its renderers: terminal, Markdown, HTML, LaTeX.

A table is made of blocks, one a row of the experiment. A block has a line of measured values and,
under it, lines such as 'p95' and 'paper', so that both stand in the same column. Cells are text already
formatted with their unit or under a head that states it; no renderer shortens a cell.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

Kind = Literal["measured", "p95", "paper"]
_STYLE: dict[Kind, str] = {"measured": "bold", "p95": "", "paper": "cyan"}
_LATEX = {"&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}", "\\": r"\textbackslash{}"}
_LATEX |= {"×": r"$\times$", "–": "--", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


# In a notebook the page's own colours stay, so that it is legible in its light and its dark theme.
_NOTEBOOK = """
.workbench figure { margin: 0; } .workbench figcaption { font-weight: 600; margin-bottom: .4em; }
.workbench .scroll { overflow-x: auto; }
.workbench table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0; }
.workbench td, .workbench tbody th { white-space: nowrap; }
.workbench th, .workbench td { text-align: right; padding: .15em .5em; }
.workbench th:first-child { text-align: left; } .workbench thead th { vertical-align: bottom; }
.workbench .unit { display: block; font-weight: 400; font-size: .9em; opacity: .75; }
.workbench tbody th { font-weight: 400; } .workbench tr.measured th { font-weight: 600; }
.workbench tr.p95 { opacity: .75; } .workbench tr.paper { font-style: italic; opacity: .85; }
.workbench tr.p95 th, .workbench tr.paper th { padding-left: 1.5em; }
.workbench .notes { font-size: .85em; opacity: .8; padding-left: 1.2em; margin: .5em 0 0; max-width: 60em; }
"""


@dataclass(frozen=True)
class Column:
    """`unit` is the second line of the head. Columns of one `group` stay together where the table has to
    be split; the highest `rank` goes first where even that is too wide, and rank 0 never goes."""

    key: str
    head: str
    unit: str = ""
    group: int = 0
    rank: int = 0

    @property
    def title(self) -> str:
        return f"{self.head} {self.unit}".strip()


@dataclass(frozen=True)
class Line:
    """One line of a block: its label and its cells by column key; a missing cell is empty."""

    kind: Kind
    label: str
    cells: Mapping[str, str]

    def cell(self, key: str) -> str:
        return self.cells.get(key, "")


@dataclass(frozen=True)
class Table:
    """`head` names the column of labels; `notes` are whole sentences printed below."""

    title: str
    head: str
    columns: tuple[Column, ...]
    blocks: tuple[tuple[Line, ...], ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[Line]:
        """Every line, block after block."""
        for block in self.blocks:
            yield from block

    def _repr_html_(self) -> str:
        """How a notebook shows the table."""
        return f'<div class="workbench"><style>{_NOTEBOOK}</style>{to_html(self)}</div>'

    def keep(self, columns: tuple[Column, ...]) -> Table:
        """The same table with these columns only."""
        return replace(self, columns=columns)


class _Fitted:
    """Draws a table at the width the console has: whole, else one part a group, else without its least
    important columns, which are then named below."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, width = self.table, options.max_width
        groups = sorted({c.group for c in table.columns})
        parts = [table] if len(groups) < 2 or _width(table) <= width else [_group(table, g) for g in groups]
        yield Text(table.title, style="bold")
        gone: list[Column] = []
        for part in parts:
            part, dropped = _narrow(part, width)
            gone += dropped
            yield _rich(part)
        notes = list(table.notes)
        if gone:
            names = ", ".join(c.title for c in gone)
            notes.insert(0, f"Not shown at {width} columns: {names}. A wider terminal or the report shows them.")
        for note in notes:
            yield Text(note, style="italic" if note.startswith("Not shown") else "")


def to_rich(table: Table) -> _Fitted:
    """A renderable for `rich.console.Console.print`; it fits itself to the console's width."""
    return _Fitted(table)


def _group(table: Table, group: int) -> Table:
    return table.keep(tuple(c for c in table.columns if c.group == group))


def _narrow(table: Table, width: int) -> tuple[Table, list[Column]]:
    """Drops whole columns, highest rank first, until the table fits; returns what is gone, in order."""
    kept = list(table.columns)
    while _width(table.keep(tuple(kept))) > width and any(c.rank for c in kept):
        kept.remove(max(kept, key=lambda c: c.rank))
    return table.keep(tuple(kept)), [c for c in table.columns if c not in kept]


def _width(table: Table) -> int:
    return Console(width=10_000).measure(_rich(table)).maximum


def _rich(table: Table) -> RichTable:
    rich = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold", collapse_padding=True)
    # Numbers wrap in a terminal too narrow for even the first columns: longer to read, never cut.
    rich.add_column(table.head, vertical="bottom", overflow="fold")
    for c in table.columns:
        rich.add_column(
            f"{c.head}\n{c.unit}" if c.unit else c.head, justify="right", vertical="bottom", overflow="fold"
        )
    for line in table.lines():
        if line.kind != "measured" and not any(line.cell(c.key) for c in table.columns):
            continue  # a part of a split table needs no p95 line where none of its columns has one
        label = line.label if line.kind == "measured" else f"  {line.label}"
        cells = [Text(line.cell(c.key)) for c in table.columns]
        if line.kind == "measured" and any(len(block) > 1 for block in table.blocks):
            rich.add_section()
        rich.add_row(Text(label), *cells, style=_STYLE[line.kind])
    return rich


def to_markdown(table: Table) -> str:
    """A GitHub table, with the notes as a list below."""
    rows = [[table.head, *(c.title for c in table.columns)]]
    rows.append([":--", *("--:" for _ in table.columns)])
    for line in table.lines():
        label = f"**{_pipe(line.label)}**" if line.kind == "measured" else f"– {_pipe(line.label)}"
        rows.append([label, *(_pipe(line.cell(c.key)) for c in table.columns)])
    text = [f"**{table.title}**", "", *("| " + " | ".join(row) + " |" for row in rows)]
    if table.notes:
        text += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(text) + "\n"


def _pipe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def to_html(table: Table) -> str:
    """A <figure> with a table, one <tbody> a block, and the notes as a list. All text is escaped."""
    out = ['<figure class="table">', f"<figcaption>{html.escape(table.title)}</figcaption>"]
    out.append('<div class="scroll"><table>')
    head = "".join(
        f'<th scope="col">{html.escape(c.head)}<span class="unit">{html.escape(c.unit)}</span></th>'
        for c in table.columns
    )
    out.append(f'<thead><tr><th scope="col">{html.escape(table.head)}</th>{head}</tr></thead>')
    for block in table.blocks:
        out.append("<tbody>")
        for line in block:
            cells = "".join(f"<td>{html.escape(line.cell(c.key))}</td>" for c in table.columns)
            out.append(f'<tr class="{line.kind}"><th scope="row">{html.escape(line.label)}</th>{cells}</tr>')
        out.append("</tbody>")
    out.append("</table></div>")
    if table.notes:
        out.append('<ul class="notes">' + "".join(f"<li>{html.escape(note)}</li>" for note in table.notes) + "</ul>")
    return "\n".join([*out, "</figure>"])


def to_latex(table: Table) -> str:
    r"""A `table*` for booktabs, scaled to the page (needs \usepackage{booktabs,graphicx})."""
    heads = [table.head, *(c.head for c in table.columns)]
    units = ["", *(c.unit for c in table.columns)]
    out = [r"\begin{table*}", r"\centering", rf"\caption{{{_latex(table.title)}}}", r"\resizebox{\textwidth}{!}{%"]
    out += [rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
    out += [" & ".join(map(_latex, heads)) + r" \\", " & ".join(map(_latex, units)) + r" \\"]
    for block in table.blocks:
        out.append(r"\midrule")
        for line in block:
            label = _latex(line.label) if line.kind == "measured" else rf"\quad {_latex(line.label)}"
            out.append(" & ".join([label, *(_latex(line.cell(c.key)) for c in table.columns)]) + r" \\")
    out += [r"\bottomrule", r"\end{tabular}}"]
    if table.notes:
        notes = " ".join(_latex(note) for note in table.notes)
        out.append(rf"\par\smallskip\parbox{{\textwidth}}{{\footnotesize {notes}}}")
    return "\n".join([*out, r"\end{table*}"]) + "\n"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
