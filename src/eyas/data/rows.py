"""Rows of JSON Lines, JSON and Parquet files, one at a time, each with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eyas.errors import DataError, RowError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
BROKEN_TEXT = "broken UTF-8"
BROKEN_JSON = "not JSON"
BROKEN_FILE = "unreadable file"

_BATCH = 256  # Parquet rows in memory


class Row(NamedTuple):
    """What one row holds, or why it can't be read."""

    where: str
    """`file:line`"""
    value: Any | RowError


def files_of(path: Path) -> list[Path]:
    """The file itself, or every file of a folder whose kind is known; DataError if there is none."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path} is of no known kind: name it {', '.join(SUFFIXES)}")
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    files = [file for file in found if not _is_description(file)]
    if not files:
        raise DataError(f"{path} has no files of a known kind ({', '.join(SUFFIXES)})")
    return files


def _is_description(file: Path) -> bool:
    """A report or index beside the data, not data."""
    return file.name in {"report.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def read_rows(file: Path) -> Iterator[Row]:
    """Every row; what can't be read is a row with the reason."""
    try:
        if file.suffix == ".parquet":
            yield from _parquet(file)
        elif file.suffix == ".json" and _is_array(file):
            yield from _array(file)
        else:
            yield from _lines(file)
    except OSError as error:
        yield Row(str(file), RowError(BROKEN_FILE, error.strerror or str(error)))


def _lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield Row(f"{file}:{number}", _parsed(line))


def _parsed(line: bytes) -> Any | RowError:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError(BROKEN_TEXT, f"byte {error.start + 1} of the line is no UTF-8")
    except (json.JSONDecodeError, RecursionError) as error:
        return RowError(BROKEN_JSON, str(error))


def _is_array(file: Path) -> bool:
    with file.open("rb") as data:
        return data.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _array(file: Path) -> Iterator[Row]:
    """One JSON array: it has to be read whole."""
    value = _parsed(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    if isinstance(value, RowError):
        yield Row(str(file), RowError(BROKEN_FILE, str(value)))
        return
    for number, row in enumerate(value, start=1):
        yield Row(f"{file}:{number}", row)


def _parquet(file: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"reading {file} needs pyarrow: pip install 'eyas[data]'") from None
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_BATCH):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{file}:{number}", value)
    except (pyarrow.ArrowException, OSError) as error:
        yield Row(f"{file}:{number + 1}", RowError(BROKEN_FILE, str(error)))
