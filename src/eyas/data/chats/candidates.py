"""Good chats on disk between two passes: written as they are read, read back in the order of the blend."""

from __future__ import annotations

import hashlib
import heapq
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeVar

from eyas.assets import named_target
from eyas.data.chats.config import PrepareConfig
from eyas.data.chats.duplicates import Duplicates, Evaluations
from eyas.data.chats.sources import chats_of_source
from eyas.data.chats.tally import SourceTally
from eyas.data.tokens.tokenize import ChatTokenizer
from eyas.errors import RowError
from eyas.text.chats import Chat, chat_line

EMPTY_ANSWER = "empty answer"
EMPTY_QUESTION = "empty question"
NO_QUESTION = "no question"
UNANSWERED = "the last turn is not the assistant's"

Progress = Callable[[str, int, int | None], None]
"""Told the stage, how many rows or chats are done, and of how many (if known)."""


class CandidateChats:
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
) -> list[CandidateChats]:
    """First pass: every good chat into the spool."""
    evaluations, duplicates = Evaluations(config.exclude), Duplicates()
    names: set[str] = set()
    made = []
    for source, tally in zip(config.sources, tallies, strict=True):
        candidates = CandidateChats()
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


def fitted(store: IO[bytes], places: CandidateChats, fitter: ChatFitter | None, tally: SourceTally) -> Iterator[Chat]:
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


# Sources in fixed proportions, chat by chat; the same seed gives the same chats whatever the order of the rows.


T = TypeVar("T")


def rank(seed: int, chat_id: str) -> int:
    """A chat's place in its source's shuffled order, 64 bits: by its id, so that rows can be added or reordered."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{chat_id}".encode()).digest()[:8], "big")


def take_turns(
    sources: Sequence[Iterator[T]], weights: Sequence[float], total: int | None, strict: bool
) -> Iterator[tuple[int, T]]:
    """(source, item) in turns: at any moment each source has had its weight's share of them, to within one.

    Ends after `total` items, or with everything. If `strict`, no source gets more than its share because another runs
    dry: that one's turns are lost, and without a `total` the blend ends there.
    """
    # a source's turn k = 0, 1, ... is due at (k + 1/2) / weight
    due = [(0.5 / weight, i, 0) for i, weight in enumerate(weights)]
    heapq.heapify(due)
    dry: set[int] = set()
    turns = 0
    while due and len(dry) < len(sources) and (total is None or turns < total):
        _, source, taken = heapq.heappop(due)
        item = None if source in dry else next(sources[source], None)
        if item is None:
            dry.add(source)
            if strict and total is None:
                return
        else:
            yield source, item
        if item is not None or strict:
            turns += 1
            heapq.heappush(due, ((taken + 1.5) / weights[source], source, taken + 1))


# Chats for one target: rendered, their answers marked, and within a length.


TOO_LONG = "too long"
FEW_TOKENS = "too few answer tokens"
FOREIGN = "tokens of another target"


class ChatFitter:
    """Gives chats their tokens and answers; RowError for those that don't fit."""

    def __init__(self, model: str, max_length: int | None, cut: bool, min_answer_tokens: int) -> None:
        """Loads the target's tokenizer only."""
        from eyas.targets import load_tokenizer

        self._tokenizer = tokenizer = load_tokenizer(model)
        stops = _generation_stops(model)
        self._chats = ChatTokenizer(tokenizer, stops)
        self._max_length, self._cut, self._min_answer_tokens = max_length, cut, min_answer_tokens
        told = (tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), str(stops))
        self.identity = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
        """Of everything that decides how a chat is rendered."""
        self.end_mark = self._chats.end_mark

    def fit(self, chat: Chat) -> tuple[Chat, bool]:
        """The chat with tokens and answers, and whether it lost turns. One without any answer stays as it is."""
        if not any(message.role == "assistant" for message in chat.messages):
            return chat, False
        if chat.tokens is not None:
            self._check_own(chat)
        exact = self._chats.exact(chat)
        fitted = exact if self._fits(exact) else self._shortened(exact)
        count = sum(stop - start for start, stop in fitted.answers or ())
        if count < self._min_answer_tokens:
            raise RowError(FEW_TOKENS, f"{count} answer tokens, fewer than {self._min_answer_tokens}")
        return fitted, fitted is not exact

    def _check_own(self, chat: Chat) -> None:
        """RowError if the tokens that a chat carries don't say, to this tokenizer, what its last answer says."""
        said = next(message.content or "" for message in reversed(chat.messages) if message.role == "assistant")
        known = max(chat.tokens or (0,)) < len(self._tokenizer)
        if not known or said.strip() not in self._tokenizer.decode(chat.tokens):
            raise RowError(FOREIGN, "its tokens don't hold its last answer: prepare the chats without them")

    def _fits(self, chat: Chat) -> bool:
        return self._max_length is None or len(chat.tokens or ()) <= self._max_length

    def _shortened(self, chat: Chat) -> Chat:
        """The most turns that fit, up to and with an answer; rendered anew, as a template may see the end of a chat."""
        if self._cut:
            bare = chat.model_copy(update={"tokens": None, "answers": None})
            ends = [i + 1 for i, message in enumerate(chat.messages) if message.role == "assistant"]
            for end in reversed(ends):
                shorter = self._chats.exact(bare.model_copy(update={"messages": chat.messages[:end]}))
                if self._fits(shorter):
                    return shorter
        raise RowError(TOO_LONG, f"{len(chat.tokens or ())} tokens, more than {self._max_length}")


def _generation_stops(model: str) -> list[int]:
    """The end tokens of the target's generation config, if it has one."""
    from transformers import GenerationConfig

    try:
        stops: Any = GenerationConfig.from_pretrained(named_target(model)).eos_token_id
    except OSError:
        return []
    return [stops] if isinstance(stops, int) else list(stops or ())
