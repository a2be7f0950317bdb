"""Documents from C4-style files, plain text or the streamed C4 corpus, and token windows packed from them.

A source is a file, a directory of files (read in name order) or the word `c4`. Files are `.json.gz`, `.jsonl.gz`,
`.jsonl` or `.json` with one JSON object a line that has a `text` field (C4's own layout), or plain text, whose
paragraphs are gathered into documents of at least 2,000 characters. Whatever cannot be read raises `DataError`
that names file and line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import DataError

JSON_LINES = (".json.gz", ".jsonl.gz", ".jsonl", ".json")
PLAIN_TEXT = (".txt", ".txt.gz", ".text", ".md")
PARAGRAPH_CHARACTERS = 2000
ENCODE_DOCUMENTS = 32  # documents tokenised in one call: enough to use the tokenizer's own threads
EDGE_BYTES = 64 << 10  # of each file's two ends, hashed to tell one source from another without reading it whole


def documents(source: str | Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """The documents `start` to `stop` (exclusive, None: to the end) of `source`, in order.

    Raises DataError: no such source, an unknown layout, damaged gzip, a line that is not JSON, no `text` field.
    """
    if str(source) == "c4":
        return _streamed_c4(start, stop)
    return islice(_chain(files(source)), start, stop)


def files(source: str | Path) -> list[Path]:
    """The files that `source` consists of, in reading order. DataError when there are none."""
    path = Path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or directory; give C4-style .json.gz, .jsonl, a text file, or c4")
    found = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(JSON_LINES))
    if not found:
        found = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(PLAIN_TEXT))
    if not found:
        raise DataError(f"{path}: no .json.gz, .jsonl, .json or .txt file in this directory; give one that has text")
    return found


def _chain(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        yield from _json_lines(path) if path.name.endswith(JSON_LINES) else _paragraphs(path)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    damaged = (gzip.BadGzipFile, EOFError, zlib.error)  # a local outlives module globals when the interpreter ends
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as stream:
            for number, raw in enumerate(stream, 1):
                yield number, raw.decode("utf-8")
    except damaged as error:
        raise DataError(f"{path}: damaged gzip after line {number} ({error}); download the file again") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: line {number} is not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read after line {number} ({error.strerror or error})") from error


def _json_lines(path: Path) -> Iterator[str]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}: line {number} is not JSON ({error}); one JSON object a line is expected"
            ) from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{path}: line {number} has no 'text' field that is a string; C4's layout has one")
        yield text


def _paragraphs(path: Path) -> Iterator[str]:
    gathered: list[str] = []
    size = 0
    for number, line in _lines(path):
        if "\0" in line:
            raise DataError(f"{path}: line {number} holds binary data; give text, or .json.gz in C4's layout")
        if not line.strip() and size >= PARAGRAPH_CHARACTERS:
            yield "".join(gathered).strip("\n")
            gathered, size = [], 0
        else:
            gathered.append(line)
            size += len(line)
    rest = "".join(gathered).strip("\n")
    if rest.strip():
        yield rest


def _streamed_c4(start: int, stop: int | None) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            "c4: the `datasets` library is not installed; pip install 'flash-workbench[data]', or give a local file"
        ) from error
    try:
        rows = load_dataset("allenai/c4", "en", split="train", streaming=True).skip(start)
        for row in rows if stop is None else rows.take(max(0, stop - start)):
            yield row["text"]
    except Exception as error:  # the library raises its dependencies' own network errors, of many classes
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"c4: allenai/c4 could not be streamed ({first}); give a local C4 shard instead") from error


def source_identity(source: str | Path) -> dict[str, Any]:
    """What tells one source from another without reading it whole: name, files, bytes, a digest of each file's ends."""
    if str(source) == "c4":
        return {"source": "c4", "files": 0, "bytes": 0, "sha256": ""}
    digest = hashlib.sha256()
    paths = files(source)
    total = 0
    for path in paths:
        try:
            size = path.stat().st_size
            with open(path, "rb") as stream:
                head = stream.read(EDGE_BYTES)
                stream.seek(max(0, size - EDGE_BYTES))
                digest.update(f"{path.name} {size}\n".encode() + head + stream.read())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        total += size
    return {"source": Path(source).name, "files": len(paths), "bytes": total, "sha256": digest.hexdigest()}


