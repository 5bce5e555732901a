"""What a target is asked, and what becomes of it: an answer, or the reason why there is none.

Answers and refusals are also the lines of the journal.
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
    """A chat up to where one of the assistant's turns begins."""

    id: str
    """The chat's."""
    turn: int
    """Which of the chat's assistant turns, from 0."""
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    held: tuple[int, ...] = ()
    """Token ids of the question and answer before this one, if they are known."""

    @cached_property
    def digest(self) -> str:
        """A short hash of what is asked: an answer to anything else is none."""
        content = [[message.for_template() for message in self.messages], self.tools]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def seed(self, base: int) -> int:
        """The seed of this answer: by name, so that the order of answering doesn't matter. Fits 31 bits."""
        name = f"{base} {self.turn} {self.id}".encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:4], "big") >> 1


class AnswerTokens(StrictModel):
    """Token ids of a question and its answer, as a change to those held before."""

    kept: int = Field(ge=0)
    """How many of the held ids the question begins with."""
    prompt: tuple[int, ...]
    """The rest of the question."""
    answer: tuple[int, ...]


class _Entry(StrictModel):
    id: str
    turn: int
    asked: str
    """The question's digest."""


class Answer(_Entry):
    """What the target said."""

    kind: Literal["answer"] = "answer"
    message: Message
    finish_reason: str
    """`stop`, `length`, `tool_calls`, or what else the endpoint calls it."""
    refused: bool = False
    """The endpoint marked the answer as a refusal; `message` says it."""
    count: int = Field(ge=0)
    """Tokens of the answer; 0 if the endpoint doesn't say."""
    tokens: AnswerTokens | None = None


class Unanswered(_Entry):
    """Why there is no answer; asking again may bring one."""

    kind: Literal["unanswered"] = "unanswered"
    reason: str
    outage: bool = False
    """The endpoint is at fault, not the question."""
    rejected: bool = False
    """The endpoint said no to the request. If it does so to every one, the request is wrong, not the question."""


Entry = Annotated[Answer | Unanswered, Field(discriminator="kind")]
ENTRY: TypeAdapter[Answer | Unanswered] = TypeAdapter(Entry)


@dataclass(frozen=True)
class Reply:
    """An entry, and what it cost."""

    entry: Answer | Unanswered
    stats: Stats | None = None
    """Of the decoding, where it was done here."""


Take = Callable[[int], Sequence[Question]]
"""`take(room)` hands out at most `room` questions; none while all that is left waits for an answer."""


class Answerer(Protocol):
    """Whoever answers, in any order."""

    @property
    def settings(self) -> dict[str, Any]:
        """What decides its answers, ready for JSON: a journal holds answers of one target with one set of these."""

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Take questions and yield replies until nothing is handed out and nothing runs.

        The caller deals with a reply before it asks for the next, so an answer's follow-up question can be taken
        then. A question may stay without a reply: it is still open.
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
