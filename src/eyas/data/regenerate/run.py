"""Runs a regeneration: the target answers chats itself, since a drafter has to guess the target, not the data's author.

Every reply is written to a journal first, so a run can be interrupted and resumed at any time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.data.regenerate.batch_files import BatchFile, batch_settings, write_batch
from eyas.data.regenerate.completions import CompletionSettings
from eyas.data.regenerate.entries import Answer, Answerer, Reply
from eyas.data.regenerate.journal import Journal
from eyas.data.regenerate.open_chats import OpenChat, OpenChats, replay
from eyas.data.regenerate.output import RegenerationSummary, chat_files, write_output
from eyas.data.regenerate.rewrite import Rewrite, RewriteRule
from eyas.errors import EndpointError
from eyas.types import Stats

OUTAGES, REFUSALS = 10, 50
"""Failures in a row, and equal refusals without any answer, after which a run stops."""
SAFE = "No answer is lost: solve this and run the same command again"


@dataclass
class RegenerationProgress:
    """How far a run has come, for progress bars."""

    total: int
    """Rows of the input."""
    settled: int = 0
    """Chats that need no more work in this run, including those finished by earlier runs."""
    answers: int = 0
    """Answers given in this run."""
    unanswered: int = 0
    """Questions that failed in this run."""
    tokens: int = 0
    """Tokens of this run's answers."""
    stats: Stats = field(default_factory=Stats)
    """Statistics of decoding in this process; empty for other answerers."""
    began: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens per second of wall time."""
        seconds = time.monotonic() - self.began
        return self.tokens / seconds if seconds > 0 else 0.0

    def add(self, reply: Reply) -> None:
        """Count a reply and merge its statistics."""
        if isinstance(reply.entry, Answer):
            self.answers += 1
            self.tokens += reply.entry.count
        else:
            self.unanswered += 1
        if reply.stats is not None:
            self.stats.merge(reply.stats)


class CircuitBreaker:
    """Stops a run in which nothing works: the endpoint is down, or every request so far is refused for one reason."""

    def __init__(self, answered: int) -> None:
        self._answered = answered > 0
        self._outages = 0
        self._refusals: Counter[str] = Counter()

    def add(self, reply: Reply) -> None:
        """Count a reply. Raises EndpointError when the run should stop."""
        entry = reply.entry
        if isinstance(entry, Answer):
            self._answered, self._outages = True, 0
        elif entry.outage:
            self._outages += 1
            if self._outages >= OUTAGES:
                raise EndpointError(
                    f"{self._outages} chats in a row got no answer; last reason: {entry.reason}. {SAFE}"
                )
        elif entry.rejected and not self._answered:
            self._refusals[entry.reason] += 1
            if self._refusals[entry.reason] >= REFUSALS:
                raise EndpointError(f"no chat was answered, {REFUSALS} for the same reason: {entry.reason}. {SAFE}")


def regenerate(
    source: Path,
    output: Path,
    answerer: Answerer,
    rule: RewriteRule = RewriteRule(),  # noqa: B008  # frozen
    watch: Callable[[RegenerationProgress], None] = lambda _: None,
) -> RegenerationSummary:
    """Have the chats of `source` answered and write them to `output`; both are chat folders, or both .jsonl files.

    After an interruption, the same call resumes; once all is done, it sends nothing and writes the same files again.
    `watch` is called after every reply. Raises UsageError, DataError, OutputError, EndpointError, and whatever the
    answerer raises.
    """
    files = chat_files(source, output)
    settings = run_settings(answerer.settings, rule)
    with Journal(files.journal, settings) as journal:
        chats = (Rewrite(chat, rule) for chat in files.chats())
        answer_all(chats, answerer, journal, RegenerationProgress(files.count()), watch)
        return write_output(files, rule, journal, settings)


def write_requests(
    source: Path, output: Path, path: Path, completions: CompletionSettings, rule: RewriteRule
) -> list[BatchFile]:
    """Write the open questions as batch files.

    `regenerate` with a `BatchAnswerer` of the same settings reads the results. If all turns are rewritten, repeat both
    until no question is left.
    """
    files = chat_files(source, output)
    with Journal(files.journal, run_settings(batch_settings(completions), rule)) as journal:
        questions = (replay(Rewrite(chat, rule), journal).question() for chat in files.chats())
        return write_batch(path, (question for question in questions if question is not None), completions)


def run_settings(answerer: dict[str, Any], rule: RewriteRule) -> dict[str, Any]:
    """The settings on which a journal's entries depend; `drop_unfinished` is applied only when files are written."""
    return {"turns": rule.turns, **answerer}


def answer_all(
    chats: Iterable[OpenChat],
    answerer: Answerer,
    journal: Journal,
    tally: RegenerationProgress,
    watch: Callable[[RegenerationProgress], None],
) -> None:
    """Ask questions until every chat is written or has failed; `tally` counts on from `tally.settled` chats."""
    work, before = OpenChats(chats, journal), tally.settled
    breaker = CircuitBreaker(journal.answered)
    with closing(answerer.answers(work.take)) as replies:
        for reply in replies:
            work.settle(reply.entry)
            tally.add(reply)
            tally.settled = before + work.settled
            watch(tally)
            breaker.add(reply)
