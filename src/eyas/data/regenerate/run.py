"""Runs a regeneration: the target answers chats itself, because a drafter has to guess it, not the data's author.

Every reply is written to a journal first, so a run can be interrupted and resumed at any time.

The output doesn't depend on the order of the journal's entries or on interruptions. Files are replaced atomically; in a
folder, the report is removed first and written last. The output is a folder if the input is, and else a single file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.data.chats.folder import REPORT, SPLITS, read_report, split_file, write_report
from eyas.data.regenerate.endpoint import BatchFile, CompletionSettings, batch_settings, write_batch
from eyas.data.regenerate.journal import Answer, Answerer, Journal, Reply, Unanswered
from eyas.data.regenerate.rewrite import OpenChat, OpenChats, Rewrite, RewriteRule, replay
from eyas.errors import DataError, EndpointError, OutputError, UsageError
from eyas.files import StagedFiles, json_lines, sync_folder
from eyas.text.chats import Chat, chat_line, chat_rows
from eyas.types import Stats

SHOWN = 20
"""Items of each list that the report shows."""


@dataclass
class RegenerationSummary:
    """Counts of what was written, what was left out, and why."""

    chats: int = 0
    """Chats written to the output."""
    answers: int = 0
    """Answers in the chats that were written."""
    tokens: int = 0
    """Tokens of these answers, as far as the endpoint reports them."""
    unfinished: int = 0
    """Answers that reached the length limit, in chats that were written."""
    dropped: int = 0
    """Chats left out because an answer is unfinished."""
    calls: int = 0
    """Answers that contain tool calls."""
    refusals: int = 0
    """Answers that the endpoint marked as refusals."""
    cut: int = 0
    """Chats cut short because an answer didn't call the tools whose results come next."""
    rerendered: int = 0
    """Answers without a token range, because the chat template renders them differently in a later turn."""
    nothing_to_answer: int = 0
    """Chats without a turn for the assistant to answer."""
    unreadable: list[str] = field(default_factory=list)
    """Messages about rows that are not chats, or that repeat an id."""
    unanswered: list[tuple[str, str]] = field(default_factory=list)
    """(chat id, reason) of failed chats, which the next run tries again."""
    unasked: int = 0
    """Chats with a question that has neither an answer nor a failure yet."""

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, with only the first `SHOWN` items of each list."""
        lists = {
            "unreadable": {"count": len(self.unreadable), "first": self.unreadable[:SHOWN]},
            "unanswered": {
                "count": len(self.unanswered),
                "first": [{"id": name, "reason": reason} for name, reason in self.unanswered[:SHOWN]],
            },
        }
        return vars(self) | lists


def write_output(
    files: ChatFiles, rule: RewriteRule, journal: Journal, settings: dict[str, Any]
) -> RegenerationSummary:
    """Write the answered chats in the order of the input. Raises OutputError; the journal is not changed."""
    summary = RegenerationSummary()
    try:
        with StagedFiles() as staged:
            outputs = {output: staged.open(output) for _, output in files.pairs}
            for output, row in files.rows():
                if isinstance(row, DataError):
                    summary.unreadable.append(str(row))
                    continue
                chat = _finished(row, rule, journal, summary)
                if chat is not None:
                    outputs[output].write(chat_line(chat))
            if files.folder is not None:
                staged.flush()  # detect a full disk before the old report is removed
                (files.folder / REPORT).unlink(missing_ok=True)
                sync_folder(files.folder)
        if files.folder is not None:
            write_report(files.folder, {"made_by": "regenerate", "settings": settings, **summary.as_dict()})
    except OSError as error:
        raise OutputError(
            f"can't write {files.folder or files.pairs[0][1]}: {error.strerror}. All answers are saved in "
            f"{journal.path}: solve this and run the same command again"
        ) from error
    return summary


def _finished(chat: Chat, rule: RewriteRule, journal: Journal, summary: RegenerationSummary) -> Chat | None:
    """The answered chat, or None if it isn't complete; `summary` counts it either way."""
    rewrite = replay(Rewrite(chat, rule), journal)
    question = rewrite.question()
    if question is not None:
        found = journal.find(question)
        if isinstance(found, Unanswered):
            summary.unanswered.append((chat.id, found.reason))
        else:
            summary.unasked += 1
    elif not rewrite.answers:
        summary.nothing_to_answer += 1
    elif rewrite.dropped:
        summary.dropped += 1
    else:
        _count(rewrite, summary)
        return rewrite.chat()
    return None


