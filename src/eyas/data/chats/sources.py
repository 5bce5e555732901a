"""Sources of chats: JSON Lines, JSON and Parquet files, folders of them, data sets by name, Python's standard library.

Rows are read one at a time and identified by file and line. A row that can't be read, or isn't a chat, is yielded as an
error, which the caller counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from eyas.config import StrictModel, validated
from eyas.data.chats.layouts import LAYOUTS, read_layout
from eyas.errors import ConfigError, DataError, RowError
from eyas.text.chats import Chat

STDLIB = "stdlib"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
BAD_TOKENS = "bad tokens or answers"
BROKEN_TEXT = "broken UTF-8"
BROKEN_JSON = "not JSON"
BROKEN_FILE = "unreadable file"
_BATCH = 256  # Parquet rows in memory
_HUB = "hf:"
_ID_KEYS = ("id", "question_id", "conversation_id", "prompt_id", "uuid")
_SAVED = ("state.json", "dataset_dict.json")  # what `Dataset.save_to_disk` leaves


class ChatSource(StrictModel):
    """One part of the blend, written `LOCATION[,key=value...]`."""

    location: str = Field(alias="place")
    """A path, the name of a data set, or `stdlib`; the key `place` of a report."""
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The source's share of the blend, relative to the other weights; None: as many chats as it has."""
    layout: str | None = None
    split: str = "train"
    subset: str | None = None
    name: str = Field(min_length=1, pattern=r"^[^:\s]+$")
    """The prefix of its chats' ids, and the source's name in the report."""

    @property
    def path(self) -> Path | None:
        """The local file or folder; None for the standard library and for what the `datasets` library reads."""
        path = Path(self.location)
        if self.location == STDLIB or self.location.startswith(_HUB) or not path.exists() or _is_saved(path):
            return None
        return path


class SourceChat(NamedTuple):
    """A chat with where it was read from, or the reason why the row isn't a chat."""

    where: str
    """`file:line`, `dataset/split:row`, or the name of a module of the standard library."""
    chat: Chat | RowError


def parse_source(text: str) -> ChatSource:
    """Parse `LOCATION[,weight=2][,layout=...][,split=...][,subset=...][,name=...]`. Raises ConfigError."""
    location, *pairs = text.split(",")
    values: dict[str, Any] = {"place": location, "name": _default_name(location)}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key == "place":
            raise ConfigError(f"source {text!r}: {pair!r} is not key=value")
        values[key] = value
    source = validated(ChatSource, values, f"source {text!r}")
    if source.layout is not None and source.layout not in LAYOUTS:
        raise ConfigError(f"source {text!r}: unknown layout {source.layout!r}: use one of {', '.join(LAYOUTS)}")
    looks_local = location.startswith((".", "/", "~")) or location.endswith(SUFFIXES)
    if looks_local and not Path(location).exists():
        raise ConfigError(f"source {text!r}: there is no file or folder {location}")
    if (source.path is not None or location == STDLIB) and (source.subset is not None or "split" in values):
        raise ConfigError(f"source {text!r}: split and subset are for data sets by name, which {location} is not")
    return source


def _default_name(location: str) -> str:
    path = Path(location.removeprefix(_HUB))
    return (path.stem if path.suffix in SUFFIXES else path.name).replace(":", "-").replace(" ", "-") or "source"


def _is_saved(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _SAVED)


def chats_of_source(source: ChatSource) -> Iterator[SourceChat]:
    """Every chat of a source. Its id is `source:id` with the row's own id or, without one, a hash of the content."""
    if source.location == STDLIB:
        yield from _library(source)
        return
    for row in _rows(source):
        try:
            yield SourceChat(row.where, _chat(row, source))
        except RowError as error:
            yield SourceChat(row.where, error)


def _library(source: ChatSource) -> Iterator[SourceChat]:
    from eyas.data.chats.stdlib import chats_of, library_modules

    for module in library_modules():
        for chat in chats_of(module):
            yield SourceChat(module.name, chat.model_copy(update={"id": f"{source.name}:{chat.id}"}))


def _rows(source: ChatSource) -> Iterator[SourceRow]:
    if source.path is None:
        yield from _dataset(source)
        return
    for file in files_of(source.path):
        yield from read_rows(file)


