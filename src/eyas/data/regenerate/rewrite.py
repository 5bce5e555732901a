"""Rewrites chats: the assistant turns are replaced, one by one, by answers of the target.

`OpenChats` hands out the questions of the chats in progress and takes back their entries. Only chats with a question in
flight are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, Protocol, TypeVar

from eyas.data.regenerate.journal import Answer, AnswerTokens, Journal, Question, Unanswered
from eyas.text.chats import Chat, Message, ToolCall, before_first_question


class OpenChat(Protocol):
    """A chat that is being written, turn by turn."""

    @property
    def id(self) -> str:
        """The chat's key in the journal."""

    def question(self) -> Question | None:
        """The next question; None if the chat needs no more."""

    def take(self, answer: Answer) -> None:
        """Add the answer to `question()`."""


C = TypeVar("C", bound=OpenChat)


def replay(chat: C, journal: Journal) -> C:
    """Add all answers in the journal to the chat, and return it."""
    while (question := chat.question()) is not None:
        found = journal.find(question)
        if not isinstance(found, Answer):
            break
        chat.take(found)
    return chat


class OpenChats:
    """Hands out the questions of all chats that the journal doesn't answer, and takes back their entries."""

    def __init__(self, chats: Iterable[OpenChat], journal: Journal) -> None:
        self._chats = iter(chats)
        self._journal = journal
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
            self._advance(replay(chat, self._journal))
        return taken

    def settle(self, entry: Answer | Unanswered) -> None:
        """Write an entry to the journal; an answer may lead to the chat's next question."""
        self._journal.append(entry)
        chat = self._in_flight.pop(entry.id)
        if isinstance(entry, Answer):
            chat.take(entry)
            self._advance(chat)
        else:
            self.settled += 1

    def _advance(self, chat: OpenChat) -> None:
        question = chat.question()
        if question is None:
            self.settled += 1
        else:
            self._in_flight[chat.id] = chat
            self._next.append(question)


Turns = Literal["last", "all"]


class RewriteRule(NamedTuple):
    """Which turns are answered again, and whether an unfinished answer drops its chat."""

    turns: Turns = "last"
    """`last`: the final assistant turn, or a new one if the chat doesn't end with an answer. `all`: every turn in
    order, with the new answers before it as context; a greeting before the first question stays."""
    drop_unfinished: bool = False
    """Whether a chat is dropped if one of its answers reached the length limit."""


class Rewrite:
    """A chat that is being rewritten. A turn is a run of assistant messages; one answer replaces it.

    Tool results of the original are kept if the answer calls the same functions in the same order. Otherwise the chat
    ends with the answer, because the rest of the original wouldn't follow from it. Answers with token ids are plain
    text whose tool calls haven't been parsed; after these, tool results are always kept.
    """

    def __init__(self, chat: Chat, rule: RewriteRule) -> None:
        self._original = chat
        self._rule = rule
        self._said: list[Message] = []
        self._ahead = deque(chat.messages)
        self._replaced: tuple[ToolCall, ...] = ()
        """The tool calls of the original turn that is being answered."""
        self._tokens: tuple[int, ...] = ()
        self._spans: list[tuple[int, int]] = []  # token ranges of the answers
        self._cut_off: list[int] = []  # indices of the answers that reached the length limit
        self.answers: list[Answer] = []
        self.cut = False
        """Whether the chat ended early because an answer didn't call the tools whose results come next."""
        if rule.turns == "last":
            while self._ahead and self._ahead[-1].role == "assistant":
                self._ahead.pop()
            self._said += self._ahead
            self._ahead.clear()
        self._advance()

    @property
    def id(self) -> str:
        """The id of the original, which its rewrite keeps."""
        return self._original.id

    @property
    def dropped(self) -> bool:
        """Whether the chat is dropped because an answer is unfinished."""
        return self._rule.drop_unfinished and bool(self.answers) and self.answers[-1].finish_reason == "length"

    @property
    def rerendered(self) -> int:
        """The number of answers whose tokens differ from a later turn's rendering, so they have no token range."""
        return sum(answer.tokens is not None for answer in self.answers) - len(self._spans)

    def question(self) -> Question | None:
        """The next question; None if the chat is complete, or has nothing to answer."""
        if self.cut or self.dropped or not self._said or self._said[-1].role == "assistant":
            return None
        if not self._has_prompt():
            return None
        turn = sum(1 for role, _ in groupby(message.role for message in self._said) if role == "assistant")
        return Question(self._original.id, turn, tuple(self._said), self._original.tools, self._tokens)

    def take(self, answer: Answer) -> None:
        """Add the answer to `question()` to the chat."""
        self.answers.append(answer)
        if answer.finish_reason == "length":
            self._cut_off.append(len(self._said))
        self._said.append(answer.message)
        if answer.tokens is not None:
            self._hold(answer.tokens)
        else:
            calls = answer.message.tool_calls or ()
            self.cut = bool(self._ahead) and _names(calls) != _names(self._replaced)
            renamed = {old.id: new.id for old, new in zip(self._replaced, calls, strict=False)}
            while self._ahead and self._ahead[0].role == "tool" and not self.cut:
                result = self._ahead.popleft()
                name = renamed.get(result.tool_call_id, result.tool_call_id)
                self._said.append(result.model_copy(update={"tool_call_id": name}))
        if not self.cut:
            self._advance()

    def chat(self) -> Chat:
        """The chat so far, with its exact tokens if they are known."""
        known = bool(self._spans)
        return self._original.model_copy(
            update={
                "messages": tuple(self._said),
                "tokens": self._tokens if known else None,
                "answers": tuple(self._spans) if known else None,
                "cut_off": tuple(self._cut_off) or None,
            }
        )

    def _advance(self) -> None:
        """Copy messages up to the next turn to answer, or to the end of the chat."""
        while self._ahead:
            if self._ahead[0].role != "assistant" or not self._has_prompt():
                self._said.append(self._ahead.popleft())
                continue
            replaced: list[ToolCall] = []
            while self._ahead and self._ahead[0].role == "assistant":
                replaced += self._ahead.popleft().tool_calls or ()
            self._replaced = tuple(replaced)
            return
        self._replaced = ()

    def _has_prompt(self) -> bool:
        return before_first_question(self._said) < len(self._said)

    def _hold(self, tokens: AnswerTokens) -> None:
        prompt = self._tokens[: tokens.kept] + tokens.prompt
        self._tokens = prompt + tokens.answer
        self._spans = [span for span in self._spans if span[1] <= tokens.kept]
        self._spans.append((len(prompt), len(self._tokens)))


def _names(calls: Sequence[ToolCall]) -> list[str]:
    return [call.function.name for call in calls]
