"""Let the target answer the chats itself: a drafter has to guess this target, not whoever wrote the data."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.data.regenerate.batch_files import BatchFile, batch_settings, write_batch
from eyas.data.regenerate.completions import CompletionSettings
from eyas.data.regenerate.entries import Answer, Answerer, Reply
from eyas.data.regenerate.journal import Journal
from eyas.data.regenerate.output import ChatFiles, RegenerationSummary, chat_files, write_output
from eyas.data.regenerate.rewrite import OpenChats, RewriteRule, open_questions
from eyas.errors import EndpointError
from eyas.types import Stats

OUTAGES, REFUSALS = 10, 50
SAFE = "Nothing that was done is lost: mend that and run the same command again"


@dataclass
class RegenerationProgress:
    """A run so far."""

    total: int
    """Rows of the input."""
    settled: int = 0
    """Chats of which nothing more is to be asked now, those of earlier runs included."""
    answers: int = 0
    """Of this run, as are the figures below."""
    unanswered: int = 0
    tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    """Of the decoding, where it was done here."""
    began: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens per second of wall time."""
        seconds = time.monotonic() - self.began
        return self.tokens / seconds if seconds > 0 else 0.0

    def add(self, reply: Reply) -> None:
        """Count one reply."""
        if isinstance(reply.entry, Answer):
            self.answers += 1
            self.tokens += reply.entry.count
        else:
            self.unanswered += 1
        if reply.stats is not None:
            self.stats.merge(reply.stats)


class CircuitBreaker:
    """Stops a run in which nothing works: nobody answers any more, or every request so far is rejected alike."""

    def __init__(self, answered: int) -> None:
        self._answered = answered > 0
        self._outages = 0
        self._refusals: Counter[str] = Counter()

    def add(self, reply: Reply) -> None:
        """Raises EndpointError when it is time to stop."""
        entry = reply.entry
        if isinstance(entry, Answer):
            self._answered, self._outages = True, 0
        elif entry.outage:
            self._outages += 1
            if self._outages >= OUTAGES:
                raise EndpointError(
                    f"{self._outages} chats in a row got no answer; the last one: {entry.reason}. {SAFE}"
                )
        elif entry.rejected and not self._answered:
            self._refusals[entry.reason] += 1
            if self._refusals[entry.reason] >= REFUSALS:
                raise EndpointError(f"no chat is answered, {REFUSALS} for the same reason: {entry.reason}. {SAFE}")


def regenerate(
    source: Path,
    output: Path,
    answerer: Answerer,
    rule: RewriteRule = RewriteRule(),  # noqa: B008  # frozen
    watch: Callable[[RegenerationProgress], None] = lambda _: None,
) -> RegenerationSummary:
    """Have the chats of `source` (a chat folder or a .jsonl file) answered and write them to `output`, laid out alike.

    Run again after whatever interruption, it goes on where it was; with all done it asks nobody and writes the same
    files. `watch` is told after every reply. Errors: UsageError, DataError, OutputError, EndpointError, and what the
    answerer raises.
    """
    files = chat_files(source, output)
    settings = run_settings(answerer.settings, rule)
    with Journal(files.journal, settings) as journal:
        answer_all(files, answerer, rule, journal, watch)
        return write_output(files, rule, journal, settings)


def write_requests(
    source: Path, output: Path, path: Path, completions: CompletionSettings, rule: RewriteRule
) -> list[BatchFile]:
    """Write what is left to ask as batch files. `regenerate` with a `BatchAnswerer` of the same settings reads the
    results; with all turns, write and read again until nothing is left to ask."""
    files = chat_files(source, output)
    with Journal(files.journal, run_settings(batch_settings(completions), rule)) as journal:
        return write_batch(path, open_questions(files.chats(), rule, journal), completions)


def run_settings(answerer: dict[str, Any], rule: RewriteRule) -> dict[str, Any]:
    """What a journal's answers depend on; unfinished ones are kept in it either way."""
    return {"turns": rule.turns, **answerer}


def answer_all(
    files: ChatFiles,
    answerer: Answerer,
    rule: RewriteRule,
    journal: Journal,
    watch: Callable[[RegenerationProgress], None],
) -> None:
    """Ask until everything is answered or given up."""
    work = OpenChats(files.chats(), rule, journal)
    fuse, tally = CircuitBreaker(journal.answered), RegenerationProgress(files.count())
    with closing(answerer.answers(work.take)) as replies:
        for reply in replies:
            work.settle(reply.entry)
            tally.add(reply)
            tally.settled = work.settled
            watch(tally)
            fuse.add(reply)
