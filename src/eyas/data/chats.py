"""A chat: an id and its messages. Read from and written to JSON Lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.errors import DataError


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class Chat(BaseModel):
    """A conversation; `id` names it across files, runs and the train/validation split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    messages: tuple[Message, ...] = Field(min_length=1)


def exchange(chat_id: str, question: str, answer: str) -> Chat:
    """The commonest chat: one question, one answer."""
    return Chat(
        id=chat_id,
        messages=(Message(role="user", content=question), Message(role="assistant", content=answer)),
    )


def read_chats(path: Path) -> Iterator[Chat]:
    """Yield the chats of a JSON Lines file; a bad row raises DataError naming file and line."""
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't read the chats {path}: {error.strerror}") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield Chat.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "row"
                raise DataError(
                    f"{path}:{number}: {where}: {first['msg']} (a row is "
                    '{"id": ..., "messages": [{"role": ..., "content": ...}, ...]})'
                ) from error


def write_chats(path: Path, chats: Iterable[Chat]) -> None:
    """Write one chat a line."""
    with path.open("w", encoding="utf-8") as out:
        for chat in chats:
            out.write(json.dumps(chat.model_dump(), ensure_ascii=False) + "\n")


def held_out(chat_id: str, share: float) -> bool:
    """Whether this id belongs to the validation split: by its hash, so files can grow or be reordered."""
    bucket = int.from_bytes(hashlib.sha256(chat_id.encode()).digest()[:8], "big")
    return bucket < share * 2**64
