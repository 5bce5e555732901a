"""From the journal to the finished files: the same bytes in whatever order it was filled, however often interrupted.

Every file is replaced whole; in a folder the report goes first and comes back last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.data.chats.folder import REPORT, SPLITS, read_report, split_file, write_report
from eyas.data.regenerate.entries import Unanswered
from eyas.data.regenerate.journal import Journal
from eyas.data.regenerate.rewrite import Rewrite, RewriteRule, replay
from eyas.errors import DataError, OutputError, UsageError
from eyas.files import StagedFiles, sync_folder
from eyas.text.chats import Chat, chat_line, chat_rows

SHOWN = 20


@dataclass
class RegenerationSummary:
    """What the finished files hold, and what not."""

    chats: int = 0
    """Written."""
    answers: int = 0
    tokens: int = 0
    """Of the answers, where the endpoint says so."""
    unfinished: int = 0
    """Answers that reached the length limit, in chats that were written."""
    dropped: int = 0
    """Chats left out because an answer is unfinished."""
    calls: int = 0
    """Answers that call tools."""
    refusals: int = 0
    """Answers that the endpoint marks as refusals."""
    cut: int = 0
    """Chats that end early, because an answer called other tools than the results that followed belong to."""
    rerendered: int = 0
    """Answers outside `answers`, because the chat template renders them otherwise in a later turn."""
    nothing_to_answer: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Rows that are no chats, and second chats of an id."""
    unanswered: list[tuple[str, str]] = field(default_factory=list)
    """(chat, reason); asked again by the next run."""
    unasked: int = 0
    """Chats that nobody has been asked about yet, or whose next turn is still to be asked."""

    def as_dict(self) -> dict[str, Any]:
        """The JSON form; of long lists the first few."""
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
    """Write the answered chats in the order of the input. Raises OutputError; the journal stays as it is."""
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
                staged.flush()  # a full disk is noticed while the old report still stands
                (files.folder / REPORT).unlink(missing_ok=True)
                sync_folder(files.folder)
        if files.folder is not None:
            write_report(files.folder, {"made_by": "regenerate", "settings": settings, **summary.as_dict()})
    except OSError as error:
        raise OutputError(
            f"can't write {files.folder or files.pairs[0][1]}: {error.strerror}. Every answer is safe in "
            f"{journal.path}: mend that and run the same command again"
        ) from error
    return summary


def _finished(chat: Chat, rule: RewriteRule, journal: Journal, summary: RegenerationSummary) -> Chat | None:
    """The answered chat, or None; counted either way."""
    rewrite = replay(chat, rule, journal)
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


# Where the chats are read and where the answered ones go: a folder gives a folder, a file gives a file.


@dataclass(frozen=True)
class ChatFiles:
    """Files in the order in which they are read and written."""

    pairs: tuple[tuple[Path, Path], ...]
    """(input, output) paths, in the order in which they are read and written."""
    journal: Path
    folder: Path | None
    """The output folder, which gets a report; None for a single file."""

    def rows(self) -> Iterator[tuple[Path, Chat | DataError]]:
        """(output file, chat) in order; a bad row, or a second chat of the same id, is an error in its place."""
        seen: set[str] = set()
        for source, output in self.pairs:
            for row in chat_rows(source):
                if isinstance(row, DataError):
                    yield output, row
                elif row.id in seen:
                    yield output, DataError(f"{source}: another chat is named {row.id} too; only the first counts")
                else:
                    seen.add(row.id)
                    yield output, row

    def chats(self) -> Iterator[Chat]:
        """The good rows."""
        return (row for _, row in self.rows() if isinstance(row, Chat))

    def count(self) -> int:
        """Rows, good or bad, without reading them closely."""
        total = 0
        for source, _ in self.pairs:
            with source.open("rb") as lines:
                total += sum(not line.isspace() for line in lines)
        return total


def chat_files(source: Path, output: Path) -> ChatFiles:
    """The layout of `source`, at `output`. Raises UsageError if the two don't go together, DataError for no chats."""
    if source.resolve() == output.resolve():
        raise UsageError(f"{output} is the input itself: choose another output")
    if source.is_dir():
        read_report(source)
        if output.is_file() or output.suffix == ".jsonl":
            raise UsageError(f"{source} is a chat folder, so the output is one too: {output} is no name for a folder")
        pairs = tuple((split_file(source, name), split_file(output, name)) for name in SPLITS)
        return ChatFiles(pairs, output / "journal.jsonl", output)
    if not source.exists():
        raise DataError(f"there are no chats at {source}: give a chat folder (`eyas data prepare`) or a .jsonl file")
    if output.is_dir():
        raise UsageError(f"{source} is a single file, so the output is one too: {output} is a folder")
    return ChatFiles(((source, output),), output.with_name(output.name + ".journal"), None)
