"""Exact duplicates, near-duplicates, and chats that contain the questions of an evaluation.

Texts are compared after normalization: Unicode NFKC, case folding, runs of whitespace replaced by one space, leading
and trailing whitespace removed.

Two questions are near-duplicates if the Jaccard similarity of their shingles (five consecutive words) reaches the
threshold. Candidate pairs come from locality-sensitive hashing: MinHash signatures (Broder 1997) are cut into bands,
and only questions that agree in a band are compared, shingle by shingle. So nothing below the threshold is dropped. At
least 90% of the pairs exactly at the threshold are found, and nearly all of the more similar pairs.
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
"""Words in a shingle; a shorter text is a single shingle."""
PERMUTATIONS, SEED = 128, 1
RECALL = 0.9
"""Minimum share of the pairs exactly at the threshold that agree in a band, and so are compared."""
PER_BAND = 8
"""Maximum number of earlier questions that one band offers for comparison. Without a limit, boilerplate that thousands
of questions share would make the work quadratic; true near-duplicates agree in other bands as well."""
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")
"""Matches a run of letters and digits, one Chinese or Japanese character, or one punctuation character."""


def normalized(text: str) -> str:
    """Normalize a text for comparison, as the module's docstring describes."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def question_key(chat: Chat) -> str:
    """The first user message, normalized; chats that share it fall into the same split."""
    return next(normalized(m.content or "") for m in chat.messages if m.role == "user")


class Duplicates:
    """Finds exact duplicates of chats and of prompts; the first one seen is kept. Takes two 16-byte hashes per chat."""

    def __init__(self) -> None:
        self._chats: set[bytes] = set()
        self._prompts: set[bytes] = set()

    def check(self, chat: Chat) -> None:
        """Record a chat; RowError if an earlier one was equal or had the same prompt.

        The prompt is everything before the last answer, together with the tools.
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
    """The questions of evaluation prompt files, which must not be trained on."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read all questions. DataError if a file can't be read or has a bad row, since no question may be missed."""
        self.questions: set[str] = set()
        """The normalized questions of all turns."""
        for file in files:
            for row in read_prompts(file):
                if isinstance(row, BadRow):
                    raise DataError(row.error)
                turns = row.turns or ([row.prompt] if row.prompt is not None else [])
                turns = [*turns, *(m.content or "" for m in row.messages or () if m.role == "user")]
                if not turns:
                    raise DataError(f"{row.where}: token ids can't be compared with chats: give the prompt as text")
                self.questions.update(map(normalized, turns))

    def check(self, chat: Chat) -> None:
        """Raise RowError if any user message is a question of an evaluation."""
        for message in chat.messages:
            if message.role == "user" and normalized(message.content or "") in self.questions:
                raise RowError(EVALUATED, chat.id)


class NearDuplicates:
    """Index of the chats seen so far by the bands of their questions' signatures; takes about 2 kB per chat.

    A chat's question is all user messages before the last answer. It is compared only with the questions of chats that
    have the same system prompt and the same tools.
    """

    def __init__(self, threshold: float, chat_at: Callable[[int], Chat], evaluated: Iterable[str] = ()) -> None:
        """Make an empty index. UsageError if datasketch isn't installed.

        `threshold` is the minimum Jaccard similarity of near-duplicates, `chat_at` reads the chat at an offset of the
        spool, and `evaluated` holds the evaluation questions.
        """
        self._threshold = threshold
        self._chat_at = chat_at
        self._bands = _Bands(threshold)
        self._offsets: dict[int, tuple[int, ...]] = {}  # band -> chats
        self._evaluated: dict[int, list[frozenset[str]]] = {}  # band -> questions
        for text in sorted(evaluated):
            question = frozenset(shingles(text))
            for band in self._bands.of(question, ""):
                self._evaluated.setdefault(band, []).append(question)

    def check(self, chat: Chat, offset: int) -> None:
        """Record a chat and its offset; RowError if it nearly repeats an earlier question or an evaluation question.

        Every user message is compared with the evaluation questions.
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
                raise RowError(NEAR_DUPLICATE, f"{chat.id} is similar to {other.id}")
        for band, offsets in zip(bands, found, strict=True):
            if len(offsets) < PER_BAND:
                self._offsets[band] = (*offsets, offset)

    def _is_evaluated(self, message: set[str]) -> bool:
        others = {other for band in self._bands.of(message, "") for other in self._evaluated.get(band, ())}
        return any(similarity(message, other) >= self._threshold for other in others)


class _Bands:
    """MinHash signatures cut into bands, as wide as `RECALL` at the threshold allows."""

    def __init__(self, threshold: float) -> None:
        try:
            from datasketch import MinHash
        except ImportError:
            raise UsageError(
                "finding near-duplicates needs datasketch: pip install 'eyas[data]', or use `near_duplicates=off`"
            ) from None
        self._empty = MinHash(PERMUTATIONS, seed=SEED, scheme="affine32")
        # at a similarity of s, at least one of b bands of r values agrees with probability 1 - (1 - s^r)^b
        widths = range(1, PERMUTATIONS // 2 + 1)
        self._width = max(r for r in widths if 1 - (1 - threshold**r) ** (PERMUTATIONS // r) >= RECALL)

    def of(self, question: Iterable[str], context: str) -> list[int]:
        """A 64-bit key for each band of a question; keys of different contexts never agree."""
        signature = self._empty.copy()
        signature.update_batch([shingle.encode() for shingle in question])
        values = signature.hashvalues
        starts = range(0, PERMUTATIONS - self._width + 1, self._width)
        return [
            int.from_bytes(_hash(f"{context} {i} ".encode() + values[i : i + self._width].tobytes())[:8], "big")
            for i in starts
        ]


def shingles(text: str) -> set[str]:
    """All runs of `WORDS` consecutive words of the normalized text."""
    words = _WORD.findall(normalized(text))
    return {" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}


def similarity(one: set[str] | frozenset[str], other: set[str] | frozenset[str]) -> float:
    """Jaccard similarity of two non-empty sets: the size of the intersection over the size of the union."""
    return len(one & other) / len(one | other)


def prompt_of(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages before the final answer; all messages if the chat ends with a question."""
    return messages[:-1] if messages[-1].role == "assistant" else messages


def _question(chat: Chat) -> str:
    return "\n".join(message.content or "" for message in prompt_of(chat.messages) if message.role == "user")


def _context(chat: Chat) -> str:
    return _digest([_loose(m) for m in chat.messages if m.role in ("system", "developer")], chat).hex()


def _loose(message: Message) -> object:
    calls = [[c.function.name, c.function.arguments] for c in message.tool_calls or ()]
    return [message.role, normalized(message.content or ""), calls]


def _digest(messages: list[object], chat: Chat) -> bytes:
    return _hash(json.dumps([messages, chat.tools], sort_keys=True).encode())


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]
