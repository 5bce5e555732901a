"""Tasks with right answers: problem files, prompts and metrics for GSM8K and HumanEval.

Files come in three forms: the data set's own; the prompt files that EAGLE's evaluations use, with the problem as the
only entry of `turns` and the right answer as the first of `reference`; and chats of one question and its answer.

GSM8K: grade-school math. Prompts and metrics are those of lm-evaluation-harness's task `gsm8k`.

The right answer is the number after `####` in the reference. Strict-match looks for `#### N` in the answer,
flexible-extract takes the last number in the text. Commas, dollar signs and a final period are ignored.

HumanEval: functions to be written, and unit tests that they pass or fail (pass@1).

Code is run only in a `Sandbox`; without one, answers are compared but not scored. A program is the problem's own code
(imports and helper functions), then the answer, then the tests.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from eyas.errors import DataError, UsageError
from eyas.files import json_lines
from eyas.text.prompts import PromptRow


@dataclass(frozen=True)
class ProblemRow:
    """A row of a task's file."""

    id: str
    where: str
    """`file:line`, the prefix of messages about the row."""
    fields: dict[str, Any]

    def text(self, key: str, *, meaning: str) -> str:
        """The text under a key, or the first of its list. If there is none, raises DataError that says `meaning`."""
        found = self.maybe_text(key)
        if found is None:
            raise DataError(f"{self.where}: `{key}` is missing or isn't text: a row needs {meaning}")
        return found

    def maybe_text(self, key: str) -> str | None:
        """Like `text`, but None if there is none."""
        value = self.fields.get(key)
        first = value[0] if isinstance(value, list) and value else value
        return first if isinstance(first, str) and first else None


def read_problems(path: Path, limit: int | None = None) -> list[ProblemRow]:
    """Read all rows of a file, or the first `limit`. One bad row raises DataError: a score covers all problems."""
    try:
        rows = [_problem(line, path.name, number) for number, line in islice(json_lines(path), limit)]
    except OSError as error:
        raise DataError(f"can't read the problems {path}: {error}") from error
    if not rows:
        raise DataError(f"{path} has no rows: write one JSON object a line")
    return rows


