"""Token windows packed from documents, positions to come back to, and a card of what was read.

Documents come from `workbench.capture.sources`, which says what a source can be.
"""

from __future__ import annotations

import hashlib
import html
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from workbench.capture.sources import documents, files, source_files, source_identity, source_name
from workbench.errors import DataError

__all__ = [
    "DataCard",
    "TokenStream",
    "data_card",
    "documents",
    "encode",
    "end_of_text",
    "files",
    "hash_of",
    "source_identity",
    "source_name",
    "split_of",
    "token_windows",
    "windows_and_card",
]

ENCODE_DOCUMENTS = 32  # documents tokenised in one call: enough to use the tokenizer's own threads
T = TypeVar("T")
AHEAD = 8  # such calls that a stream may be ahead of its reader
BETWEEN_DOCUMENTS = "<|endoftext|>"


@dataclass
class DataCard:
    """What was read: `sha256` is a chain over the documents, sha256(previous + sha256(text)), "" before the first.

    `files`: local files that the source consists of, 0 where it is streamed.
    """

    source: str
    documents: int = 0
    tokens: int = 0
    sha256: str = ""
    files: int = 0

    def add(self, text: str, tokens: int) -> None:
        """Count one document of so many tokens (end of document not counted)."""
        link = bytes.fromhex(self.sha256) + hashlib.sha256(text.encode()).digest()
        self.sha256 = hashlib.sha256(link).hexdigest()
        self.documents += 1
        self.tokens += tokens

    def as_dict(self) -> dict[str, Any]:
        """For a JSON card."""
        return asdict(self)

    @classmethod
    def of(cls, source: str | Path) -> DataCard:
        """The card of a source of which nothing was read yet. DataError when it is not there."""
        return cls(source_name(source), files=len(source_files(source)))

    def __str__(self) -> str:
        """One line."""
        return ", ".join(f"{name} {value}" if name != "source" else value for name, value in self._facts())

    def _repr_html_(self) -> str:
        """For notebooks."""
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(value)}"
            "</td></tr>"
            for name, value in self._facts()
        )
        return f"<table>{cells}</table>"

    def _facts(self) -> list[tuple[str, str]]:
        return [
            ("source", self.source),
            ("files", str(self.files) if self.files else "streamed"),
            ("documents", f"{self.documents:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("SHA-256 chain", self.sha256[:16] or "nothing read"),
        ]


def data_card(source: str | Path, tokenizer: Any, start: int = 0, stop: int | None = None) -> DataCard:
    """Read the documents and count them: documents, tokens, SHA-256 of what was read."""
    card = DataCard.of(source)
    for texts in _batches(documents(source, start, stop), ENCODE_DOCUMENTS):
        for text, ids in zip(texts, encode(tokenizer, texts), strict=True):
            card.add(text, len(ids))
    return card


def hash_of(text: str) -> bytes:
    """SHA-256 of a document, which finds it again wherever it stands."""
    return hashlib.sha256(text.encode()).digest()


def split_of(text: str, validation_share: float) -> str:
    """Which part a document belongs to, by its own hash: 'train', or 'calibrate' / 'test' (half of the share each).

    The same text is in the same part wherever it stands, so duplicates never leak from training into validation.
    """
    place = int.from_bytes(hash_of(text)[:8], "big") / 2**64
    if place >= validation_share:
        return "train"
    return "calibrate" if place < validation_share / 2 else "test"


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def token_windows(docs: Iterable[str], tokenizer: Any, length: int) -> Iterator[np.ndarray]:
    """Windows int64 [length], packed across documents, end-of-text token after each; a short rest is dropped."""
    eos = end_of_text(tokenizer)
    pending: list[int] = []
    for texts in _batches(docs, ENCODE_DOCUMENTS):
        for ids in encode(tokenizer, texts):
            pending += [*ids, eos] if ids else []
        whole = len(pending) // length * length
        for first in range(0, whole, length):
            yield np.asarray(pending[first : first + length], dtype=np.int64)
        pending = pending[whole:]


def end_of_text(tokenizer: Any) -> int:
    """The token put between documents: <|endoftext|> where there is one, else the end-of-text token.

    A chat model's own ends a turn, and is not what it saw between documents. DataError when the tokenizer has none.
    """
    between = tokenizer.convert_tokens_to_ids(BETWEEN_DOCUMENTS)
    if between is not None and tokenizer.convert_ids_to_tokens(between) == BETWEEN_DOCUMENTS:
        return int(between)
    if tokenizer.eos_token_id is None:
        raise DataError("tokenizer: it has no end-of-text token; set eos_token in tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def _batches(docs: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(docs)
    while batch := list(islice(iterator, size)):
        yield batch


def windows_and_card(
    source: str | Path,
    tokenizer: Any,
    length: int,
    count: int,
    keep: Callable[[str], bool] = lambda text: True,
) -> tuple[list[np.ndarray], DataCard]:
    """At most `count` windows int64 [length] from the start of `source`, of the documents that `keep` accepts, and the
    card of those read for them (whole documents, 32 at a time)."""
    stream = TokenStream(source, tokenizer, length, keep)
    return list(islice(stream, count)), stream.card


@dataclass(frozen=True)
class _Chunk:
    """Windows of some documents, the place where they begin, and what had been read at their end."""

    place: dict[str, Any]
    windows: np.ndarray
    card: DataCard
    round: int


class TokenStream:
    """Token windows of the documents that `keep` accepts, with a position that can be saved and returned to.

    `loop` starts the source again at its end, so that a token budget may exceed the text. `card` counts what the
    first round read. `position()` and `seek()` make a stopped run go on with the very next window. With `ahead` a
    thread reads and tokenises while the windows before are used; what is given out does not depend on it. `close()`
    ends the thread: until then the tokenizer is the stream's alone.
    """

    def __init__(
        self,
        source: str | Path,
        tokenizer: Any,
        length: int,
        keep: Callable[[str], bool],
        *,
        loop: bool = False,
        ahead: bool = False,
    ) -> None:
        self.source, self.tokenizer, self.length, self.keep, self.loop = source, tokenizer, length, keep, loop
        self._eos = end_of_text(tokenizer)
        self._ahead = ahead
        self._chunks: Iterator[_Chunk] | _Ahead[_Chunk] | None = None
        start = {"round": 0, "document": 0, "pending": [], "card": DataCard.of(source).as_dict()}
        self._begin(start)

    def _begin(self, place: dict[str, Any]) -> None:
        self.close()
        self._place, self._used = place, 0
        self._windows = np.empty((0, self.length), np.int64)
        self.card, self.round = DataCard(**place["card"]), place["round"]

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        if self._chunks is None:
            chunks = self._read(self._place)
            self._chunks = _Ahead(chunks, AHEAD) if self._ahead else chunks
        while self._used == len(self._windows):
            chunk = next(self._chunks)
            self._place, self._windows, self.card, self.round = chunk.place, chunk.windows, chunk.card, chunk.round
            self._used = 0
        self._used += 1
        return self._windows[self._used - 1]

    def _read(self, place: dict[str, Any]) -> Iterator[_Chunk]:
        """Documents to windows from a place on; a document's tokens that fill no window wait for the next ones."""
        turn, document, pending = place["round"], place["document"], list(place["pending"])
        card = DataCard(**place["card"])
        batches = _batches(documents(self.source, document), ENCODE_DOCUMENTS)
        while True:
            place = {"round": turn, "document": document, "pending": pending, "card": card.as_dict()}
            batch = next(batches, None)
            if batch is None:
                if not self.loop or card.tokens + card.documents < self.length:  # no window even of all of it
                    return
                turn, document = turn + 1, 0
                batches = _batches(documents(self.source), ENCODE_DOCUMENTS)
                continue
            document += len(batch)
            texts = [text for text in batch if self.keep(text)]
            tokens = list(pending)
            for text, ids in zip(texts, encode(self.tokenizer, texts) if texts else [], strict=True):
                tokens += [*ids, self._eos] if ids else []
                if turn == 0:
                    card.add(text, len(ids))
            whole = len(tokens) // self.length * self.length
            windows = np.asarray(tokens[:whole], dtype=np.int64).reshape(-1, self.length)
            pending = tokens[whole:]
            yield _Chunk(place, windows, DataCard(**card.as_dict()), turn)

    def position(self) -> dict[str, Any]:
        """JSON-ready: a round, a document, tokens before it that filled no window, what the card counted until there,
        and how many windows were given out since."""
        return {**self._place, "used": self._used}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position()` was taken."""
        self._begin({name: value for name, value in position.items() if name != "used"})
        for _ in range(position["used"]):
            next(self)

    def close(self) -> None:
        """End the thread that reads ahead. The stream can only be read again after `seek`."""
        if isinstance(self._chunks, _Ahead):
            self._chunks.close()
        self._chunks = None


class _Ahead(Generic[T]):
    """An iterator that a thread runs, at most `depth` items ahead of the reader. `close` ends the thread."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put("item", item):
                    return
            self._put("end", None)
        except BaseException as error:  # raised where the reader is
            self._put("error", error)

    def _put(self, kind: str, value: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put((kind, value), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        kind, value = self._ready.get()
        if kind == "item":
            return value
        self._ready.put((kind, value))  # so that it is met again
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """End the thread and wait for it."""
        self._closed.set()
        self._thread.join()
