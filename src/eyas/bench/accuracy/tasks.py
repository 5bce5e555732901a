"""Tasks with right answers: files of problems, the prompts made of them, and metrics that score an answer.

Files come in three forms: the data set's own; the prompt files that EAGLE's evaluations use, where a problem is the
only one of `turns` and its right answer the first `reference`; and chats of a question and its answer.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from eyas.errors import DataError
from eyas.text.prompts import PromptRow


@dataclass(frozen=True)
class ProblemRow:
    """A row of a task's file."""

    id: str
    where: str
    """`file:line`, which begins messages about it."""
    fields: dict[str, Any]

    def text(self, key: str, *, meaning: str) -> str:
        """The text under a key, or the first of its list. DataError, which says what is missing, if there is none."""
        found = self.maybe_text(key)
        if found is None:
            raise DataError(f"{self.where}: `{key}` is missing or isn't text: a row needs {meaning}")
        return found

    def maybe_text(self, key: str) -> str | None:
        """The same; None if there is none."""
        value = self.fields.get(key)
        first = value[0] if isinstance(value, list) and value else value
        return first if isinstance(first, str) and first else None


def read_problems(path: Path, limit: int | None = None) -> list[ProblemRow]:
    """All rows of a file, or the first `limit`. DataError for a bad one: a score is about all problems or none."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read the problems {path}: {error}") from error
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    rows = [_problem(line, path.name, number) for number, line in islice(numbered, limit)]
    if not rows:
        raise DataError(f"{path} has no rows: write one JSON object a line")
    return rows


def _problem(line: str, file: str, number: int) -> ProblemRow:
    where = f"{file}:{number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a row is a JSON object")
    fields |= _as_turns(fields.get("messages"), where)
    if len(fields.get("turns") or ()) > 1:
        raise DataError(f"{where}: it has several turns: a problem of this task is answered at once")
    named = (fields[key] for key in ("task_id", "id", "question_id") if fields.get(key) is not None)
    return ProblemRow(str(next(named, number)), where, fields)


def _as_turns(messages: Any, where: str) -> dict[str, Any]:
    """A chat of a question and its answer as `turns` and `reference`; nothing if there is no chat."""
    if messages is None:
        return {}
    texts = [(turn.get("role"), turn.get("content")) for turn in messages if isinstance(turn, dict)]
    if [role for role, _ in texts] != ["user", "assistant"]:
        raise DataError(f"{where}: messages: a problem is one question of a user and one answer of the assistant")
    return {"turns": [texts[0][1]], "reference": [texts[1][1]]}


class AccuracyTask(ABC):
    """The problems of a file, and how answers to them are scored."""

    name: ClassVar[str]
    metrics: Sequence[str]
    """What is scored; empty if answers are only compared."""

    def __init__(self, rows: Sequence[ProblemRow]) -> None:
        self.rows = rows

    def prompts(self, *, chat: bool) -> list[PromptRow]:
        """What is asked: user messages for models of chats, else texts to continue."""
        return [PromptRow(row.id, row.where, prompt=self.prompt(row, chat=chat), raw=not chat) for row in self.rows]

    @abstractmethod
    def prompt(self, row: ProblemRow, *, chat: bool) -> str:
        """The text of a problem's prompt."""

    @abstractmethod
    def score(self, row: ProblemRow, answer: str) -> dict[str, bool]:
        """Metric -> whether this answer to the problem is right."""

    def settings(self) -> dict[str, Any]:
        """How the task was set up, for reports."""
        return {"problems": len(self.rows)}
