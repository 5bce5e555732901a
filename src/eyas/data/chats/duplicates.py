"""Chats that ask the same, exactly or nearly, and chats that ask what an evaluation asks.

Texts are compared normalised: Unicode NFKC, case folded, runs of whitespace as one space, none at either end.

Questions are near-duplicates if enough of their shingles, five words in a row, are common to both (Jaccard similarity).
Not all pairs are compared: MinHash signatures (Broder 1997) are cut into bands, and only questions that agree in a band
(locality-sensitive hashing) are compared, shingle by shingle. So whatever is dropped is as similar as it must be; of
the pairs exactly at the threshold at least nine in ten are found, and nearly all that are more similar.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from eyas.errors import DataError, RowError, UsageError
from eyas.text.chats import Chat, Message
from eyas.text.prompts import BadRow, read_prompts

EXACT = "exact duplicate"
SAME_PROMPT = "same prompt as another chat"
NEAR_DUPLICATE = "near-duplicate of another chat"
EVALUATED = "question of an evaluation file"
NEARLY_EVALUATED = "nearly a question of an evaluation file"

WORDS = 5
"""Length of a shingle; a shorter text is one shingle."""
PERMUTATIONS, SEED = 128, 1
RECALL = 0.9
"""At least this share of the pairs whose similarity is the threshold is compared."""
PER_BAND = 8
"""A question is compared with at most so many others for each of its bands, or boilerplate that thousands of questions
share would make the work quadratic. Questions that are near-duplicates agree in bands of their own, too."""
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")
"""A run of letters and digits, a Chinese or Japanese character, or a character of punctuation."""


def normalised(text: str) -> str:
    """The form in which texts are compared."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def question_key(chat: Chat) -> str:
    """The user's first message, normalised: chats that share it go to the same side of the split."""
    return next(normalised(m.content or "") for m in chat.messages if m.role == "user")


class Duplicates:
    """Remembers 16 bytes a chat for each of two ways to be a copy; the first of equal chats stays."""

    def __init__(self) -> None:
        self._chats: set[bytes] = set()
        self._prompts: set[bytes] = set()

    def check(self, chat: Chat) -> None:
        """Remember a chat; RowError if one before it is the same or has the same prompt.

        The prompt is everything before the last answer, and the tools.
        """
        exact = _digest([message.model_dump(mode="json", exclude={"tool_call_id"}) for message in chat.messages], chat)
        if exact in self._chats:
            raise RowError(EXACT, chat.id)
        self._chats.add(exact)
        prompt = _digest([_loose(message) for message in prompt_of(chat.messages)], chat)
        if prompt in self._prompts:
            raise RowError(SAME_PROMPT, chat.id)
        self._prompts.add(prompt)


class Evaluations:
    """The questions of evaluations' prompt files."""

    def __init__(self, files: Iterable[Path]) -> None:
        """DataError if a file can't be read or has a bad row: a question overlooked here would be trained on."""
        self.questions: set[str] = set()
        """Normalised, those of later turns included."""
        for file in files:
            for row in read_prompts(file):
                if isinstance(row, BadRow):
                    raise DataError(row.error)
                turns = row.turns or ([row.prompt] if row.prompt is not None else [])
                turns = [*turns, *(m.content or "" for m in row.messages or () if m.role == "user")]
                if not turns:
                    raise DataError(f"{row.where}: token ids can't be compared with chats: give the text")
                self.questions.update(map(normalised, turns))

    def check(self, chat: Chat) -> None:
        """RowError if any message of the user is a question of an evaluation."""
        for message in chat.messages:
            if message.role == "user" and normalised(message.content or "") in self.questions:
                raise RowError(EVALUATED, chat.id)


