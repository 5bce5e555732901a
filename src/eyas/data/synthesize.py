"""Synthetic chats that the target writes itself, for users who have no traffic to train on.

A chat model that is given its template up to the beginning of the user's message continues with what a user would say
(Magpie, arXiv 2406.08464). A system prompt, which isn't kept, sets the topic. Chats of several turns are continued the
same way: the target answers, then writes the user's next message. The last message is the user's, so that
`eyas data regenerate` answers every chat.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from eyas.data.chats.duplicates import Duplicates, NearDuplicates
from eyas.data.regenerate.journal import Answer, Answerer, Journal, Question, Unanswered
from eyas.data.regenerate.rewrite import replay
from eyas.data.regenerate.run import RegenerationProgress, answer_all
from eyas.errors import DataError, OutputError, RowError, UsageError
from eyas.files import writing
from eyas.text.chats import Chat, Message, chat_line

TOPICS = (
    "everyday life", "cooking and recipes", "travel plans", "health and exercise", "personal finance", "gardening",
    "home repair", "parenting", "pets", "sports", "films and series", "music", "books and literature", "games",
    "history", "geography", "politics and society", "law", "philosophy", "psychology", "religion and myths",
    "biology", "chemistry", "physics", "astronomy", "medicine", "climate and environment", "engineering",
    "arithmetic word problems", "algebra and geometry", "statistics", "logic puzzles", "Python programming",
    "JavaScript and web pages", "SQL and data bases", "debugging code", "algorithms", "Linux and shell commands",
    "machine learning", "spreadsheets", "writing e-mails", "writing stories", "writing poems", "rewriting a text",
    "summarizing a text given in the message", "translation", "English grammar", "job applications",
    "business and marketing", "role play", "brainstorming ideas", "explaining something to a child",
)  # fmt: skip
"""Default topics of the chats."""
STEERING = "You are a helpful assistant. The user asks you about {}."
"""The system prompt while a user's message is written."""

CUT_OFF = "cut off by the length limit"
SHORT = "question too short"
LONG = "question too long"
REPETITIVE = "repetitive"
LANGUAGE = "another language"
UNANSWERED = "unanswered"
COMPRESSED = 0.3
"""A text that zlib compresses to less than this share of its bytes is repetitive; English prose keeps at least 0.45."""
SHORT_TEXT = 200
"""Texts of up to this many bytes are too short for that test."""
ATTEMPTS = 20
"""Chats tried per requested chat before a run gives up."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class SynthesisRule:
    """How many chats of which kind to make, and which are good enough. Raises UsageError if none can be."""

    chats: int
    turns: int = 1
    """User messages per chat; the target answers all but the last."""
    topics: tuple[str, ...] = TOPICS
    """Topics of the system prompt, drawn uniformly; empty: no system prompt."""
    seed: int = 0
    min_words: int = 4
    """Minimum words in the first message."""
    max_words: int = 400
    """Maximum words in any user message."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes of the languages to keep; empty: all."""
    near_duplicates: float | None = 0.8
    """Minimum Jaccard similarity of near-duplicate questions, which are dropped; None: only equal ones are."""

    def __post_init__(self) -> None:
        if self.chats < 1 or self.turns < 1:
            raise UsageError("synthesis needs at least one chat of at least one turn")
        if self.min_words > self.max_words:
            raise UsageError(
                f"questions of at least {self.min_words} and at most {self.max_words} words: there are none"
            )

    def settings(self) -> dict[str, Any]:
        """The settings that decide what the target writes; filters and the number of chats may change between runs."""
        return {"synthesis": {"turns": self.turns, "topics": list(self.topics), "seed": self.seed}}


@dataclass
class SynthesisSummary:
    """What was written, and why the rest wasn't."""

    chats: int = 0
    tried: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> chats."""
    topics: Counter[str] = field(default_factory=Counter)
    """Topic -> chats that were kept."""
    refusal: str | None = None
    """Why the first of the unanswered chats got no answer."""

    @property
    def yield_rate(self) -> float:
        """The share of the tried chats that were good."""
        return self.chats / self.tried if self.tried else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, most frequent reasons first."""
        return {
            "chats": self.chats,
            "tried": self.tried,
            "yield": round(self.yield_rate, 4),
            "dropped": dict(self.dropped.most_common()),
            "topics": dict(self.topics.most_common()),
        }


