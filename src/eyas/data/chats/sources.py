"""Sources of chats (files, data sets, the standard library) and the layouts that their rows may have.

Rows are read one at a time and identified by file and line. A row that can't be read, or isn't a chat, is yielded as an
error, which the caller counts.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from eyas.config import StrictModel, validated
from eyas.errors import ConfigError, DataError, RowError
from eyas.files import json_lines, parquet_rows
from eyas.text.chats import Chat, Message

UNKNOWN_LAYOUT = "unknown layout"
UNKNOWN_ROLE = "unknown role"
BAD_MESSAGE = "bad message"
BAD_TOOLS = "bad tools"

Record = dict[str, Any]


class ParsedChat(NamedTuple):
    """The messages and tools of a row; the caller adds the id."""

    messages: list[Message]
    tools: tuple[Record, ...] | None


_OPENAI = {name: name for name in ("system", "developer", "user", "assistant", "tool")} | {"function": "tool"}
_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


def read_layout(row: Any, layout: str | None = None) -> ParsedChat:
    """Parse a row whose layout is given, or detected from its keys. RowError if the row is not a chat."""
    if not isinstance(row, dict):
        raise RowError(UNKNOWN_LAYOUT, f"a row must be a JSON object, not {type(row).__name__}")
    name = layout or detect_layout(row)
    chat = LAYOUTS[name](row)
    if not chat.messages:
        raise RowError(BAD_MESSAGE, "the row has no messages")
    return chat


def detect_layout(row: Record) -> str:
    """The name of the layout that a row's keys belong to; RowError if they belong to none."""
    if row.get("messages") is not None:
        return "openai"
    turns = _first_given(row, "conversations", "conversation")
    if turns is not None:
        turns = _decoded(turns)
        first = turns[0] if isinstance(turns, list) and turns else None
        return "openai" if isinstance(first, dict) and "role" in first else "sharegpt"
    if row.get("instruction") is not None:
        return "alpaca"
    keys = ", ".join(map(repr, list(row)[:8])) or "nothing"
    raise RowError(UNKNOWN_LAYOUT, f"a row needs messages, conversations or instruction; found {keys}")


def _openai(row: Record) -> ParsedChat:
    turns = _first_given(row, "messages", "conversations", "conversation")
    messages = [_openai_message(turn) for turn in _listed(turns, "messages")]
    return ParsedChat(messages, _tools(row))


def _openai_message(turn: Record) -> Message:
    role = _role(turn.get("role"), _OPENAI)
    content = _text(turn.get("content"))
    calls = _listed(turn["tool_calls"], "tool_calls") if turn.get("tool_calls") else []
    if turn.get("function_call"):  # the deprecated form of a tool call
        calls = [*calls, {"function": turn["function_call"]}]
    if content is None and turn.get("refusal"):
        content = turn["refusal"]
    reasoning = next((turn[key] for key in ("reasoning_content", "reasoning", "thinking") if turn.get(key)), None)
    return _message(
        role=role,
        content=content if content is not None or calls else "",
        reasoning_content=reasoning,
        tool_calls=[_call(call) for call in calls] or None,
        tool_call_id=turn.get("tool_call_id"),
        name=turn.get("name"),
    )


def _sharegpt(row: Record) -> ParsedChat:
    turns = _first_given(row, "conversations", "conversation")
    messages = [_message(role="system", content=_text(row["system"]))] if row.get("system") else []
    number, answered = 0, 0
    names: list[str] = []
    for turn in _listed(turns, "conversations"):
        said = turn.get("from")
        value = _text(turn.get("value"))
        role = _role(said, _SHAREGPT)
        if said == "function_call":
            calls = [_call(call) for call in _listed(_decoded(value or ""), "function_call", one=True)]
            for call in calls:
                call["id"] = f"call{number:05d}"  # nine letters and digits, as some templates require
                names.append(call["function"]["name"])
                number += 1
            before = messages.pop() if messages and messages[-1].role == "assistant" else None
            known = [call.model_dump() for call in (before.tool_calls or ()) if before] if before else []
            content = before.content if before else None
            messages.append(_message(role=role, content=content, tool_calls=[*known, *calls]))
        elif role == "tool" and answered < number:
            call_id = f"call{answered:05d}"
            messages.append(_message(role=role, content=value, tool_call_id=call_id, name=names[answered]))
            answered += 1
        else:
            messages.append(_message(role=role, content=value))
    return ParsedChat(messages, _tools(row))


