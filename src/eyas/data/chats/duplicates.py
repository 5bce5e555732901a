"""Which chats say the same: exactly, in their prompt, in their question; and which ask what an evaluation asks.

Texts are compared normalised: Unicode NFKC, case folded, every run of whitespace one space, none at the ends.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from eyas.errors import DataError, RowError
from eyas.text.chats import Chat, Message
from eyas.text.prompts import BadRow, read_prompts

EXACT = "exact duplicate"
SAME_PROMPT = "same prompt as another chat"
EVALUATED = "question of an evaluation file"


def normalised(text: str) -> str:
    """The text as it is compared."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def question_key(chat: Chat) -> str:
    """The first thing the user says, normalised: chats that share it go to the same side of the split."""
    return next(normalised(m.content or "") for m in chat.messages if m.role == "user")


class Duplicates:
    """Remembers 16 bytes a chat for each of the two ways to be a copy; the first of equals stays."""

    def __init__(self) -> None:
        self._said: set[bytes] = set()
        self._prompts: set[bytes] = set()

    def check(self, chat: Chat) -> None:
        """RowError if a chat before this one says the same or has the same prompt.

        The prompt is everything before the last answer, tools too.
        """
        said = _digest([_exact(m) for m in chat.messages], chat)
        if said in self._said:
            raise RowError(EXACT, chat.id)
        self._said.add(said)
        prompt = _digest([_loose(m) for m in prompt_of(chat.messages)], chat)
        if prompt in self._prompts:
            raise RowError(SAME_PROMPT, chat.id)
        self._prompts.add(prompt)


class Evaluations:
    """What the prompt files of evaluations ask."""

    def __init__(self, files: Iterable[Path]) -> None:
        """DataError if a file can't be read or has a bad row: a question overlooked here would be trained on."""
        self._asked: set[bytes] = set()
        for file in files:
            for row in read_prompts(file):
                if isinstance(row, BadRow):
                    raise DataError(row.error)
                asked = row.turns or ([row.prompt] if row.prompt is not None else [])
                asked = [*asked, *(m.content or "" for m in row.messages or () if m.role == "user")]
                if not asked:
                    raise DataError(f"{row.where}: token ids can't be compared with chats: give the text")
                self._asked.update(_hash(normalised(text)) for text in asked)

    def check(self, chat: Chat) -> None:
        """RowError if any user turn of the chat is a user turn of an evaluation."""
        for message in chat.messages:
            if message.role == "user" and _hash(normalised(message.content or "")) in self._asked:
                raise RowError(EVALUATED, chat.id)


def prompt_of(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages before the last answer; all of them if the chat ends with a question."""
    return messages[:-1] if messages[-1].role == "assistant" else messages


def _exact(message: Message) -> object:
    return message.model_dump(mode="json", exclude={"tool_call_id"})


def _loose(message: Message) -> object:
    calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or ()]
    return [message.role, normalised(message.content or ""), calls]


def _digest(messages: list[object], chat: Chat) -> bytes:
    return _hash(json.dumps([messages, chat.tools], sort_keys=True))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]
