"""What is left to ask, chat by chat; only those being asked lie in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from eyas.data.chats import Chat
from eyas.data.regenerate.entries import Answer, Question, Unanswered
from eyas.data.regenerate.journal import Journal
from eyas.data.regenerate.rewrite import Rewrite, Rule, replay


class Work:
    """Hands out questions and takes what became of them; whatever the journal answers is never asked again."""

    def __init__(self, chats: Iterable[Chat], rule: Rule, journal: Journal) -> None:
        self._chats, self._rule, self._journal = iter(chats), rule, journal
        self._asked: dict[str, Rewrite] = {}
        self._next: deque[Question] = deque()
        self.settled = 0
        """Chats of which nothing more is to be asked now: answered, given up, or nothing to answer."""

    def take(self, room: int) -> list[Question]:
        """At most `room` questions; the next turn of a chat before the first of another."""
        taken: list[Question] = []
        while len(taken) < room:
            if self._next:
                taken.append(self._next.popleft())
                continue
            chat = next(self._chats, None)
            if chat is None:
                break
            self._go_on(chat.id, replay(chat, self._rule, self._journal))
        return taken

    def settle(self, entry: Answer | Unanswered) -> None:
        """Write it down, then see what follows from it."""
        self._journal.append(entry)
        rewrite = self._asked.pop(entry.id)
        if isinstance(entry, Answer):
            rewrite.take(entry)
            self._go_on(entry.id, rewrite)
        else:
            self.settled += 1

    def _go_on(self, name: str, rewrite: Rewrite) -> None:
        question = rewrite.question()
        if question is None:
            self.settled += 1
        else:
            self._asked[name] = rewrite
            self._next.append(question)


def open_questions(chats: Iterable[Chat], rule: Rule, journal: Journal) -> Iterator[Question]:
    """The next question of every chat that has one."""
    for chat in chats:
        question = replay(chat, rule, journal).question()
        if question is not None:
            yield question