def _chat(row: SourceRow, source: ChatSource) -> Chat:
    if isinstance(row.value, RowError):
        raise row.value
    messages, tools = read_layout(row.value, source.layout)
    own = next((str(row.value[key]) for key in _ID_KEYS if row.value.get(key) not in (None, "")), None)
    content = json.dumps([own, [vars(m) for m in messages], tools], sort_keys=True, ensure_ascii=False, default=vars)
    try:
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    except UnicodeEncodeError as error:
        raise RowError(BROKEN_TEXT, "the row holds a lone surrogate (half a character)") from error
    chat = Chat(id=f"{source.name}:{own or digest}", messages=tuple(messages), tools=tools)
    tokens, answers = row.value.get("tokens"), row.value.get("answers")
    if tokens is None or answers is None:
        return chat
    try:
        return Chat.model_validate(chat.model_dump() | {"tokens": tokens, "answers": answers})
    except ValidationError as error:
        raise RowError(BAD_TOKENS, str(error.errors()[0]["msg"])) from error


def _dataset(source: ChatSource) -> Iterator[SourceRow]:
    """Rows of a data set by name, streamed, or of a folder written by `Dataset.save_to_disk`."""
    name = source.location.removeprefix(_HUB)
    try:
        import datasets
    except ImportError:
        raise DataError(f"reading the data set {name} needs the datasets library: pip install 'eyas[data]'") from None
    try:
        if _is_saved(Path(name)):
            found = datasets.load_from_disk(name)
            rows = found[source.split] if isinstance(found, dict) else found
        else:
            rows = datasets.load_dataset(name, source.subset, split=source.split, streaming=True)
        for number, value in enumerate(rows, start=1):
            yield SourceRow(f"{name}/{source.split}:{number}", value)
    except Exception as error:  # whatever the network, the hub and the data set's builder raise
        raise DataError(
            f"can't read the data set {name} (split {source.split}): {type(error).__name__}: {error}. "
            "There is no local file or folder of that name either"
        ) from error


class SourceRow(NamedTuple):
    """The content of one row, or the reason why it can't be read."""

    where: str
    value: Any | RowError


def files_of(path: Path) -> list[Path]:
    """The file itself, or all files of a folder with a known suffix; DataError if there are none."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path} has no known suffix: use one of {', '.join(SUFFIXES)}")
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    files = [file for file in found if not _is_description(file)]
    if not files:
        raise DataError(f"{path} has no files with a known suffix ({', '.join(SUFFIXES)})")
    return files


def _is_description(file: Path) -> bool:
    """Whether a file is a report or an index that lies beside the data."""
    return file.name in {"report.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def read_rows(file: Path) -> Iterator[SourceRow]:
    """Every row of a file; a row that can't be read holds the reason instead."""
    try:
        if file.suffix == ".parquet":
            yield from _parquet(file)
        elif file.suffix == ".json" and _is_array(file):
            yield from _array(file)
        else:
            yield from _lines(file)
    except OSError as error:
        yield SourceRow(str(file), RowError(BROKEN_FILE, error.strerror or str(error)))


def _lines(file: Path) -> Iterator[SourceRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield SourceRow(f"{file}:{number}", _parsed(line))


def _parsed(line: bytes) -> Any | RowError:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError(BROKEN_TEXT, f"byte {error.start + 1} of the line is not valid UTF-8")
    except (json.JSONDecodeError, RecursionError) as error:
        return RowError(BROKEN_JSON, str(error))


def _is_array(file: Path) -> bool:
    with file.open("rb") as data:
        return data.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _array(file: Path) -> Iterator[SourceRow]:
    """The elements of a JSON array; the file is read into memory whole."""
    value = _parsed(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    if isinstance(value, RowError):
        yield SourceRow(str(file), RowError(BROKEN_FILE, str(value)))
        return
    for number, row in enumerate(value, start=1):
        yield SourceRow(f"{file}:{number}", row)


def _parquet(file: Path) -> Iterator[SourceRow]:
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
                    yield SourceRow(f"{file}:{number}", value)
    except (pyarrow.ArrowException, OSError) as error:
        yield SourceRow(f"{file}:{number + 1}", RowError(BROKEN_FILE, str(error)))
