"""Chats and their messages: the form that prompt files, training data and the server share.

A chat has an id, messages and tools that may be called. Files have one chat per line as JSON, without absent fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from eyas.errors import DataError
from eyas.files import json_lines, writing

Role = Literal["system", "developer", "user", "assistant", "tool"]


class _Record(BaseModel):
    """A frozen model that refuses unknown keys and is written without absent fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if value is not None}


class FunctionCall(_Record):
    """The called function; arguments that aren't a JSON object stay the text that the model wrote."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(_Record):
    """One call of a tool, in OpenAI's form."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Record):
    """One message of a chat, in OpenAI's form."""

    role: Role
    content: str | None = None
    """None only in an assistant's message that does nothing but call tools."""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = Field(default=None, min_length=1)
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> Message:
        if self.role != "assistant" and (self.tool_calls is not None or self.reasoning_content is not None):
            raise ValueError(f"only an assistant reasons or calls tools, not a {self.role}")
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: plain lists and dictionaries, absent fields left out."""
        return self.model_dump(mode="json")


class Chat(_Record):
    """A conversation; `id` identifies it across files, runs and the train/validation split."""

    id: str = Field(min_length=1)
    messages: tuple[Message, ...] = Field(min_length=1)
    tools: tuple[dict[str, Any], ...] | None = None
    """The tools that the assistant may call, as JSON schemas."""
    tokens: tuple[int, ...] | None = None
    """Token ids of the chat as one target rendered it; a chat that has them is never tokenized again."""
    answers: tuple[tuple[int, int], ...] | None = None
    """Half-open spans of `tokens` that the assistant wrote, end mark included; ordered and disjoint."""
    cut_off: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Indices of the messages that stopped at a length limit, not where the model would have ended them."""

    @model_validator(mode="after")
    def _answers_lie_in_the_tokens(self) -> Chat:
        if (self.tokens is None) != (self.answers is None):
            raise ValueError("tokens and answers are given together or not at all")
        before = 0
        for start, stop in self.answers or ():
            if not before <= start < stop <= len(self.tokens or ()):
                raise ValueError(f"answer {start, stop} is empty, out of order or outside the tokens")
            before = stop
        return self


def before_first_question(messages: Iterable[Message]) -> int:
    """The number of messages before the first one that can be answered: system messages, a greeting."""
    return sum(1 for _ in takewhile(lambda message: message.role not in ("user", "tool"), messages))


def greets(messages: Sequence[Message]) -> bool:
    """Whether the assistant speaks before anything was asked. Such a greeting is context, and never trained on."""
    return any(message.role == "assistant" for message in messages[: before_first_question(messages)])


def without_greeting(chat: Chat) -> Chat:
    """The chat without what the assistant says before the first question."""
    first = before_first_question(chat.messages)
    kept = (message for message in chat.messages[:first] if message.role != "assistant")
    return chat.model_copy(update={"messages": (*kept, *chat.messages[first:])})


def exchange(chat_id: str, question: str, answer: str) -> Chat:
    """Make a chat of one user message and one answer."""
    return Chat(
        id=chat_id, messages=(Message(role="user", content=question), Message(role="assistant", content=answer))
    )


def read_chats(path: Path) -> Iterator[Chat]:
    """Yield the chats of a JSON Lines file; DataError names file and line of a bad row."""
    for row in chat_rows(path):
        if isinstance(row, DataError):
            raise row
        yield row


def chat_rows(path: Path) -> Iterator[Chat | DataError]:
    """Yield chats, and for each bad row the DataError that describes it; an unreadable file raises DataError."""
    try:
        for number, line in json_lines(path):
            yield _chat(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"can't read the chats {path}: {error.strerror}") from error


def _chat(line: bytes, where: str) -> Chat | DataError:
    try:
        return Chat.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "row"
        return DataError(
            f"{where}: {key}: {first['msg']} (a row is "
            '{"id": ..., "messages": [{"role": ..., "content": ...}, ...]}; `eyas data prepare` reads other layouts)'
        )


def chat_line(chat: Chat) -> str:
    """The chat as one line of JSON, line break included."""
    return json.dumps(chat.model_dump(mode="json"), ensure_ascii=False) + "\n"


def write_chats(path: Path, chats: Iterable[Chat]) -> None:
    """Write chats to a JSON Lines file, one a line."""
    with writing(path) as out:
        for chat in chats:
            out.write(chat_line(chat))


def held_out(name: str, share: float) -> bool:
    """Whether a name falls into the held-out share; decided by its hash, so that files can grow or be reordered."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return bucket < share * 2**64
