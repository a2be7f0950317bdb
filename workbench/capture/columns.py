"""The `text` column of parquet and Arrow files, read a few rows at a time.

`pyarrow` is imported when the first such file is read; it comes with the extra `data`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.errors import DataError

PARQUET = (".parquet",)
ARROW = (".arrow",)  # as `datasets` saves to disk: Arrow's stream format
COLUMN = "text"
ROWS = 256  # decoded at a time


def row_count(path: Path) -> int:
    """Rows of the file, without decoding any. DataError: damaged, no pyarrow."""
    with _opened(path) as file:
        if path.name.endswith(PARQUET):
            return file.metadata.num_rows
        return sum(batch.num_rows for batch in file)


def column_texts(path: Path, start: int = 0) -> Iterator[str]:
    """The texts of the rows from `start` on. DataError: damaged, no column `text`, a row without a text."""
    at = 0
    with _opened(path) as file:
        schema = file.schema_arrow if path.name.endswith(PARQUET) else file.schema
        if COLUMN not in schema.names:
            raise DataError(
                f"{path}: no column {COLUMN!r} (it has {', '.join(schema.names)}); rename the one that holds the text"
            )
        for column in _parquet_columns(file, start) if path.name.endswith(PARQUET) else _arrow_columns(file):
            rows, at = at, at + len(column)
            if at <= start:
                continue
            for row, text in enumerate(column.slice(max(0, start - rows)).to_pylist(), max(start, rows)):
                if not isinstance(text, str):
                    remedy = "leave such rows out" if text is None else "store it as text"
                    raise DataError(f"{path}: row {row} has no text in column {COLUMN!r}, but {text!r:.40}; {remedy}")
                yield text


def _parquet_columns(file: Any, start: int) -> Iterator[Any]:
    """The column in parts; row groups that end before `start` are stood in for by columns of nulls, not read."""
    import pyarrow

    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if rows <= start:
            start -= rows
            yield pyarrow.nulls(rows)
            continue
        start = 0
        for batch in file.iter_batches(batch_size=ROWS, row_groups=[group], columns=[COLUMN]):
            yield batch.column(0)


def _arrow_columns(file: Any) -> Iterator[Any]:
    place = file.schema.get_field_index(COLUMN)
    for batch in file:
        for at in range(0, batch.num_rows, ROWS):
            yield batch.column(place).slice(at, ROWS)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A ParquetFile or a RecordBatchStreamReader; whatever goes wrong while it is open is a DataError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: `pyarrow` is not installed; pip install 'flash-workbench[data]', or give .json.gz or text"
        ) from error
    try:
        if path.name.endswith(PARQUET):
            with pyarrow.parquet.ParquetFile(path) as file:
                yield file
        else:
            with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as file:
                yield file
    except (pyarrow.ArrowException, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]} ({first}); download the file again") from error
