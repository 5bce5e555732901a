"""Where the chats are read and where the answered ones go: a folder gives a folder, a file gives a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.data.chats import Chat, chat_rows
from eyas.data.folder import SPLITS, read_report, split_file
from eyas.errors import DataError, UsageError


@dataclass(frozen=True)
class Layout:
    """Files in the order in which they are read and written."""

    files: tuple[tuple[Path, Path], ...]
    """(input, output)."""
    journal: Path
    folder: Path | None
    """The output folder, which gets a report; None for a single file."""

    def rows(self) -> Iterator[tuple[Path, Chat | DataError]]:
        """(output file, chat) in order; a bad row, or a second chat of the same id, is an error in its place."""
        seen: set[str] = set()
        for source, output in self.files:
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
        for source, _ in self.files:
            with source.open("rb") as lines:
                total += sum(not line.isspace() for line in lines)
        return total


def layout(source: Path, output: Path) -> Layout:
    """The layout of `source`, at `output`. Raises UsageError if the two don't go together, DataError for no chats."""
    if source.resolve() == output.resolve():
        raise UsageError(f"{output} is the input itself: choose another output")
    if source.is_dir():
        read_report(source)
        if output.is_file() or output.suffix == ".jsonl":
            raise UsageError(f"{source} is a chat folder, so the output is one too: {output} is no name for a folder")
        files = tuple((split_file(source, name), split_file(output, name)) for name in SPLITS)
        return Layout(files, output / "journal.jsonl", output)
    if not source.exists():
        raise DataError(f"there are no chats at {source}: give a chat folder (`eyas data prepare`) or a .jsonl file")
    if output.is_dir():
        raise UsageError(f"{source} is a single file, so the output is one too: {output} is a folder")
    return Layout(((source, output),), output.with_name(output.name + ".journal"), None)
