"""Where chats come from: files and folders, data sets by name, Python's own library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from eyas.config import StrictModel, validated
from eyas.data.chats import Chat
from eyas.data.layouts import LAYOUTS, read_layout
from eyas.data.rows import BROKEN_TEXT, SUFFIXES, Row, files_of, read_rows
from eyas.errors import ConfigError, DataError, RowError

STDLIB = "stdlib"
BAD_TOKENS = "bad tokens or answers"
_HUB = "hf:"
_ID_KEYS = ("id", "question_id", "conversation_id", "prompt_id", "uuid")
_SAVED = ("state.json", "dataset_dict.json")  # what `Dataset.save_to_disk` leaves


class Source(StrictModel):
    """One part of the blend; written `PLACE[,key=value...]`."""

    place: str
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Share of the chats, relative to the other sources'."""
    layout: str | None = None
    split: str = "train"
    subset: str | None = None
    name: str = Field(min_length=1, pattern=r"^[^:\s]+$")
    """Goes before its chats' ids."""

    @property
    def path(self) -> Path | None:
        """The file or folder, if it is one on this machine that is read without `datasets`."""
        path = Path(self.place)
        if self.place == STDLIB or self.place.startswith(_HUB) or not path.exists() or _is_saved(path):
            return None
        return path


class Found(NamedTuple):
    """A chat or why there is none, and where."""

    where: str
    chat: Chat | RowError


def parse_source(text: str) -> Source:
    """`PLACE[,weight=2][,layout=...][,split=...][,subset=...][,name=...]`; ConfigError says what is wrong."""
    place, *pairs = text.split(",")
    values: dict[str, Any] = {"place": place, "name": _default_name(place)}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key == "place":
            raise ConfigError(f"source {text!r}: {pair!r} is not key=value")
        values[key] = value
    source = validated(Source, values, f"source {text!r}")
    if source.layout is not None and source.layout not in LAYOUTS:
        raise ConfigError(f"source {text!r}: unknown layout {source.layout!r}: write {', '.join(LAYOUTS)}")
    looks_local = place.startswith((".", "/", "~")) or place.endswith(SUFFIXES)
    if looks_local and not Path(place).exists():
        raise ConfigError(f"source {text!r}: there is no file or folder {place}")
    if (source.path is not None or place == STDLIB) and (source.subset is not None or "split" in values):
        raise ConfigError(f"source {text!r}: split and subset are for data sets, {place} has none")
    return source


def _default_name(place: str) -> str:
    path = Path(place.removeprefix(_HUB))
    return (path.stem if path.suffix in SUFFIXES else path.name).replace(":", "-").replace(" ", "-") or "source"


def _is_saved(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in _SAVED)


def chats_of_source(source: Source) -> Iterator[Found]:
    """Every chat, ids namespaced by the source's name: the row's own id, or a hash of what it says."""
    if source.place == STDLIB:
        yield from _library(source)
        return
    for row in _rows(source):
        try:
            yield Found(row.where, _chat(row, source))
        except RowError as error:
            yield Found(row.where, error)


def _library(source: Source) -> Iterator[Found]:
    from eyas.data.stdlib_corpus import chats_of, sources

    for module in sources():
        for chat in chats_of(module):
            yield Found(module.name, chat.model_copy(update={"id": f"{source.name}:{chat.id}"}))


def _rows(source: Source) -> Iterator[Row]:
    if source.path is None:
        yield from _dataset(source)
        return
    for file in files_of(source.path):
        yield from read_rows(file)


def _chat(row: Row, source: Source) -> Chat:
    if isinstance(row.value, RowError):
        raise row.value
    messages, tools = read_layout(row.value, source.layout)
    own = next((str(row.value[key]) for key in _ID_KEYS if row.value.get(key) not in (None, "")), None)
    told = json.dumps([own, [vars(m) for m in messages], tools], sort_keys=True, ensure_ascii=False, default=vars)
    try:
        digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    except UnicodeEncodeError as error:
        raise RowError(BROKEN_TEXT, "the row holds half a character (a lone surrogate)") from error
    chat = Chat(id=f"{source.name}:{own or digest}", messages=tuple(messages), tools=tools)
    tokens, answers = row.value.get("tokens"), row.value.get("answers")
    if tokens is None or answers is None:
        return chat
    try:
        return Chat.model_validate(chat.model_dump() | {"tokens": tokens, "answers": answers})
    except ValidationError as error:
        raise RowError(BAD_TOKENS, str(error.errors()[0]["msg"])) from error


def _dataset(source: Source) -> Iterator[Row]:
    """Rows of a data set by name or of a folder that `datasets` saved, streamed where it can."""
    place = source.place.removeprefix(_HUB)
    try:
        import datasets
    except ImportError:
        raise DataError(f"the data set {place} is read through `datasets`: pip install 'eyas[data]'") from None
    try:
        if _is_saved(Path(place)):
            found = datasets.load_from_disk(place)
            rows = found[source.split] if isinstance(found, dict) else found
        else:
            rows = datasets.load_dataset(place, source.subset, split=source.split, streaming=True)
        for number, value in enumerate(rows, start=1):
            yield Row(f"{place}/{source.split}:{number}", value)
    except Exception as error:  # whatever the network, the hub and the data set's builder raise
        raise DataError(
            f"can't read the data set {place} (split {source.split}): {type(error).__name__}: {error}. "
            "A file or folder of that name doesn't exist here either"
        ) from error
