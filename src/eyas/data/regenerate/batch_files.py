"""OpenAI Batch files: writes requests to upload and reads back results in any order."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eyas.data.regenerate.completions import CompletionSettings, GarbageError
from eyas.data.regenerate.entries import Question, Reply, Take, unanswered
from eyas.errors import DataError, OutputError, UsageError
from eyas.files import StagedFiles

REQUESTS, BYTES = 50_000, 200_000_000
"""OpenAI's limits for one batch file: requests and bytes."""
URL = "/v1/chat/completions"


def custom_id(question: Question) -> str:
    """The `custom_id` of a question's request: `chat#turn`."""
    return f"{question.id}#{question.turn}"


def batch_settings(completions: CompletionSettings) -> dict[str, Any]:
    """The settings on which the answers of a batch depend, for the journal."""
    return {"answered_by": "batch", **completions.model_dump(mode="json")}


class BatchFile(NamedTuple):
    """A file to upload and the number of requests in it."""

    path: Path
    requests: int


def write_batch(
    path: Path,
    questions: Iterable[Question],
    completions: CompletionSettings,
    most_requests: int = REQUESTS,
    most_bytes: int = BYTES,
) -> list[BatchFile]:
    """Write requests to `path` and, once it is full, to `NAME-2.jsonl`, `NAME-3.jsonl` and so on beside it.

    All files appear together when they are complete. Raises UsageError if one exists already, since it may have been
    uploaded; DataError for a request that is larger than a file may be; OutputError if writing fails.
    """
    written: list[BatchFile] = []
    size = 0  # bytes in the last file
    try:
        with StagedFiles() as staged:
            for question in questions:
                line = _request_line(question, completions)
                if len(line) > most_bytes:
                    raise DataError(
                        f"chat {question.id}: its request has {len(line)} bytes, more than a batch file's {most_bytes}"
                    )
                if not written or written[-1].requests == most_requests or size + len(line) > most_bytes:
                    written.append(BatchFile(_unused(path, len(written) + 1), 0))
                    file, size = staged.open(written[-1].path, "wb"), 0
                file.write(line)
                size += len(line)
                written[-1] = BatchFile(written[-1].path, written[-1].requests + 1)
    except OSError as error:
        raise OutputError(f"can't write {path}: {error.strerror}. No file was written") from error
    return written


class BatchAnswerer:
    """Answers questions from the result files and error files of a batch, given in any order.

    If a request has several results, the first successful one counts.
    """

    def __init__(self, paths: Sequence[Path], completions: CompletionSettings) -> None:
        """Index the files by `custom_id`; DataError if one can't be read."""
        self._completions = completions
        self._lines: dict[str, tuple[Path, int]] = {}  # custom_id -> file, byte offset
        self.unreadable = 0
        """The number of lines that are not results."""
        self._good: set[str] = set()
        for path in paths:
            self._index(path)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the requests; see `Answerer.settings`."""
        return batch_settings(self._completions)

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies to the questions that have a result, in the order of the questions."""
        while questions := take(1):
            question = questions[0]
            line_start = self._lines.get(custom_id(question))
            if line_start is not None:
                yield self._reply(question, *line_start)

    def _index(self, path: Path) -> None:
        try:
            with path.open("rb") as lines:
                offset = 0
                for line in lines:
                    self._note(line, path, offset)
                    offset += len(line)
        except OSError as error:
            raise DataError(f"can't read the results {path}: {error.strerror}") from error

    def _note(self, line: bytes, path: Path, offset: int) -> None:
        if line.isspace():
            return
        try:
            result = json.loads(line)
            name = result["custom_id"]
            good = result.get("error") is None and result["response"]["status_code"] == 200
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unreadable += 1
            return
        if name not in self._lines or (good and name not in self._good):
            self._lines[name] = (path, offset)
        if good:
            self._good.add(name)

    def _reply(self, question: Question, path: Path, offset: int) -> Reply:
        with path.open("rb") as lines:
            lines.seek(offset)
            result = json.loads(lines.readline())
        response = result.get("response") or {}
        if result.get("error") is not None or response.get("status_code") != 200:
            problem = result.get("error") or response.get("body") or response
            return unanswered(question, f"the batch says {json.dumps(problem, ensure_ascii=False)[:200]}")
        try:
            return Reply(self._completions.answer(question, response.get("body")))
        except GarbageError as error:
            return unanswered(question, f"the batch's result: {error}")


def _unused(path: Path, number: int) -> Path:
    """The path of file `number`, counted from 1; UsageError if it exists."""
    numbered = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
    if numbered.exists():
        raise UsageError(f"{numbered} exists and may have been uploaded: choose another name, or remove the file")
    return numbered


def _request_line(question: Question, completions: CompletionSettings) -> bytes:
    request = {
        "custom_id": custom_id(question),
        "method": "POST",
        "url": URL,
        "body": completions.body(question),
    }
    return (json.dumps(request, ensure_ascii=False) + "\n").encode()
