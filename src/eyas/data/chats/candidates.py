"""Candidate chats of a blend: written to a spool file on disk, then drawn in blend order and rendered for the target.

Sources are blended in fixed proportions, chat by chat. The same seed draws the same chats, whatever the order of the
rows.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeVar

from eyas.assets import named_target
from eyas.data.chats.config import PrepareConfig
from eyas.data.chats.duplicates import Duplicates, Evaluations, NearDuplicates
from eyas.data.chats.sources import chats_of_source
from eyas.data.chats.tally import SourceTally
from eyas.data.tokens.tokenize import ChatTokenizer
from eyas.errors import RowError
from eyas.hub import find_model
from eyas.text.chats import Chat, chat_line

EMPTY_ANSWER = "empty answer"
EMPTY_QUESTION = "empty question"
NO_QUESTION = "no question"
UNANSWERED = "the last turn is not the assistant's"
TOO_LONG = "too long"
FEW_TOKENS = "too few answer tokens"
FOREIGN = "tokens of another target"

Progress = Callable[[str, int, int | None], None]
"""Called with the stage's name, the number of rows or chats done, and their total (None if unknown)."""
T = TypeVar("T")


class CandidateChats:
    """Spool offsets of one source's chats, iterated in the order in which the blend draws them; 16 bytes a chat."""

    def __init__(self) -> None:
        self._ranks, self._offsets = array("Q"), array("Q")

    def add(self, order: int, offset: int) -> None:
        """Add a chat whose line begins at byte `offset`; the blend draws the lowest `order` first."""
        self._ranks.append(order)
        self._offsets.append(offset)

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[int]:
        for i in sorted(range(len(self._ranks)), key=self._ranks.__getitem__):
            yield self._offsets[i]


def gather(
    config: PrepareConfig,
    spool: IO[bytes],
    evaluations: Evaluations,
    tallies: Sequence[SourceTally],
    progress: Progress,
) -> list[CandidateChats]:
    """First pass: write every usable chat to the spool and return the candidates of each source."""
    duplicates = Duplicates()
    ids: set[str] = set()
    found = []
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
            if chat.id in ids:  # another row with this id and other content
                chat = chat.model_copy(update={"id": f"{chat.id}:{hashlib.sha256(line.encode()).hexdigest()[:8]}"})
                line = chat_line(chat)
            ids.add(chat.id)
            candidates.add(rank(config.seed, chat.id), spool.tell())
            spool.write(json.dumps(where).encode() + b"\t" + line.encode())
        tally.candidates = len(candidates)
        found.append(candidates)
    return found


def check_chat(chat: Chat, drop_unanswered: bool) -> None:
    """Raise RowError if a chat holds no question, an empty message, or (if those are dropped) no final answer."""
    if not any(message.role == "user" for message in chat.messages):
        raise RowError(NO_QUESTION, "the chat has no user message")
    for number, message in enumerate(chat.messages, start=1):
        if (message.content or "").strip() or message.tool_calls:
            continue
        if message.role == "assistant":
            raise RowError(EMPTY_ANSWER, f"turn {number}")
        if message.role == "user":
            raise RowError(EMPTY_QUESTION, f"turn {number}")
    if drop_unanswered and chat.messages[-1].role != "assistant":
        raise RowError(UNANSWERED, f"the last message has the role {chat.messages[-1].role}")


def read_spooled(spool: IO[bytes], offset: int) -> tuple[str, Chat]:
    """The chat at byte `offset` of the spool, preceded by where it was read from (`file:line`)."""
    spool.seek(offset)
    where, line = spool.readline().split(b"\t", 1)
    return json.loads(where), Chat.model_validate_json(line)


def drawn(
    spool: IO[bytes],
    candidates: CandidateChats,
    fitter: ChatFitter | None,
    near_duplicates: NearDuplicates | None,
    tally: SourceTally,
) -> Iterator[Chat]:
    """Second pass over one source: its chats in blend order, rendered for the target if there is one."""
    for offset in candidates:
        tally.tried += 1
        where, chat = read_spooled(spool, offset)
        try:
            rendered, cut = (chat, False) if fitter is None else fitter.fit(chat)
            if near_duplicates is not None:
                near_duplicates.check(chat, offset)
        except RowError as error:
            tally.drop(where, error)
            continue
        tally.cut += cut
        yield rendered


