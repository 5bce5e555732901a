"""Entries (a question to the target, and its outcome), and the journal that keeps them on disk.

The process can be killed at any moment: a line counts once its line break is written, and an incomplete last line is
removed when the file is opened again. The first line has the settings that the answers were made with. If a question
has several entries, the last one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, TypeAdapter

from eyas.config import StrictModel, differences
from eyas.errors import DataError, OutputError, UsageError
from eyas.files import FileLock, sync_folder
from eyas.text.chats import Message
from eyas.types import Stats


@dataclass(frozen=True)
class Question:
    """The messages of a chat before a turn that the target should write: an answer, or the user's next message."""

    id: str
    """The chat's id."""
    turn: int
    """The index of the turn among those that the target writes, from 0."""
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    held: tuple[int, ...] = ()
    """Token ids of the previous question and its answer; empty if unknown."""
    role: Literal["assistant", "user"] = "assistant"
    """Whose turn it is; `user` is for synthesis."""

    @cached_property
    def digest(self) -> str:
        """A hash of messages and tools; an entry with another digest doesn't answer this question."""
        content: list[Any] = [[message.for_template() for message in self.messages], self.tools]
        if self.role != "assistant":
            content.append(self.role)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def seed(self, base: int) -> int:
        """The seed of this answer, 31 bits: it depends on `base`, chat and turn, not on the order of answering."""
        name = f"{base} {self.turn} {self.id}".encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:4], "big") >> 1


class AnswerTokens(StrictModel):
    """Token ids of a question and its answer, relative to the ids in `Question.held`."""

    kept: int = Field(ge=0)
    """The number of `held` ids that begin the question's tokens."""
    prompt: tuple[int, ...]
    """The rest of the question's tokens."""
    answer: tuple[int, ...]


class _Entry(StrictModel):
    id: str
    turn: int
    asked: str
    """`Question.digest` of the question."""


class Answer(_Entry):
    """The target's answer to a question."""

    kind: Literal["answer"] = "answer"
    message: Message
    finish_reason: str
    """`stop`, `length`, `tool_calls`, or another reason given by the endpoint."""
    refused: bool = False
    """Whether the endpoint marked the answer as a refusal, whose text is then in `message`."""
    count: int = Field(ge=0)
    """Tokens of the answer; 0 if the endpoint doesn't report them."""
    tokens: AnswerTokens | None = None


class Unanswered(_Entry):
    """Why a question has no answer; a later run asks it again."""

    kind: Literal["unanswered"] = "unanswered"
    reason: str
    outage: bool = False
    """Whether the endpoint is at fault, not the question."""
    rejected: bool = False
    """Whether the endpoint refused the request. If it refuses all of them, their settings are wrong."""


Entry = Annotated[Answer | Unanswered, Field(discriminator="kind")]
ENTRY: TypeAdapter[Answer | Unanswered] = TypeAdapter(Entry)


@dataclass(frozen=True)
class Reply:
    """An entry and the statistics of its decoding."""

    entry: Answer | Unanswered
    stats: Stats | None = None
    """Statistics of decoding in this process; None for other answerers."""


Take = Callable[[int], Sequence[Question]]
"""`take(room)` returns at most `room` questions; none if all remaining ones depend on answers still missing."""


class Answerer(Protocol):
    """A source of answers: the engine in this process, an endpoint, or the results of a batch."""

    @property
    def settings(self) -> dict[str, Any]:
        """The JSON-ready settings that answers depend on; all answers of a journal have the same settings."""

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Take questions and yield replies, in any order, until no question is left and none is in flight.

        The caller processes a reply before it requests the next, so the question that follows from an answer can be
        taken then. A question may be left without a reply; it stays open.
        """


def unanswered(question: Question, reason: str, *, outage: bool = False, rejected: bool = False) -> Reply:
    """The reply to a question that can't be answered."""
    return Reply(
        Unanswered(
            id=question.id, turn=question.turn, asked=question.digest, reason=reason, outage=outage, rejected=rejected
        )
    )


class Journal:
    """An open journal, locked against other processes; memory holds only an index of its lines."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or create the journal at `path`.

        Raises UsageError if another process has it open, or its answers were made with other settings; DataError if a
        complete line is damaged; OutputError if the file can't be written.
        """
        self.path = path
        self._entries: dict[tuple[str, int], tuple[int, str, bool]] = {}  # -> offset, digest, answered
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path)
            self._file = FileIO(path, "a")  # unbuffered, so the rest of a failed write isn't written later
            self._lines = path.open("rb")
        except OSError as error:
            raise OutputError(f"can't write the journal {path}: {error.strerror}") from error
        try:
            self._read(json.loads(json.dumps(settings)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock."""
        self._lines.close()
        self._file.close()
        self._lock.release()

    @property
    def answered(self) -> int:
        """The number of questions that have an answer."""
        return sum(answered for _, _, answered in self._entries.values())

    def find(self, question: Question) -> Answer | Unanswered | None:
        """The last entry for exactly this question; None if there is none."""
        known = self._entries.get((question.id, question.turn))
        if known is None or known[1] != question.digest:
            return None
        self._lines.seek(known[0])
        return ENTRY.validate_json(self._lines.readline())

    def append(self, entry: Answer | Unanswered) -> None:
        """Write an entry; once this returns, the entry survives a kill and a power failure."""
        self._index(entry, self._write(entry.model_dump_json(exclude_none=True)))

    def _write(self, line: str) -> int:
        """Append a line and return the offset at which it begins; after an error the file is unchanged."""
        data = (line + "\n").encode()
        start = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(start)
            raise OutputError(
                f"can't write the journal {self.path}: {error.strerror}. Nothing is lost: solve this and run the same "
                "command again"
            ) from error
        return start

    def _read(self, settings: dict[str, Any]) -> None:
        offset = 0
        for number, line in enumerate(self._lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                if number == 1:
                    self._compare(json.loads(line)["settings"], settings)
                else:
                    self._index(ENTRY.validate_json(line), offset)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self.path}:{number} is damaged, or the file is not a journal. Delete the line to have its chat "
                    "answered again, or the file to start over"
                ) from error
            offset += len(line)
        self._file.truncate(offset)
        if offset == 0:
            self._write(json.dumps({"settings": settings}))
            sync_folder(self.path.parent)

    def _index(self, entry: Answer | Unanswered, offset: int) -> None:
        self._entries[entry.id, entry.turn] = (offset, entry.asked, isinstance(entry, Answer))

    def _compare(self, written: dict[str, Any], now: dict[str, Any]) -> None:
        if changed := differences(written, now, _parameter):
            raise UsageError(
                f"{self.path} holds answers made with other settings: {'; '.join(changed)}. Restore them to resume, "
                "or choose another output to start over"
            )


_PARAMETERS = {
    "target": "model",
    "chat_template": "model",
    "answered_by": "endpoint",
    "keep_reasoning": "reasoning",
    "sampling.max_tokens": "max_new_tokens",
    "sampling.stop_token_ids": "stop_token_id",
}
"""Setting -> the parameter that sets it, where the names differ."""


def _parameter(key: str) -> str:
    """The parameter of a regeneration that sets a key of the settings."""
    name = "extra_body" if key.startswith("extra_body") else key.removeprefix("sampling.")
    return _PARAMETERS.get(key, name)
