"""What a text is, in a few lines: source, files, documents, tokens, digest."""

from __future__ import annotations

from pathlib import Path

from workbench.capture.activations import tokenizer
from workbench.capture.text import DataCard
from workbench.capture.text import data_card as read_card


def data_card(data: str | Path, model: str | Path, start: int = 0, stop: int | None = None) -> DataCard:
    """Read the documents `start` to `stop` (exclusive, None: to the end) of `data`, and count them in tokens.

    A notebook shows the card as a table, `str` makes a line of it. DataError, CheckpointError as for reading either.
    """
    return read_card(data, tokenizer(model), start, stop)