class NearDuplicates:
    """Chats so far, by the bands of their questions' signatures: some 2 kB of memory a chat.

    A chat's question is all that the user says before the last answer. It is compared with the questions of chats that
    have the same system prompt and the same tools.
    """

    def __init__(self, threshold: float, chat_at: Callable[[int], Chat], evaluated: Iterable[str] = ()) -> None:
        """`threshold` is the least Jaccard similarity of near-duplicates, `chat_at` reads the chat at an offset of the
        spool, `evaluated` are questions of evaluations. UsageError if datasketch isn't installed.
        """
        self._threshold, self._chat_at, self._bands = threshold, chat_at, _Bands(threshold)
        self._offsets: dict[int, tuple[int, ...]] = {}  # band -> chats
        self._evaluated: dict[int, list[frozenset[str]]] = {}  # band -> questions
        for text in sorted(evaluated):
            question = frozenset(shingles(text))
            for band in self._bands.of(question, ""):
                self._evaluated.setdefault(band, []).append(question)

    def check(self, chat: Chat, offset: int) -> None:
        """Remember a chat and its offset; RowError if its question is nearly that of an evaluation or of a chat before.

        A question of an evaluation is looked for in every message of the user.
        """
        if self._evaluated:
            for message in chat.messages:
                if message.role == "user" and self._is_evaluated(shingles(message.content or "")):
                    raise RowError(NEARLY_EVALUATED, chat.id)
        question = shingles(_question(chat))
        bands = self._bands.of(question, _context(chat))
        found = [self._offsets.get(band, ()) for band in bands]
        for other in map(self._chat_at, dict.fromkeys(offset for offsets in found for offset in offsets)):
            if similarity(question, shingles(_question(other))) >= self._threshold:
                raise RowError(NEAR_DUPLICATE, f"{chat.id} is like {other.id}")
        for band, offsets in zip(bands, found, strict=True):
            if len(offsets) < PER_BAND:
                self._offsets[band] = (*offsets, offset)

    def _is_evaluated(self, message: set[str]) -> bool:
        others = {other for band in self._bands.of(message, "") for other in self._evaluated.get(band, ())}
        return any(similarity(message, other) >= self._threshold for other in others)


class _Bands:
    """MinHash signatures, cut into as wide bands as the wanted recall at a threshold allows."""

    def __init__(self, threshold: float) -> None:
        try:
            from datasketch import MinHash
        except ImportError:
            raise UsageError(
                "near-duplicates are found with datasketch: pip install 'eyas[data]', or write --near-duplicates off"
            ) from None
        self._empty = MinHash(PERMUTATIONS, seed=SEED, scheme="affine32")
        # one of b bands of r values agrees with probability 1 - (1 - s^r)^b at a similarity of s
        widths = range(1, PERMUTATIONS // 2 + 1)
        self._width = max(r for r in widths if 1 - (1 - threshold**r) ** (PERMUTATIONS // r) >= RECALL)

    def of(self, question: Iterable[str], context: str) -> list[int]:
        """A number of 64 bits for each band; those of different contexts never agree."""
        signature = self._empty.copy()
        signature.update_batch([shingle.encode() for shingle in question])
        values = signature.hashvalues
        starts = range(0, PERMUTATIONS - self._width + 1, self._width)
        return [
            int.from_bytes(_hash(f"{context} {i} ".encode() + values[i : i + self._width].tobytes())[:8], "big")
            for i in starts
        ]


def shingles(text: str) -> set[str]:
    """Every `WORDS` words in a row, normalised."""
    words = _WORD.findall(normalised(text))
    return {" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}


def similarity(one: set[str] | frozenset[str], other: set[str] | frozenset[str]) -> float:
    """Jaccard similarity: the share of common elements among all elements of both sets, neither of them empty."""
    return len(one & other) / len(one | other)


def prompt_of(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages before the last answer; all of them if the chat ends with a question."""
    return messages[:-1] if messages[-1].role == "assistant" else messages


def _question(chat: Chat) -> str:
    return "\n".join(message.content or "" for message in prompt_of(chat.messages) if message.role == "user")


def _context(chat: Chat) -> str:
    return _digest([_loose(m) for m in chat.messages if m.role in ("system", "developer")], chat).hex()


def _loose(message: Message) -> object:
    calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or ()]
    return [message.role, normalised(message.content or ""), calls]


def _digest(messages: list[object], chat: Chat) -> bytes:
    return _hash(json.dumps([messages, chat.tools], sort_keys=True).encode())


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]
