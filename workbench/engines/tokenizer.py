"""The tokenizer that a store brings, and text made from tokens one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.errors import DataError
from workbench.flash.store import Store

INCOMPLETE = "\ufffd"
LONGEST_CHARACTER = 16
"""Tokens after which a character that is still not complete is shown as it is: UTF-8 has at most four bytes."""


def store_tokenizer(store: Store) -> Any:
    """The tokenizer that lies in a store. DataError when there is none."""
    if store.tokenizer_path is None:
        raise DataError(f"{store.path}: it has no tokenizer; convert a checkpoint that has tokenizer.json")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(store.tokenizer_path, trust_remote_code=False)


class TextStream:
    """The text that each next token adds, at the same cost for the thousandth as for the first.

    A token is decoded with those before it, since a space or a character may be spread over several; only those
    that are not yet settled are kept.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        self.ids: list[int] = []
        self.shown = 0  # of `ids`, tokens whose text has been given out; they are context for the next

    def push(self, token: int) -> str:
        """The text that this token completes: '' while a character is not complete."""
        self.ids.append(token)
        before, whole = self.decode(self.ids[: self.shown]), self.decode(self.ids)
        waiting = len(self.ids) - self.shown
        if whole.endswith(INCOMPLETE) and waiting < LONGEST_CHARACTER:
            return ""
        if len(whole) > len(before):
            self.ids, self.shown = self.ids[self.shown :], waiting
            return whole[len(before) :]
        # a token without text of its own, such as the end of a text: no context for what follows
        self.ids = self.ids[: self.shown]
        return ""