def _alpaca(row: Record) -> ParsedChat:
    messages = [_message(role="system", content=_text(row["system"]))] if row.get("system") else []
    for turn in row.get("history") or []:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise RowError(BAD_MESSAGE, "history must be a list of [question, answer] pairs")
        messages += [_message(role="user", content=turn[0]), _message(role="assistant", content=turn[1])]
    parts = [_text(row.get("instruction")), _text(row.get("input"))]
    messages.append(_message(role="user", content="\n\n".join(part for part in parts if part)))
    if row.get("output") is not None:
        messages.append(_message(role="assistant", content=_text(row["output"])))
    return ParsedChat(messages, None)


LAYOUTS: dict[str, Callable[[Record], ParsedChat]] = {"openai": _openai, "sharegpt": _sharegpt, "alpaca": _alpaca}


def _role(name: Any, known: dict[str, str]) -> str:
    if not isinstance(name, str) or name not in known:
        raise RowError(UNKNOWN_ROLE, f"{name!r} is not one of {', '.join(known)}")
    return known[name]


def _text(content: Any) -> str | None:
    """Message content as text; the parts of a content list are joined."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(BAD_MESSAGE, f"content must be text, not {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError(BAD_MESSAGE, f"content has a part that isn't text: {kind!r}")
        texts.append(text)
    return "".join(texts)


def _call(call: Record) -> Record:
    """A tool call in OpenAI's form; arguments given as JSON text are parsed if they hold an object."""
    function = call.get("function") or call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(BAD_MESSAGE, "a tool call has no name")
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments is None or arguments == "" else arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    made: Record = {"function": {"name": function["name"], "arguments": arguments}}
    return made | ({"id": call["id"]} if call.get("id") else {})


def _tools(row: Record) -> tuple[Record, ...] | None:
    given = next((row[key] for key in ("tools", "functions") if row.get(key)), None)
    if given is None:
        return None
    try:
        schemas = _listed(_decoded(given), "tools")
    except RowError as error:
        raise RowError(BAD_TOOLS, error.detail) from error
    tools = [schema if "function" in schema else {"type": "function", "function": schema} for schema in schemas]
    return tuple(tools) or None


def _first_given(row: Record, *keys: str) -> Any:
    """The value of the first of the keys that isn't null; None if there is none."""
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _decoded(value: Any) -> Any:
    """The value, parsed if it is JSON text: tables often store nested values that way."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError(BAD_MESSAGE, f"expected JSON text: {error}") from error


def _listed(value: Any, name: str, one: bool = False) -> list[Record]:
    value = _decoded(value)
    if one and isinstance(value, dict):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(BAD_MESSAGE, f"{name} must be a list of objects")
    return value


def _message(**fields: Any) -> Message:
    try:
        return Message.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RowError(BAD_MESSAGE, f"{field}: {first['msg']}" if field else str(first["msg"])) from error


STDLIB = "stdlib"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
BAD_TOKENS = "bad tokens or answers"
BROKEN_TEXT = "broken UTF-8"
BROKEN_JSON = "not JSON"
BROKEN_FILE = "unreadable file"
_HUB = "hf:"
_ID_KEYS = ("id", "question_id", "conversation_id", "prompt_id", "uuid")
_SAVED = ("state.json", "dataset_dict.json")  # written by `Dataset.save_to_disk`


class ChatSource(StrictModel):
    """One part of the blend, written `LOCATION[,key=value...]`."""

    location: str = Field(alias="place")
    """A path, the name of a data set, or `stdlib`; key `place` in reports."""
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Share of the blend, relative to other weights. None: 1 if any source has a weight, else its number of chats."""
    layout: str | None = None
    split: str = "train"
    """Of a data set or a folder; `train+test` is both."""
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
    """A chat, or the reason why the row isn't one, with the place it was read from."""

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
    if source.subset is not None and (source.path is not None or location == STDLIB):
        raise ConfigError(f"source {text!r}: subset is for data sets given by name, which {location} is not")
    if "split" in values and (location == STDLIB or (source.path is not None and source.path.is_file())):
        raise ConfigError(f"source {text!r}: split is for folders and data sets given by name, which {location} is not")
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
    for file in files_of(source).read:
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
        raise RowError(BROKEN_TEXT, "the row contains a lone surrogate (half a character)") from error
    chat = Chat(id=f"{source.name}:{own or digest}", messages=tuple(messages), tools=tools)
    tokens = row.value.get("tokens")
    answers = row.value.get("answers")
    if tokens is None or answers is None:
        return chat
    try:
        return Chat.model_validate(chat.model_dump() | {"tokens": tokens, "answers": answers})
    except ValidationError as error:
        raise RowError(BAD_TOKENS, str(error.errors()[0]["msg"])) from error