def _problem(line: bytes, file: str, number: int) -> ProblemRow:
    where = f"{file}:{number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a row is a JSON object")
    fields |= _as_turns(fields.get("messages"), where)
    if len(fields.get("turns") or ()) > 1:
        raise DataError(f"{where}: it has several turns: a problem of this task has one question and one answer")
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


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended."""

    outcome: Literal["passed", "failed", "ended early", "timed out", "killed"]
    detail: str = ""
    """The error, the signal, or what the program did instead of running to its end."""

    @property
    def passed(self) -> bool:
        """Whether it ran to its end without an error."""
        return self.outcome == "passed"


class Sandbox(Protocol):
    """Contains programs that a model wrote. The feature `sandbox` makes one, or raises UsageError if none can be."""

    def describe(self) -> str:
        """Say in one sentence what contains programs here."""

    def run(self, program: str) -> ProgramOutcome:
        """Run a program to its end or until its time is up; nothing that it started outlives this call."""


class AccuracyTask(ABC):
    """The problems of a file, and how answers to them are scored."""

    name: ClassVar[str]
    metrics: Sequence[str]
    """Names of the scores; empty if answers are only compared."""

    def __init__(self, rows: Sequence[ProblemRow]) -> None:
        self.rows = rows

    def prompts(self, *, chat: bool) -> list[PromptRow]:
        """The prompts: user messages for chat models, else texts to continue."""
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


STRICT, FLEXIBLE = "strict-match", "flexible-extract"
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(map(re.compile, (",", r"\$", r"(?s).*#### ", r"\.$")))
"""Patterns that exact match removes from answer and reference, in this order."""
_NEXT_QUESTION = "Question:"
"""The stop string of lm-evaluation-harness, because a base model continues with another question."""
INVALID = "[invalid]"
"""The result where there is no number."""


class GradeSchoolMath(AccuracyTask):
    """GSM8K, with or without examples ahead of every question."""

    name: ClassVar[str] = "gsm8k"
    metrics = (STRICT, FLEXIBLE)

    def __init__(self, path: Path, limit: int | None = None, shots: int = 0, shots_file: Path | None = None) -> None:
        """The first `shots` rows of `shots_file` are the examples. Raises DataError."""
        super().__init__(read_problems(path, limit))
        examples = [] if shots_file is None else read_problems(shots_file, shots)
        if len(examples) < shots:
            raise DataError(f"{shots_file} has {len(examples)} rows: {shots} examples were requested")
        for row in self.rows:  # report missing fields before anything runs
            _question(row)
            _right_answer(row)
        self._examples = "".join(f"{_harness_prompt(row)} {_reference(row)}\n\n" for row in examples)
        self._shots = shots

    def prompt(self, row: ProblemRow, *, chat: bool) -> str:
        """The harness's prompt; without examples, chat models get a prompt file's question as it stands."""
        as_it_stands = chat and not self._examples and "turns" in row.fields
        return _question(row) if as_it_stands else self._examples + _harness_prompt(row)

    def score(self, row: ProblemRow, answer: str) -> dict[str, bool]:
        """Score an answer by both metrics."""
        right = _right_answer(row)
        text = answer.partition(_NEXT_QUESTION)[0]
        return {STRICT: _plain(strict(text)) == right, FLEXIBLE: _plain(flexible(text)) == right}

    def settings(self) -> dict[str, Any]:
        """The number of problems and of examples."""
        return super().settings() | {"shots": self._shots}


def strict(text: str) -> str:
    """The first number after `####`."""
    found = _STRICT.search(text)
    return INVALID if found is None else found[1].strip()


def flexible(text: str) -> str:
    """The last number of a text."""
    found: Sequence[tuple[str, str]] = _FLEXIBLE.findall(text)
    return (found[-1][0] or found[-1][1]).strip() if found else INVALID


def _plain(number: str) -> str:
    for ignored in _IGNORED:
        number = ignored.sub("", number)
    return number.lower()


def _harness_prompt(row: ProblemRow) -> str:
    return f"Question: {_question(row)}\nAnswer:"


def _question(row: ProblemRow) -> str:
    meaning = "`question` and `answer`, or `turns` and `reference`"
    return row.text("turns" if "turns" in row.fields else "question", meaning=meaning)


def _reference(row: ProblemRow) -> str:
    key = "reference" if "turns" in row.fields else "answer"
    return row.text(key, meaning="the right answer, which ends with `#### N`")


def _right_answer(row: ProblemRow) -> str:
    reference = _reference(row)
    if "#### " not in reference:
        raise DataError(f"{row.where}: the right answer doesn't say `#### N`, so nothing can be compared with it")
    return _plain(reference)


PASS_AT_1 = "pass@1"
_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_END_OF_FUNCTION = re.compile(r"\n(?=class|def|#|if|print)")
"""Where a continued function ends, according to the task's authors: at the next unindented statement."""
_INSTRUCTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```\n"
"""lm-evaluation-harness's wording for chat models."""


class FunctionWriting(AccuracyTask):
    """HumanEval; each distinct program is run once, so that equal answers always have equal scores."""

    name: ClassVar[str] = "humaneval"

    def __init__(self, path: Path, limit: int | None = None, sandbox: Sandbox | None = None) -> None:
        """Raises DataError for bad rows, UsageError if code is to be run but the file has no unit tests."""
        super().__init__(read_problems(path, limit))
        self.metrics = () if sandbox is None else (PASS_AT_1,)
        self._sandbox = sandbox
        self._outcomes: dict[str, ProgramOutcome] = {}
        for row in self.rows:
            self.prompt(row, chat=True)
            if sandbox is not None and (row.maybe_text("test") is None or row.maybe_text("entry_point") is None):
                raise UsageError(
                    f"{row.where}: no `test` and `entry_point`, so there is nothing to execute: give the data set's "
                    "own file (task_id, prompt, test, entry_point), or leave out `execute=` to compare answers only"
                )

    def prompt(self, row: ProblemRow, *, chat: bool) -> str:
        """The function's head, within a sentence for chat models; a prompt file's row is sent as it stands."""
        if "turns" in row.fields:
            return row.text("turns", meaning="a prompt")
        code = row.text("prompt", meaning="`prompt`, a function's head, or `turns`")
        return _INSTRUCTION.format(code) if chat else code

    def score(self, row: ProblemRow, answer: str) -> dict[str, bool]:
        """Whether the program made from an answer passes the tests; empty without a sandbox."""
        if self._sandbox is None:
            return {}
        program = program_of(row, answer)
        if program not in self._outcomes:
            self._outcomes[program] = self._sandbox.run(program)
        return {PASS_AT_1: self._outcomes[program].passed}

    def settings(self) -> dict[str, Any]:
        """The number of problems, and how the programs ended."""
        found = [one.outcome for one in self._outcomes.values()]
        ran = {} if self._sandbox is None else {"programs": {name: found.count(name) for name in sorted(set(found))}}
        return super().settings() | {"executed": self._sandbox is not None} | ran


def program_of(row: ProblemRow, answer: str) -> str:
    """The program that tests an answer.

    The answer's code is its first fenced block that defines the function, else its first block, else all of it. Code
    that doesn't define the function is appended to the problem's own, up to the end of the function's body.
    """
    name = row.text("entry_point", meaning="`entry_point`, the function's name")
    test = row.text("test", meaning="`test`, the unit tests")
    blocks = _FENCED.findall(answer) or [answer]
    defines = re.compile(rf"^(async )?def {re.escape(name)}\b", re.MULTILINE)
    whole = next((block for block in blocks if defines.search(block)), None)
    given = _given_code(row)
    code = f"{given}\n\n{whole}" if whole is not None else given + _END_OF_FUNCTION.split(blocks[0])[0]
    return f"{code}\n{test}\ncheck({name})\n"


def _given_code(row: ProblemRow) -> str:
    """The function's head. In a prompt file, the first line is an instruction and is dropped."""
    if "turns" not in row.fields:
        return row.text("prompt", meaning="`prompt`, a function's head")
    _, _, code = row.text("turns", meaning="a prompt").partition("\n")
    return code