class Synthesis:
    """One chat while the target writes it, message by message."""

    def __init__(self, number: int, rule: SynthesisRule) -> None:
        self.id = f"synthetic-{number:06}"
        self._turns = rule.turns
        self.topic = random.Random(f"{rule.seed} {number}").choice(rule.topics) if rule.topics else None
        self._said: list[Message] = []
        self.finished = True
        """Whether no message was cut off by the length limit."""

    def question(self) -> Question | None:
        """The next message that the target should write; None if the chat is complete, or can't be continued."""
        if not self.finished or len(self._said) == 2 * self._turns - 1 or (self._said and not self._said[-1].content):
            return None
        if self._said and self._said[-1].role == "user":
            return Question(self.id, len(self._said), tuple(self._said))
        steering = [] if self.topic is None else [Message(role="system", content=STEERING.format(self.topic))]
        return Question(self.id, len(self._said), (*steering, *self._said), role="user")

    def take(self, answer: Answer) -> None:
        """Add the message that answers `question()`, without surrounding whitespace."""
        text = (answer.message.content or "").strip()
        self._said.append(Message(role=answer.message.role, content=text))
        self.finished = answer.finish_reason != "length"

    def chat(self) -> Chat:
        """The chat without the system prompt that steered it. RowError if it was cut off or got no answer."""
        if not self.finished:
            raise RowError(CUT_OFF, self.id)
        if not self._said or self.question() is not None:
            raise RowError(UNANSWERED, self.id)
        if not self._said[-1].content:
            raise RowError(SHORT, self.id)
        return Chat(id=self.id, messages=tuple(self._said))


def check_text(chat: Chat, rule: SynthesisRule) -> None:
    """Raise RowError for a chat whose text is too short, too long, repetitive or in another language."""
    questions = [message.content or "" for message in chat.messages if message.role == "user"]
    if len(_WORD.findall(questions[0])) < rule.min_words:
        raise RowError(SHORT, chat.id)
    if any(len(_WORD.findall(text)) > rule.max_words for text in questions):
        raise RowError(LONG, chat.id)
    for message in chat.messages:
        text = (message.content or "").encode()
        if len(text) > SHORT_TEXT and len(zlib.compress(text)) < COMPRESSED * len(text):
            raise RowError(REPETITIVE, chat.id)
    if rule.languages and _identifier().classify("\n".join(questions))[0] not in rule.languages:
        raise RowError(LANGUAGE, chat.id)


@cache
def _identifier() -> Any:
    try:
        import py3langid
    except ImportError:
        raise UsageError("detecting languages needs py3langid: pip install 'eyas[data]'") from None
    return py3langid


def synthesize(
    output: Path,
    answerer: Answerer,
    rule: SynthesisRule,
    watch: Callable[[RegenerationProgress], None] = lambda _: None,
) -> SynthesisSummary:
    """Have the target write chats until `rule.chats` of them are good, and store these in the .jsonl file `output`.

    Every message is in a journal next to the output before it is used. After an interruption the same call resumes and
    writes the same bytes. Raises UsageError, OutputError, and DataError if too few chats are good; the file then has
    those that are.
    """
    if output.is_dir():
        raise UsageError(f"{output} is a folder: name a .jsonl file")
    if rule.languages:
        _identifier()  # a missing package is reported before the work
    with Journal(output.with_name(output.name + ".journal"), rule.settings() | answerer.settings) as journal:
        tally = RegenerationProgress(rule.chats)
        begun = 0
        goal = rule.chats
        chats: list[Chat] = []
        summary = SynthesisSummary()
        checks = list(_checks(rule, chats))
        while True:
            tally.total = goal
            tally.settled = begun
            answer_all((Synthesis(i, rule) for i in range(begun, goal)), answerer, journal, tally, watch)
            for made in (replay(Synthesis(i, rule), journal) for i in range(begun, goal)):
                _keep_if_good(made, checks, chats, summary, journal)
                if len(chats) == rule.chats:
                    break
            begun = goal
            summary.chats = len(chats)
            if summary.chats == rule.chats or goal >= ATTEMPTS * rule.chats:
                break
            lacking = (rule.chats - summary.chats) / max(summary.yield_rate, 0.1)
            goal = min(goal + int(lacking) + 1, ATTEMPTS * rule.chats)
        try:
            with writing(output) as file:
                file.writelines(map(chat_line, chats))
        except OSError as error:
            raise OutputError(
                f"can't write {output}: {error.strerror}. All messages are saved in the journal"
            ) from error
    if summary.chats < rule.chats:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in summary.dropped.most_common())
        why = f" ({summary.refusal})" if summary.refusal else ""
        raise DataError(f"only {summary.chats} of {summary.tried} chats are good (in {output}): {reasons}{why}")
    return summary


def _keep_if_good(
    made: Synthesis,
    checks: list[Callable[[Chat], None]],
    chats: list[Chat],
    summary: SynthesisSummary,
    journal: Journal,
) -> None:
    """Append a chat to those that are kept, or count why it isn't; chats come in the order of their numbers."""
    summary.tried += 1
    try:
        chat = made.chat()
        for check in checks:
            check(chat)
    except RowError as error:
        summary.dropped[error.reason] += 1
        if error.reason == UNANSWERED and summary.refusal is None:
            question = made.question()
            found = None if question is None else journal.find(question)
            summary.refusal = found.reason if isinstance(found, Unanswered) else None
        return
    chats.append(chat)
    summary.topics[made.topic or "any"] += 1


def _checks(rule: SynthesisRule, chats: list[Chat]) -> Iterator[Callable[[Chat], None]]:
    yield lambda chat: check_text(chat, rule)
    yield Duplicates().check
    if rule.near_duplicates is not None:
        near = NearDuplicates(rule.near_duplicates, chats.__getitem__)
        yield lambda chat: near.check(chat, len(chats))
