"""Documents from C4-style files, plain text or the streamed C4 corpus, and token windows packed from them.

A source is a file, a directory of files (read in name order), the word `c4` (allenai/c4, streamed through the
`datasets` library) or `c4:PATH` (the same, from local shards in C4's layout). Files are `.json.gz`, `.jsonl.gz`,
`.jsonl` or `.json` with one JSON object a line that has a `text` field (C4's own layout), or plain text, whose
paragraphs are gathered into documents of at least 2,000 characters. Whatever cannot be read raises `DataError`
that names file and line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from workbench.errors import DataError

JSON_LINES = (".json.gz", ".jsonl.gz", ".jsonl", ".json")
PLAIN_TEXT = (".txt", ".txt.gz", ".text", ".md")
PARAGRAPH_CHARACTERS = 2000
ENCODE_DOCUMENTS = 32  # documents tokenised in one call: enough to use the tokenizer's own threads
T = TypeVar("T")
AHEAD = 8  # such calls that a stream may be ahead of its reader
BETWEEN_DOCUMENTS = "<|endoftext|>"
EDGE_BYTES = 64 << 10  # of each file's two ends, hashed to tell one source from another without reading it whole


def documents(source: str | Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """The documents `start` to `stop` (exclusive, None: to the end) of `source`, in order.

    Raises DataError: no such source, an unknown layout, damaged gzip, a line that is not JSON, no `text` field.
    """
    if _is_c4(source):
        return _streamed(source, start, stop)
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


def _is_c4(source: str | Path) -> bool:
    return str(source) == "c4" or str(source).startswith("c4:")


def _shards(source: str | Path) -> list[Path]:
    """The local shards of `c4:PATH`; none for `c4`."""
    if str(source) == "c4":
        return []
    found = files(str(source)[3:])
    for path in found:
        if not path.name.endswith(JSON_LINES):
            raise DataError(f"{source}: {path.name} is not in C4's layout; give .json.gz or .jsonl shards")
    return found


def _streamed(source: str | Path, start: int, stop: int | None) -> Iterator[str]:
    shards = _shards(source)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"{source}: the `datasets` library is not installed; pip install 'flash-workbench[data]', or give a local "
            "file"
        ) from error
    try:
        if shards:
            rows: Any = load_dataset("json", data_files=[str(p) for p in shards], split="train", streaming=True)
        else:
            rows = load_dataset("allenai/c4", "en", split="train", streaming=True)
        rows = rows.skip(start)
        for row in rows if stop is None else rows.take(max(0, stop - start)):
            yield row["text"]
    except Exception as error:  # the library raises its dependencies' own network errors, of many classes
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{source}: could not be streamed ({first}); give a local C4 shard by its own name instead"
        ) from error


def source_identity(source: str | Path) -> dict[str, Any]:
    """What tells one source from another without reading it whole: name, files, bytes, a digest of each file's ends."""
    if str(source) == "c4":
        return {"source": "c4", "files": 0, "bytes": 0, "sha256": ""}
    digest = hashlib.sha256()
    paths = _shards(source) if _is_c4(source) else files(source)
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
    return {"source": source_name(source), "files": len(paths), "bytes": total, "sha256": digest.hexdigest()}


def source_name(source: str | Path) -> str:
    """What cards call a source: the last part of its path, with `c4:` where it is streamed."""
    return "c4:" + Path(str(source)[3:]).name if str(source).startswith("c4:") else Path(source).name


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
    card = DataCard(source_name(source))
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
        start = {"round": 0, "document": 0, "pending": [], "card": DataCard(source_name(source)).as_dict()}
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