def rank(seed: int, chat_id: str) -> int:
    """The sort key of a chat in its source's shuffled order: 64 bits, from seed and id, so rows may be reordered."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{chat_id}".encode()).digest()[:8], "big")


def take_turns(
    sources: Sequence[Iterator[T]], weights: Sequence[float], total: int | None, strict: bool
) -> Iterator[tuple[int, T]]:
    """Interleave sources by weight; yields (source index, item), each source within one item of its share at any time.

    Ends after `total` items, or when all sources are exhausted. If `strict`, an exhausted source's share is not given
    to the others: its turns are skipped, and without a `total` the blend ends there.
    """
    # turn k = 0, 1, ... of a source is due at (k + 1/2) / weight
    due = [(0.5 / weight, i, 0) for i, weight in enumerate(weights)]
    heapq.heapify(due)
    exhausted: set[int] = set()
    turns = 0
    while due and len(exhausted) < len(sources) and (total is None or turns < total):
        _, source, taken = heapq.heappop(due)
        item = None if source in exhausted else next(sources[source], None)
        if item is None:
            exhausted.add(source)
            if strict and total is None:
                return
        else:
            yield source, item
        if item is not None or strict:
            turns += 1
            heapq.heappush(due, ((taken + 1.5) / weights[source], source, taken + 1))


class ChatFitter:
    """Renders chats with the target's template, marks their answers and enforces a maximum length."""

    def __init__(self, model: str, max_length: int | None, cut: bool, min_answer_tokens: int) -> None:
        """Load the tokenizer of `model`. `cut`: shorten chats beyond `max_length` tokens instead of dropping them."""
        from eyas.targets import load_tokenizer

        self._tokenizer = tokenizer = load_tokenizer(model)
        stops = _generation_stops(model)
        self._chats = ChatTokenizer(tokenizer, stops)
        self._max_length, self._cut, self._min_answer_tokens = max_length, cut, min_answer_tokens
        decisive = (tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), str(stops))
        self.identity = hashlib.sha256("\0".join(decisive).encode()).hexdigest()[:16]
        """Hash of the tokenizer, the chat template and the end tokens: all that decides how chats are rendered."""
        self.end_mark = self._chats.end_mark

    def fit(self, chat: Chat) -> tuple[Chat, bool]:
        """Return the chat with its tokens and answer spans, and whether turns were cut; without answers, unchanged.

        Raises RowError if it is too long, has too few answer tokens, or carries tokens of another target.
        """
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
        """Raise RowError if the tokens that a chat carries don't decode to a text that holds its last answer."""
        said = next(message.content or "" for message in reversed(chat.messages) if message.role == "assistant")
        known = max(chat.tokens or (0,)) < len(self._tokenizer)
        if not known or said.strip() not in self._tokenizer.decode(chat.tokens):
            raise RowError(FOREIGN, "its tokens don't decode to its last answer: remove `tokens` and `answers` from it")

    def _fits(self, chat: Chat) -> bool:
        return self._max_length is None or len(chat.tokens or ()) <= self._max_length

    def _shortened(self, chat: Chat) -> Chat:
        """The longest prefix of the chat that fits and ends with an answer; RowError if there is none.

        Every prefix is rendered anew, because a template may treat the last turn of a chat differently.
        """
        if self._cut:
            bare = chat.model_copy(update={"tokens": None, "answers": None})
            lengths = [i + 1 for i, message in enumerate(chat.messages) if message.role == "assistant"]
            for length in reversed(lengths):
                shorter = self._chats.exact(bare.model_copy(update={"messages": chat.messages[:length]}))
                if self._fits(shorter):
                    return shorter
        raise RowError(TOO_LONG, f"{len(chat.tokens or ())} tokens, more than {self._max_length}")


def _generation_stops(model: str) -> list[int]:
    """The end token ids in the target's generation config; empty if it has none."""
    from transformers import GenerationConfig

    from eyas.targets.adapters import base_of

    try:
        stops: Any = GenerationConfig.from_pretrained(find_model(base_of(named_target(model)))).eos_token_id
    except OSError:
        return []
    return [stops] if isinstance(stops, int) else list(stops or ())
