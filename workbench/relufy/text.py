"""Token windows from several texts at once, made ahead of the training by a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.capture.text import DataCard, documents, encode, end_of_text
from workbench.errors import DataError

DOCUMENTS = 64  # tokenised in one call
REMEMBERED_TOKENS = 1 << 28  # of one source kept in memory (4 bytes each), so that the next round tokenises nothing
AHEAD = 4  # batches waiting to be trained on


class TokenSource:
    """The tokens of the documents that `keep` accepts, end-of-text after each, round after round.

    The first `start` documents are left out. A whole round that fits in memory is tokenised once. `position()` and
    `seek()` make a stopped run go on with the very next token.
    """

    def __init__(self, source: str | Path, words: Any, keep: Callable[[str], bool], start: int = 0) -> None:
        self.source, self.words, self.keep, self.start = source, words, keep, start
        self.card = DataCard.of(source)
        self.round = 0
        self._document = start
        self._pending: list[np.ndarray] = []
        self._size = 0
        self._eos = end_of_text(words)
        self._remembered: list[tuple[int, np.ndarray]] | None = []  # this round's; None: it did not begin here
        self._held = 0  # tokens in it
        self._whole: list[tuple[int, np.ndarray]] | None = None  # a whole round's
        self._batches = self._read(start)

    def take(self, count: int) -> np.ndarray:
        """The next `count` tokens, int64. DataError when the source has none."""
        while self._size < count:
            self._fill()
        tokens = np.concatenate(self._pending) if len(self._pending) > 1 else self._pending[0]
        self._pending, self._size = [tokens[count:]], self._size - count
        return tokens[:count].astype(np.int64)

    def _read(self, start: int) -> Iterator[tuple[int, np.ndarray]]:
        """(next document, tokens uint32) of each batch of documents from `start` on."""
        texts = documents(self.source, start)
        at = start
        while batch := list(islice(texts, DOCUMENTS)):
            at += len(batch)
            kept = [text for text in batch if self.keep(text)]
            parts = [np.empty(0, np.uint32)]
            for text, ids in zip(kept, encode(self.words, kept) if kept else [], strict=True):
                if ids:
                    parts.append(np.asarray([*ids, self._eos], np.uint32))
                if self.round == 0:
                    self.card.add(text, len(ids))
            yield at, np.concatenate(parts)

    def _fill(self) -> None:
        found = next(self._batches, None)
        if found is None:
            if self.card.tokens == 0:
                raise DataError(
                    f"{self.source}: no text to train on after the held-out and the validation documents are set "
                    "aside; give more text, a smaller validation_share or fewer skip_documents"
                )
            if self._whole is None:
                self._whole = self._remembered
            self.round, self._document, self._remembered, self._held = self.round + 1, self.start, [], 0
            self._batches = iter(self._whole) if self._whole is not None else self._read(self.start)
            return
        self._document, tokens = found
        self._pending.append(tokens)
        self._size += len(tokens)
        if self._whole is None and self._remembered is not None:
            self._remembered.append(found)
            self._held += len(tokens)
            if self._held > REMEMBERED_TOKENS:
                self._remembered = None

    def position(self) -> dict[str, Any]:
        """Round, next document, tokens read but not yet given out (`pending`, uint32), the card so far."""
        pending = np.concatenate(self._pending) if self._pending else np.empty(0, np.uint32)
        return {"round": self.round, "document": self._document, "pending": pending, "card": self.card.as_dict()}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position()` was taken."""
        self.round, self._document = position["round"], position["document"]
        self._pending, self._size = [position["pending"]], len(position["pending"])
        self.card = DataCard(**position["card"])
        self._remembered = [] if self._document == self.start else None
        self._held, self._whole = 0, None
        self._batches = self._read(self._document)


class Mixture:
    """Windows of `length` tokens from several sources, in proportion to their weights and always in the same order."""

    def __init__(self, sources: list[TokenSource], weights: list[float], length: int) -> None:
        self.sources, self.length = sources, length
        total = sum(weights)
        self.shares = [weight / total for weight in weights]
        self.given = [0] * len(sources)

    def windows(self, count: int) -> np.ndarray:
        """int64 [count, length]."""
        return np.stack([self._window() for _ in range(count)])

    def _window(self) -> np.ndarray:
        turn = sum(self.given) + 1
        behind = [share * turn - given for share, given in zip(self.shares, self.given, strict=True)]
        chosen = behind.index(max(behind))
        self.given[chosen] += 1
        return self.sources[chosen].take(self.length)

    def position(self) -> dict[str, Any]:
        """What `seek` takes; see `TokenSource.position`."""
        return {"given": list(self.given), "sources": [source.position() for source in self.sources]}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position()` was taken."""
        self.given = list(position["given"])
        for source, at in zip(self.sources, position["sources"], strict=True):
            source.seek(at)


@dataclass
class Batch:
    """Token ids int64 [windows, length] (pinned when they go to a GPU), and the mixture's position after them."""

    ids: torch.Tensor
    position: dict[str, Any]


class Ahead:
    """Batches made ahead by a thread. Use as a context manager; an error in the thread is raised by `next`."""

    def __init__(self, mixture: Mixture, windows: int, pin: bool) -> None:
        self._mixture, self._windows, self._pin = mixture, windows, pin
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="relufy-text", daemon=True)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                ids = torch.from_numpy(self._mixture.windows(self._windows))
                item: Batch | BaseException = Batch(ids.pin_memory() if self._pin else ids, self._mixture.position())
            except BaseException as error:  # whatever it is belongs to the thread that asks
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def next(self) -> Batch:
        """The next batch, in order."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
