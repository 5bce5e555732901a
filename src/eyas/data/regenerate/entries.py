"""Questions to a target, and the entries that result from them: an answer, or the reason why there is none.

Entries are also the lines of the journal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, TypeAdapter

from eyas.config import StrictModel
from eyas.text.chats import Message
from eyas.types import Stats


@dataclass(frozen=True)
class Question:
    """The messages of a chat before a turn that the target is to write: an answer, or what the user says next."""

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
    """The number of held ids with which the question's tokens begin."""
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
    """`stop`, `length`, `tool_calls`, or another word of the endpoint's."""
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
"""`take(room)` returns at most `room` questions; none if all that are left depend on answers still missing."""


class Answerer(Protocol):
    """A source of answers: the engine in this process, an endpoint, or the results of a batch."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings on which answers depend, ready for JSON; a journal holds answers of one set of settings."""

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Take questions and yield replies, in any order, until no question is left and none is in flight.

        The caller processes a reply before it requests the next, so the question that follows from an answer can be
        taken then. A question may be left without a reply; it stays open.
        """


def unanswered(question: Question, reason: str, *, outage: bool = False, rejected: bool = False) -> Reply:
    """The reply to a question that can't be answered."""
    return Reply(
        Unanswered(
            id=question.id,
            turn=question.turn,
            asked=question.digest,
            reason=reason,
            outage=outage,
            rejected=rejected,
        )
    )
