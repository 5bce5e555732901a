"""The chats of a run that the target is writing: their questions are handed out, their entries taken back.

Only chats with a question in flight are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol, TypeVar

from eyas.data.regenerate.entries import Answer, Question, Unanswered
from eyas.data.regenerate.journal import Journal


class OpenChat(Protocol):
    """A chat in the course of being written, turn by turn."""

    @property
    def id(self) -> str:
        """What the journal knows the chat by."""

    def question(self) -> Question | None:
        """The next question; None if the chat needs no more."""

    def take(self, answer: Answer) -> None:
        """Add the answer to `question()`."""


C = TypeVar("C", bound=OpenChat)


def replay(chat: C, journal: Journal) -> C:
    """The chat with all answers that the journal holds."""
    while (question := chat.question()) is not None:
        found = journal.find(question)
        if not isinstance(found, Answer):
            break
        chat.take(found)
    return chat


class OpenChats:
    """Hands out the questions of all chats that the journal doesn't answer, and takes back their entries."""

    def __init__(self, chats: Iterable[OpenChat], journal: Journal) -> None:
        self._chats, self._journal = iter(chats), journal
        self._in_flight: dict[str, OpenChat] = {}
        self._next: deque[Question] = deque()
        self.settled = 0
        """The number of chats that this run is done with: answered, failed, or without a question."""

    def take(self, room: int) -> list[Question]:
        """At most `room` questions; further turns of chats in progress come before new chats."""
        taken: list[Question] = []
        while len(taken) < room:
            if self._next:
                taken.append(self._next.popleft())
                continue
            chat = next(self._chats, None)
            if chat is None:
                break
            self._go_on(replay(chat, self._journal))
        return taken

    def settle(self, entry: Answer | Unanswered) -> None:
        """Write an entry to the journal; an answer may lead to the chat's next question."""
        self._journal.append(entry)
        chat = self._in_flight.pop(entry.id)
        if isinstance(entry, Answer):
            chat.take(entry)
            self._go_on(chat)
        else:
            self.settled += 1

    def _go_on(self, chat: OpenChat) -> None:
        question = chat.question()
        if question is None:
            self.settled += 1
        else:
            self._in_flight[chat.id] = chat
            self._next.append(question)
