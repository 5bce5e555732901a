"""The journal of a regeneration: every reply is written and synced to disk as one line before it is used.

It can be killed at any moment: a line counts once its line break is written, and an incomplete last line is removed
when the file is opened again. The first line holds the settings that the answers were made with. If a question has
several entries, the last one counts.
"""

from __future__ import annotations

import json
import os
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas.config import differences
from eyas.data.regenerate.entries import ENTRY, Answer, Question, Unanswered
from eyas.errors import DataError, OutputError, UsageError
from eyas.files import FileLock, sync_folder


class Journal:
    """An open journal, locked against other processes; memory holds only an index of its lines."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or create the journal at `path`.

        Raises UsageError if another process has it open, or its answers were made with other settings; DataError if a
        complete line is damaged; OutputError if the file can't be written.
        """
        self.path = path
        self._entries: dict[tuple[str, int], tuple[int, str, bool]] = {}  # -> offset, digest, answered
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path)
            self._file = FileIO(path, "a")  # unbuffered, so the rest of a failed write isn't written later
            self._lines = path.open("rb")
        except OSError as error:
            raise OutputError(f"can't write the journal {path}: {error.strerror}") from error
        try:
            self._read(json.loads(json.dumps(settings)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and release its lock."""
        self._lines.close()
        self._file.close()
        self._lock.release()

    @property
    def answered(self) -> int:
        """The number of questions that have an answer."""
        return sum(answered for _, _, answered in self._entries.values())

    def find(self, question: Question) -> Answer | Unanswered | None:
        """The last entry for exactly this question; None if there is none."""
        known = self._entries.get((question.id, question.turn))
        if known is None or known[1] != question.digest:
            return None
        self._lines.seek(known[0])
        return ENTRY.validate_json(self._lines.readline())

    def append(self, entry: Answer | Unanswered) -> None:
        """Write an entry; once this returns, it survives a kill and a power failure."""
        self._index(entry, self._write(entry.model_dump_json(exclude_none=True)))

    def _write(self, line: str) -> int:
        """Append a line and return the offset at which it begins; after an error the file is as before."""
        data = (line + "\n").encode()
        start = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(start)
            raise OutputError(
                f"can't write the journal {self.path}: {error.strerror}. Nothing is lost: solve this and run the same "
                "command again"
            ) from error
        return start

    def _read(self, settings: dict[str, Any]) -> None:
        offset = 0
        for number, line in enumerate(self._lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                if number == 1:
                    self._compare(json.loads(line)["settings"], settings)
                else:
                    self._index(ENTRY.validate_json(line), offset)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{self.path}:{number} is damaged, or the file is not a journal. Delete the line to have its chat "
                    "answered again, or the file to start afresh"
                ) from error
            offset += len(line)
        self._file.truncate(offset)
        if offset == 0:
            self._write(json.dumps({"settings": settings}))
            sync_folder(self.path.parent)

    def _index(self, entry: Answer | Unanswered, offset: int) -> None:
        self._entries[entry.id, entry.turn] = (offset, entry.asked, isinstance(entry, Answer))

    def _compare(self, written: dict[str, Any], now: dict[str, Any]) -> None:
        if changed := differences(written, now, _option):
            raise UsageError(
                f"{self.path} holds answers made with other settings: {'; '.join(changed)}. Restore them to resume, "
                "or choose another output to start afresh"
            )


_OPTIONS = {
    "target": "--model",
    "chat_template": "--model",
    "answered_by": "--endpoint",
    "keep_reasoning": "--reasoning",
    "sampling.max_tokens": "--max-new-tokens",
    "sampling.stop_token_ids": "--stop-token-id",
}
"""Setting -> the option that sets it, where the names differ."""


def _option(key: str) -> str:
    """The option of `eyas data regenerate` that sets a key of the settings."""
    name = "extra_body" if key.startswith("extra_body") else key.removeprefix("sampling.")
    return _OPTIONS.get(key, "--" + name.replace("_", "-"))
