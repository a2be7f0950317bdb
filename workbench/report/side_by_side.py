"""Texts side by side (appendix G): the same prompt, greedy, dense and with predictors, and where they part."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from workbench.report import page
from workbench.report.html import provenance, write_file
from workbench.report.numbers import NONE, caption, size
from workbench.report.reading import _Fields, _head, _parse, _run
from workbench.report.records import Run

HERE = "▸"
"""Stands where the two texts part."""
METHOD = (
    "Both texts are greedy continuations of the same prompt by the same pipeline: dense computes every neuron, the "
    "other only those that were predicted. Bytes and tokens/s are of the tokens after the first, the prompt's own."
)


@dataclass(frozen=True)
class Continuation:
    """One text: what each of its tokens adds, and means a token after the first (None where there is only one)."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    flash_bytes: float | None
    tokens_per_s: float | None

    def split(self, at: int | None) -> tuple[str, str]:
        """The text before and from token `at`; all of it before, at None."""
        return "".join(self.pieces[:at]), "" if at is None else "".join(self.pieces[at:])


@dataclass(frozen=True)
class Pair:
    """One prompt with both texts; `diverges_at`: index of the first token that differs, None where none does."""

    prompt: str
    dense: Continuation
    predicted: Continuation
    diverges_at: int | None

    @property
    def same(self) -> str:
        """How far they agree, in words."""
        most = max(len(self.dense.tokens), len(self.predicted.tokens))
        if self.diverges_at is None:
            return f"the same {most} tokens"
        return f"part at token {self.diverges_at + 1} of {most}"


@dataclass(frozen=True)
class SideBySide:
    """A record of kind side_by_side. rate: the false-negative rate of the predictors, None for their own."""

    source: str
    machine: Mapping[str, Any]
    run: Run
    rate: float | None
    pairs: tuple[Pair, ...]

    @property
    def name(self) -> str:
        """What the second column is called."""
        return "predicted" if self.rate is None else f"predicted, {100 * self.rate:g}% missed"


def read_side_by_side(record: str | Path | Mapping[str, Any] | SideBySide) -> SideBySide:
    """A side-by-side record from a path or a parsed object. Raises RecordError, one line."""
    return record if isinstance(record, SideBySide) else _parse(record, _side_by_side)


def _side_by_side(data: Any, source: str) -> SideBySide:
    f = _head(data, source, "side_by_side")
    pairs = tuple(map(_pair, f.items("pairs")))
    record = SideBySide(source, f.mapping("machine"), _run(f), f.optional("rate"), pairs)
    f.done()
    return record


def _pair(f: _Fields) -> Pair:
    at = f.optional("diverges_at")
    dense, predicted = (_continuation(f, name) for name in ("dense", "predicted"))
    pair = Pair(f.text("prompt"), dense, predicted, None if at is None else int(at))
    f.done()
    return pair


def _continuation(pair: _Fields, name: str) -> Continuation:
    f = _Fields(pair.mapping(name), pair.source, f"{pair.where}.{name}")
    tokens, pieces = f.take("tokens"), f.take("pieces")
    if not isinstance(tokens, list) or not isinstance(pieces, list) or len(tokens) != len(pieces):
        raise f.fail("pieces", "is not a list with one text for each of `tokens`")
    found = Continuation(
        tuple(map(int, tokens)), tuple(map(str, pieces)), f.optional("flash_bytes"), f.optional("tokens_per_s")
    )
    f.done()
    return found


def _stats(text: Continuation) -> str:
    speed = NONE if text.tokens_per_s is None else f"{text.tokens_per_s:.1f}"
    return f"{len(text.tokens)} tokens, {speed} tokens/s, {size(text.flash_bytes)} a token from flash"