def _dataset(source: ChatSource) -> Iterator[SourceRow]:
    """Rows of a data set given by name, streamed, or of a folder written by `Dataset.save_to_disk`."""
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
    except Exception as error:  # the network, the hub and the data set's builder may raise anything
        raise DataError(
            f"can't read the data set {name} (split {source.split}): {type(error).__name__}: {error}. "
            "There is no local file or folder of that name either"
        ) from error


class SourceRow(NamedTuple):
    """The content of one row, or the reason why it can't be read."""

    where: str
    value: Any | RowError


_DESCRIPTIONS = {"report.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Reports and indexes next to the data, which hold no chats."""


_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""A word of a file's name or folder -> its split, as the `datasets` library finds splits."""


class FolderFiles(NamedTuple):
    """The files of a source, and those that belong to other splits."""

    read: list[Path]
    left_out: dict[str, list[Path]]
    """Split -> its files."""


def files_of(source: ChatSource) -> FolderFiles:
    """The file itself, or the files of a folder with a known suffix. DataError if there is nothing to read.

    Files whose names say that they belong to another split than the source's are left out. If some belong to its split,
    those that say nothing are left out too, as the `datasets` library does.
    """
    path = source.path
    assert path is not None
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path} has no known suffix: use one of {', '.join(SUFFIXES)}")
        return FolderFiles([path], {})
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    splits: dict[str, list[Path]] = {}
    for file in found:
        if file.name not in _DESCRIPTIONS:
            splits.setdefault(split_of(file.relative_to(path)), []).append(file)
    if not splits:
        raise DataError(f"{path} has no files with a known suffix ({', '.join(SUFFIXES)})")
    wanted = [split for split in splits if split in source.split.split("+")]
    if not wanted and (source.split != "train" or "" not in splits):
        known = ", ".join(sorted(filter(None, splits))) or "none with such names"
        raise DataError(f"{path} has no files of the split {source.split}, but of {known}: add ,split=... to it")
    read = [file for split in wanted or [""] for file in splits.pop(split)]
    return FolderFiles(sorted(read), splits)


def split_of(file: Path) -> str:
    """The split that a file's name, or else its nearest folder's, belongs to; empty if none says."""
    for part in reversed(file.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return ""


def read_rows(file: Path) -> Iterator[SourceRow]:
    """Every row of a file; a row that can't be read carries the reason instead."""
    try:
        if file.suffix == ".parquet":
            for number, value in enumerate(parquet_rows(file), start=1):
                yield SourceRow(f"{file}:{number}", value)
        elif file.suffix == ".json" and _is_array(file):
            yield from _array(file)
        else:
            yield from _lines(file)
    except OSError as error:
        yield SourceRow(str(file), RowError(BROKEN_FILE, error.strerror or str(error)))


def _lines(file: Path) -> Iterator[SourceRow]:
    try:
        for number, line in json_lines(file):
            yield SourceRow(f"{file}:{number}", _parsed(line))
    except DataError as error:
        yield SourceRow(str(file), RowError(BROKEN_FILE, str(error)))


def _parsed(line: bytes) -> Any | RowError:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError(BROKEN_TEXT, f"byte {error.start + 1} of the line is not valid UTF-8")
    except (json.JSONDecodeError, RecursionError) as error:
        return RowError(BROKEN_JSON, str(error))


def _is_array(file: Path) -> bool:
    with file.open("rb") as data:
        return data.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _array(file: Path) -> Iterator[SourceRow]:
    """The elements of a JSON array; the whole file is read into memory."""
    value = _parsed(file.read_bytes().removeprefix(codecs.BOM_UTF8))
    if isinstance(value, RowError):
        yield SourceRow(str(file), RowError(BROKEN_FILE, str(value)))
        return
    for number, row in enumerate(value, start=1):
        yield SourceRow(f"{file}:{number}", row)
