"""Appendix G: the same prompt continued, dense and with predictors."""

from __future__ import annotations

from workbench.report.numbers import NONE, size
from workbench.report.side_by_side import (
    METHOD,
    Continuation,
    read_side_by_side,
    side_by_side_html,
    side_by_side_markdown,
)
from workbench.report.table import Column, Line, Table
from workbench.report.tables.drawn import NO_NUMBER, Drawn, Entry, Records, measured

TITLE = "Appendix G: the same prompt, dense and with predictors"
SAYS = f"Continuations of the same prompts by the model and by the model with predictors. {NO_NUMBER}"


def draw(records: Records) -> Drawn:
    """From a record of kind side_by_side."""
    record = read_side_by_side(records["side_by_side"])
    same = sum(pair.diverges_at is None for pair in record.pairs)
    columns = (
        Column("parts", "they", "greedy"),
        Column("dense_bytes", "dense, flash", "a token"),
        Column("bytes", "predicted, flash", "a token"),
        Column("dense_speed", "dense", "tokens/s"),
        Column("speed", "predicted", "tokens/s"),
    )
    blocks = []
    for number, pair in enumerate(record.pairs, 1):
        cells = {"parts": pair.same if pair.diverges_at is not None else f"are {pair.same}"}
        cells |= {"dense_bytes": size(pair.dense.flash_bytes), "bytes": size(pair.predicted.flash_bytes)}
        cells |= {"dense_speed": _speed(pair.dense), "speed": _speed(pair.predicted)}
        blocks.append((Line("measured", f"prompt {number}", cells),))
    table = Table(f"Texts: {record.run.model}, dense beside {record.name}", "prompt", columns, tuple(blocks))
    headline = (
        f"{same} of {len(record.pairs)} greedy continuations are the same, token for token, as the dense model's."
    )
    return Drawn(
        "appendix_g", TITLE, headline, SAYS, METHOD, (measured("texts", record),), (table,),
        notes=("A text has no physical floor; tables 2 and 3 have that of its tokens.",),
        extra_html=side_by_side_html(record), extra_markdown=side_by_side_markdown(record),
    )  # fmt: skip


def _speed(text: Continuation) -> str:
    return NONE if text.tokens_per_s is None else f"{text.tokens_per_s:.1f}"


ENTRY = Entry("appendix_g", TITLE, ("side_by_side",), draw, words=SAYS)