def side_by_side_rich(record: SideBySide) -> Group:
    """Two columns for a terminal, a block for each prompt; what follows the first difference is bold, after a mark."""
    parts: list[Any] = []
    for pair in record.pairs:
        table = RichTable(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, header_style="bold")
        for name in ("dense", record.name):
            table.add_column(name, ratio=1, overflow="fold", vertical="top")
        cells = []
        for text in (pair.dense, pair.predicted):
            before, after = text.split(pair.diverges_at)
            cell = Text(before)
            cells.append(cell if pair.diverges_at is None else cell.append(HERE, "bold red").append(after, "bold"))
        table.add_row(*cells)
        table.add_row(Text(_stats(pair.dense), "dim"), Text(_stats(pair.predicted), "dim"))
        parts += [Text.assemble(("Prompt: ", "bold"), pair.prompt), table, Text(f"They {_agree(pair)}.", "italic"), ""]
    return Group(*parts)


def _agree(pair: Pair) -> str:
    return f"are {pair.same}" if pair.diverges_at is None else pair.same


def side_by_side_markdown(record: SideBySide) -> str:
    """A table for each prompt; what follows the first difference is bold, after a mark."""
    found = []
    for pair in record.pairs:
        cells = []
        for text in (pair.dense, pair.predicted):
            before, after = (_cell(part) for part in text.split(pair.diverges_at))
            mark = "" if pair.diverges_at is None else f" **{HERE}**"
            tail = f" **{after.strip()}**" if after.strip() else ""
            cells.append(before + mark + tail)
        found += [
            f"Prompt: {_cell(pair.prompt)}", "", f"| dense | {record.name} |", "| :-- | :-- |",
            f"| {cells[0]} | {cells[1]} |", f"| {_stats(pair.dense)} | {_stats(pair.predicted)} |", "",
            f"They {_agree(pair)}.", "",
        ]  # fmt: skip
    return "\n".join(found)


def _cell(text: str) -> str:
    for mark in ("\\", "|", "*", "_", "`", "<", "["):
        text = text.replace(mark, "\\" + mark)
    return text.replace("\n", "<br>")


def side_by_side_html(record: SideBySide) -> str:
    """A two-column table for each prompt; what follows the first difference is marked. All text is escaped."""
    found = []
    for pair in record.pairs:
        cells = []
        for text in (pair.dense, pair.predicted):
            before, after = (html.escape(part).replace("\n", "<br>") for part in text.split(pair.diverges_at))
            mark = "" if pair.diverges_at is None else f"<b>{HERE}</b><mark>{after}</mark>"
            cells.append(f"<td>{before}{mark}</td>")
        found.append(
            '<figure class="texts">'
            f"<figcaption><b>Prompt:</b> {html.escape(pair.prompt)}</figcaption>"
            f'<table><thead><tr><th scope="col">dense</th><th scope="col">{html.escape(record.name)}</th></tr></thead>'
            f'<tbody><tr>{"".join(cells)}</tr><tr class="stats"><td>{html.escape(_stats(pair.dense))}</td>'
            f"<td>{html.escape(_stats(pair.predicted))}</td></tr></tbody></table>"
            f"<p>They {html.escape(_agree(pair))}.</p></figure>"
        )
    return "\n".join(found)


def write_side_by_side(out_dir: str | Path, record: str | Path | Mapping[str, Any] | SideBySide) -> list[Path]:
    """Writes side_by_side.html and side_by_side.md into `out_dir`; returns their paths, the page first."""
    read = read_side_by_side(record)
    body = ["<header>", page.element("h1", "The same prompt, dense and with predictors")]
    if read.run.synthetic:
        body.append(page.element("div", "synthetic weights: the text means nothing", "badge"))
    body += [page.element("p", caption(read.run, read.machine), "meta"), "</header>", "<main>", side_by_side_html(read)]
    parts = provenance(read.run, read.machine, read.source, METHOD)
    text = page.page(f"Dense and predicted: {read.run.model}", [*body, *parts, "</main>"])
    files = {"side_by_side.html": text.encode("utf-8"), "side_by_side.md": side_by_side_markdown(read).encode("utf-8")}
    return [write_file(Path(out_dir), name, content) for name, content in files.items()]