def _count(rewrite: Rewrite, summary: RegenerationSummary) -> None:
    summary.chats += 1
    summary.cut += rewrite.cut
    summary.rerendered += rewrite.rerendered
    for answer in rewrite.answers:
        summary.answers += 1
        summary.tokens += answer.count
        summary.unfinished += answer.finish_reason == "length"
        summary.calls += answer.message.tool_calls is not None
        summary.refusals += answer.refused


@dataclass(frozen=True)
class ChatFiles:
    """The input and output files of a regeneration, and its journal."""

    pairs: tuple[tuple[Path, Path], ...]
    """(input, output) paths, in the order in which they are read and written."""
    journal: Path
    folder: Path | None
    """The output folder, which gets a report; None if the output is a single file."""

    def rows(self) -> Iterator[tuple[Path, Chat | DataError]]:
        """(output file, chat) in order; rows that are not chats, or that repeat an id, are errors instead."""
        seen: set[str] = set()
        for source, output in self.pairs:
            for row in chat_rows(source):
                if isinstance(row, DataError):
                    yield output, row
                elif row.id in seen:
                    yield output, DataError(f"{source}: several chats have the id {row.id}; only the first is used")
                else:
                    seen.add(row.id)
                    yield output, row

    def chats(self) -> Iterator[Chat]:
        """The rows that are chats, in order."""
        return (row for _, row in self.rows() if isinstance(row, Chat))

    def count(self) -> int:
        """The number of rows, good or bad, without parsing them."""
        return sum(1 for source, _ in self.pairs for _ in json_lines(source))


def chat_files(source: Path, output: Path) -> ChatFiles:
    """The files for `source` and `output`; UsageError if the two don't match, DataError if there is no input."""
    if source.resolve() == output.resolve():
        raise UsageError(f"{output} is also the input: choose another output")
    if source.is_dir():
        read_report(source)
        if output.is_file() or output.suffix == ".jsonl":
            raise UsageError(f"{source} is a chat folder, so the output must be a folder too, not the file {output}")
        pairs = tuple((split_file(source, name), split_file(output, name)) for name in SPLITS)
        return ChatFiles(pairs, output / "journal.jsonl", output)
    if not source.exists():
        raise DataError(f"there is no {source}: give a chat folder (made by `eyas data prepare`) or a .jsonl file")
    if output.is_dir():
        raise UsageError(f"{source} is a single file, so the output must be a file too, not the folder {output}")
    return ChatFiles(((source, output),), output.with_name(output.name + ".journal"), None)


OUTAGES, REFUSALS = 10, 50
"""A run stops after this many failures in a row, or this many identical refusals before any answer."""
NOTHING_LOST = "No answer is lost: solve this and run the same command again"


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
            self._answered = True
            self._outages = 0
        elif entry.outage:
            self._outages += 1
            if self._outages >= OUTAGES:
                raise EndpointError(
                    f"{self._outages} chats in a row got no answer; last reason: {entry.reason}. {NOTHING_LOST}"
                )
        elif entry.rejected and not self._answered:
            self._refusals[entry.reason] += 1
            if self._refusals[entry.reason] >= REFUSALS:
                raise EndpointError(
                    f"no chat was answered, {REFUSALS} for the same reason: {entry.reason}. {NOTHING_LOST}"
                )


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
    """Ask questions until every chat is written or has failed; `tally.settled` is increased from its present value."""
    work = OpenChats(chats, journal)
    before = tally.settled
    breaker = CircuitBreaker(journal.answered)
    with closing(answerer.answers(work.take)) as replies:
        for reply in replies:
            work.settle(reply.entry)
            tally.add(reply)
            tally.settled = before + work.settled
            watch(tally)
            breaker.add(reply)
