"""Where text comes from: files, folders, parquet, data sets of the hub; documents by number, and their identity.

A source is one of

- a file: `.json.gz`, `.jsonl.gz`, `.jsonl` or `.json` with one JSON object a line that has a `text` field (C4's own
  layout); `.parquet` or `.arrow` with a column `text`; or plain text, whose paragraphs are gathered into documents of
  at least 2,000 characters;
- a folder of such files of one kind, read in name order, or a folder that `datasets` saved to disk;
- `c4` (allenai/c4:en:train, streamed through the `datasets` library), or `c4:PATH`, the same from local shards;
- `hub:NAME[:CONFIG[:SPLIT]]`, any data set that `datasets` can stream and that has a column `text`; NAME may be a
  local folder of a data set. `OWNER/NAME[:CONFIG[:SPLIT]]` means the same where there is no such path. The split is
  `train` unless it is given.

All of them give the same documents by the same numbers each time. Whatever cannot be read raises `DataError` that
names the place.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.capture.columns import ARROW, COLUMN, PARQUET, column_texts, row_count
from workbench.errors import DataError

JSON_LINES = (".json.gz", ".jsonl.gz", ".jsonl", ".json")
PLAIN_TEXT = (".txt", ".txt.gz", ".text", ".md")
KINDS = (JSON_LINES, PARQUET, ARROW, PLAIN_TEXT)
"""Of a folder, the first kind that it has is read."""
PARAGRAPH_CHARACTERS = 2000
EDGE_BYTES = 64 << 10  # of each file's two ends, hashed to tell one source from another without reading it whole
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]*){0,2}")


def documents(source: str | Path, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """The documents `start` to `stop` (exclusive, None: to the end) of `source`, in order.

    Raises DataError: no such source, an unknown layout, damaged gzip, a line that is not JSON, no `text` field.
    """
    if (stream := _stream_of(source)) is not None:
        return _sound(_streamed(stream, source, start, stop), source, start)
    found = islice(_chain(files(source), start), None if stop is None else max(0, stop - start))
    return _sound(found, source, start)


def _sound(texts: Iterator[str], source: str | Path, start: int) -> Iterator[str]:
    """The same texts. JSON can hold half of a surrogate pair, which is no text and which no tokenizer takes."""
    for number, text in enumerate(texts, start):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{source}: document {number} holds half of a surrogate pair at character {error.start}, which is not "
                "text; leave that document out"
            ) from None
        yield text


def files(source: str | Path) -> list[Path]:
    """The files that `source` consists of, in reading order. DataError when there are none."""
    path = Path(source)
    if not str(source):
        raise DataError("data: its name is empty; give a file, a folder, c4 or hub:OWNER/NAME")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(
            f"{path}: no such file or directory; give C4-style .json.gz, .jsonl, parquet, a text file, c4 or "
            "hub:OWNER/NAME"
        )
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir()))
        raise DataError(f"{path}: a saved data set with several splits ({splits}); give one of these folders")
    names = sorted(p for p in path.iterdir() if p.is_file())
    saved = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    for kind in (ARROW,) if saved else KINDS:
        if found := [p for p in names if p.name.endswith(kind)]:
            return found
    raise DataError(
        f"{path}: no .json.gz, .jsonl, .json, .parquet, .arrow or .txt file in this directory; give one that has text"
    )


def _chain(paths: list[Path], start: int) -> Iterator[str]:
    """Documents of all files from number `start` on. Rows before it are skipped by their count where a file has one."""
    for path in paths:
        if path.name.endswith(PARQUET + ARROW):
            rows = row_count(path)
            if start < rows:
                yield from column_texts(path, start)
            start = max(0, start - rows)
            continue
        for text in _json_lines(path) if path.name.endswith(JSON_LINES) else _paragraphs(path):
            if start:
                start -= 1
            else:
                yield text


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


@dataclass(frozen=True)
class _Stream:
    """What `datasets` is asked for. `shards`: of `c4:PATH`."""

    name: str
    config: str | None = None
    split: str = "train"
    shards: tuple[Path, ...] = ()

    @property
    def shown(self) -> str:
        return ":".join(
            part for part in (Path(self.name).name if self.local else self.name, self.config, self.split) if part
        )

    @property
    def local(self) -> bool:
        return Path(self.name).is_dir()


def _stream_of(source: str | Path) -> _Stream | None:
    """The data set that `source` names, where it is one that `datasets` streams."""
    text = str(source)
    if text == "c4":
        return _Stream("allenai/c4", "en")
    if text.startswith("c4:"):
        return _Stream("json", shards=tuple(_shards(text)))
    if text.startswith("hub:"):
        name, *rest = text[4:].split(":")
    elif isinstance(source, str) and _HUB.fullmatch(text) and not _is_file_name(text):
        name, *rest = text.split(":")
    else:
        return None
    if not name or len(rest) > 2 or not (Path(name).is_dir() or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)):
        raise DataError(f"{text}: not a data set's name; give hub:OWNER/NAME, hub:OWNER/NAME:CONFIG or with :SPLIT too")
    return _Stream(name, (rest[0] or None) if rest else None, (rest[1] if len(rest) > 1 else "") or "train")


def _is_file_name(text: str) -> bool:
    return Path(text).exists() or text.endswith(tuple(ending for kind in KINDS for ending in kind))


def _shards(source: str) -> list[Path]:
    """The local shards of `c4:PATH`."""
    found = files(source[3:])
    for path in found:
        if not path.name.endswith(JSON_LINES):
            raise DataError(f"{source}: {path.name} is not in C4's layout; give .json.gz or .jsonl shards")
    return found


def _streamed(stream: _Stream, source: str | Path, start: int, stop: int | None) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"{source}: the `datasets` library is not installed; pip install 'flash-workbench[data]', or give a local "
            "file"
        ) from error
    from workbench.models.hub import no_retry_lines

    try:
        with no_retry_lines():
            given: dict[str, Any] = {"data_files": [str(path) for path in stream.shards]} if stream.shards else {}
            rows: Any = load_dataset(stream.name, stream.config, split=stream.split, streaming=True, **given)
            rows = rows.skip(start)
            for at, row in enumerate(rows if stop is None else rows.take(max(0, stop - start)), start):
                if not isinstance(row.get(COLUMN), str):
                    raise DataError(
                        f"{source}: document {at} has no column {COLUMN!r} that is a text (it has {', '.join(row)}); "
                        "choose a data set or configuration that has one"
                    )
                yield row[COLUMN]
    except DataError:
        raise
    except Exception as error:  # the library raises its dependencies' own network errors, of many classes
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        missing = "no such file or directory, and it " if _HUB.fullmatch(str(source)) and str(source) != "c4" else ""
        raise DataError(
            f"{source}: {missing}could not be streamed as a data set ({first}); check its name, or give a local file"
        ) from error


def source_identity(source: str | Path) -> dict[str, Any]:
    """What tells one source from another without reading it whole: name, files, bytes, a digest of each file's ends.

    Of a streamed data set only the name is known.
    """
    paths = source_files(source)
    digest, total = hashlib.sha256(), 0
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
    known = digest.hexdigest() if paths else ""
    return {"source": source_name(source), "files": len(paths), "bytes": total, "sha256": known}


def source_files(source: str | Path) -> list[Path]:
    """The local files behind any source; none where it is streamed from the hub."""
    stream = _stream_of(source)
    if stream is None:
        return files(source)
    if stream.local:
        endings = JSON_LINES + PARQUET + ARROW + PLAIN_TEXT
        found = (path for path in Path(stream.name).rglob("*") if path.is_file() and path.name != "README.md")
        return sorted(path for path in found if path.name.endswith(endings))
    return list(stream.shards)


def source_name(source: str | Path) -> str:
    """What cards call a source: the last part of its path; `c4`, `c4:` and that part, or a data set's own name with
    its configuration and split."""
    text = str(source)
    if text == "c4":
        return text
    if text.startswith("c4:"):
        return "c4:" + Path(text[3:]).name
    stream = _stream_of(source)
    return stream.shown if stream else Path(source).name