@dataclass
class DataCard:
    """What was read: `sha256` is a chain over the documents, sha256(previous + sha256(text)), "" before the first."""

    source: str
    documents: int = 0
    tokens: int = 0
    sha256: str = ""

    def add(self, text: str, tokens: int) -> None:
        """Count one document of so many tokens (end of document not counted)."""
        link = bytes.fromhex(self.sha256) + hashlib.sha256(text.encode()).digest()
        self.sha256 = hashlib.sha256(link).hexdigest()
        self.documents += 1
        self.tokens += tokens

    def as_dict(self) -> dict[str, Any]:
        """For a JSON card."""
        return asdict(self)


def data_card(source: str | Path, tokenizer: Any, start: int = 0, stop: int | None = None) -> DataCard:
    """Read the documents and count them: documents, tokens, SHA-256 of what was read."""
    card = DataCard(Path(source).name)
    for texts in _batches(documents(source, start, stop), ENCODE_DOCUMENTS):
        for text, ids in zip(texts, encode(tokenizer, texts), strict=True):
            card.add(text, len(ids))
    return card


def split_of(text: str, validation_share: float) -> str:
    """Which part a document belongs to, by its own hash: 'train', or 'calibrate' / 'test' (half of the share each).

    The same text is in the same part wherever it stands, so duplicates never leak from training into validation.
    """
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
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
    """The token put between documents. DataError when the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise DataError("tokenizer: it has no end-of-text token; set eos_token in tokenizer_config.json")
    return int(tokenizer.eos_token_id)


def _batches(docs: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(docs)
    while batch := list(islice(iterator, size)):
        yield batch


class TokenStream:
    """Token windows of the documents that `keep` accepts, with a position that can be saved and returned to.

    `loop` starts the source again at its end, so that a token budget may exceed the text. `card` counts what the
    first round read. `position()` and `seek()` make a stopped run go on with the very next window.
    """

    def __init__(
        self, source: str | Path, tokenizer: Any, length: int, keep: Callable[[str], bool], *, loop: bool = False
    ) -> None:
        self.source, self.tokenizer, self.length, self.keep, self.loop = source, tokenizer, length, keep, loop
        self.card = DataCard(Path(source).name)
        self.round = 0
        self._next_document = 0
        self._pending: list[int] = []
        self._eos = end_of_text(tokenizer)
        self._batches = _batches(documents(source), ENCODE_DOCUMENTS)

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        while len(self._pending) < self.length:
            self._fill()
        window = np.asarray(self._pending[: self.length], dtype=np.int64)
        del self._pending[: self.length]
        return window

    def _fill(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            if not self.loop or self.card.documents == 0:
                raise StopIteration
            self.round += 1
            self._next_document = 0
            self._batches = _batches(documents(self.source), ENCODE_DOCUMENTS)
            return
        self._next_document += len(batch)
        texts = [text for text in batch if self.keep(text)]
        for text, ids in zip(texts, encode(self.tokenizer, texts) if texts else [], strict=True):
            self._pending += [*ids, self._eos] if ids else []
            if self.round == 0:
                self.card.add(text, len(ids))

    def position(self) -> dict[str, Any]:
        """JSON-ready: round, next document, tokens read but not yet given out, the card so far."""
        return {
            "round": self.round,
            "document": self._next_document,
            "pending": list(self._pending),
            "card": self.card.as_dict(),
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position()` was taken."""
        self.round, self._next_document = position["round"], position["document"]
        self._pending = list(position["pending"])
        self.card = DataCard(**position["card"])
        self._batches = _batches(documents(self.source, self._next_document), ENCODE_DOCUMENTS)
