"""Good chats on disk between two passes: written as they are read, read back in the order of the blend."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from eyas.data.blend import rank
from eyas.data.chats import Chat, chat_line
from eyas.data.duplicates import Duplicates, Evaluations
from eyas.data.fitting import ChatFitter
from eyas.data.prepare_config import PrepareConfig
from eyas.data.sources import chats_of_source
from eyas.data.tally import SourceTally
from eyas.errors import RowError

EMPTY_ANSWER = "empty answer"
EMPTY_QUESTION = "empty question"
NO_QUESTION = "no question"
UNANSWERED = "the last turn is not the assistant's"

Progress = Callable[[str, int, int | None], None]
"""Told the stage, how many rows or chats are done, and of how many (if known)."""


class Candidates:
    """Chats of one source: where they lie in the spool, in the order the blend takes them."""

    def __init__(self) -> None:
        self._ranks, self._places = array("Q"), array("Q")

    def add(self, order: int, place: int) -> None:
        """A chat whose line begins at byte `place`."""
        self._ranks.append(order)
        self._places.append(place)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        for i in sorted(range(len(self._ranks)), key=self._ranks.__getitem__):
            yield self._places[i]


def gather(
    config: PrepareConfig, store: IO[bytes], tallies: Sequence[SourceTally], progress: Progress
) -> list[Candidates]:
    """First pass: every good chat into the spool."""
    evaluations, duplicates = Evaluations(config.exclude), Duplicates()
    names: set[str] = set()
    made = []
    for source, tally in zip(config.sources, tallies, strict=True):
        candidates = Candidates()
        for where, chat in chats_of_source(source):
            tally.rows += 1
            progress(f"rows of {source.name}", tally.rows, None)
            try:
                if isinstance(chat, RowError):
                    raise chat
                check_chat(chat, config.drop_unanswered)
                evaluations.check(chat)
                duplicates.check(chat)
            except RowError as error:
                tally.drop(where, error)
                continue
            line = chat_line(chat)
            if chat.id in names:  # rows that share an id but not what they say
                chat = chat.model_copy(update={"id": f"{chat.id}:{hashlib.sha256(line.encode()).hexdigest()[:8]}"})
                line = chat_line(chat)
            names.add(chat.id)
            candidates.add(rank(config.seed, chat.id), store.tell())
            store.write(json.dumps(where).encode() + b"\t" + line.encode())
        tally.candidates = len(candidates)
        made.append(candidates)
    return made


def check_chat(chat: Chat, drop_unanswered: bool) -> None:
    """RowError if nothing can be learned or asked."""
    if not any(message.role == "user" for message in chat.messages):
        raise RowError(NO_QUESTION, "no turn is the user's")
    for number, message in enumerate(chat.messages, start=1):
        if (message.content or "").strip() or message.tool_calls:
            continue
        if message.role == "assistant":
            raise RowError(EMPTY_ANSWER, f"turn {number}")
        if message.role == "user":
            raise RowError(EMPTY_QUESTION, f"turn {number}")
    if drop_unanswered and chat.messages[-1].role != "assistant":
        raise RowError(UNANSWERED, f"it is the {chat.messages[-1].role}'s")


def fitted(store: IO[bytes], places: Candidates, fitter: ChatFitter | None, tally: SourceTally) -> Iterator[Chat]:
    """Second pass, one source: its chats in the blend's order, rendered if there is a target."""
    for place in places:
        tally.tried += 1
        store.seek(place)
        where, line = store.readline().split(b"\t", 1)
        chat = Chat.model_validate_json(line)
        try:
            if fitter is not None:
                chat, cut = fitter.fit(chat)
                tally.cut += cut
        except RowError as error:
            tally.drop(json.loads(where), error)
            continue
        yield chat
