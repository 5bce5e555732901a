"""HumanEval: functions to be written, and unit tests that they pass or fail (pass@1).

Code is run only in a `Sandbox`; without one answers are compared, and nothing is scored. A program is the problem's own
code, which has imports and helper functions, then the answer, then the tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from eyas.bench.accuracy.sandbox import ProgramOutcome, Sandbox
from eyas.bench.accuracy.tasks import AccuracyTask, ProblemRow, read_problems
from eyas.errors import UsageError

PASS_AT_1 = "pass@1"
_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_GOES_ON = re.compile(r"\n(?=class|def|#|if|print)")
"""Where a continued function is over, by the task's authors: at the next statement that isn't indented."""
_ASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```\n"
"""lm-evaluation-harness's words for models of chats."""


class FunctionWriting(AccuracyTask):
    """HumanEval; each distinct program is run once, so that equal answers always have equal scores."""

    name: ClassVar[str] = "humaneval"

    def __init__(self, path: Path, limit: int | None = None, sandbox: Sandbox | None = None) -> None:
        """Raises DataError for bad rows, UsageError if code shall be run and the file has no unit tests."""
        super().__init__(read_problems(path, limit))
        self.metrics = () if sandbox is None else (PASS_AT_1,)
        self._sandbox = sandbox
        self._outcomes: dict[str, ProgramOutcome] = {}
        for row in self.rows:
            self.prompt(row, chat=True)
            if sandbox is not None and (row.maybe_text("test") is None or row.maybe_text("entry_point") is None):
                raise UsageError(
                    f"{row.where}: no `test` and `entry_point`, so there is nothing to execute: give the data set's "
                    "own file (task_id, prompt, test, entry_point), or leave out --execute to compare answers only"
                )

    def prompt(self, row: ProblemRow, *, chat: bool) -> str:
        """The function's head; models of chats are asked in a sentence, or as a prompt file's row asks."""
        if "turns" in row.fields:
            return row.text("turns", meaning="a prompt")
        code = row.text("prompt", meaning="`prompt`, a function's head, or `turns`")
        return _ASK.format(code) if chat else code

    def score(self, row: ProblemRow, answer: str) -> dict[str, bool]:
        """Whether the program made of an answer passes the tests; nothing without a sandbox."""
        if self._sandbox is None:
            return {}
        program = program_of(row, answer)
        if program not in self._outcomes:
            self._outcomes[program] = self._sandbox.run(program)
        return {PASS_AT_1: self._outcomes[program].passed}

    def settings(self) -> dict[str, Any]:
        """Problems, and what became of the programs."""
        found = [one.outcome for one in self._outcomes.values()]
        ran = {} if self._sandbox is None else {"programs": {name: found.count(name) for name in sorted(set(found))}}
        return super().settings() | {"executed": self._sandbox is not None} | ran


def program_of(row: ProblemRow, answer: str) -> str:
    """The program that tests an answer.

    The answer's code is its first fenced block that defines the function, else its first block, else all of it. Code
    that doesn't define the function continues the problem's own, up to where its body ends.
    """
    name = row.text("entry_point", meaning="`entry_point`, the function's name")
    test = row.text("test", meaning="`test`, the unit tests")
    blocks = _FENCED.findall(answer) or [answer]
    defines = re.compile(rf"^(async )?def {re.escape(name)}\b", re.MULTILINE)
    whole = next((block for block in blocks if defines.search(block)), None)
    given = _given_code(row)
    code = f"{given}\n\n{whole}" if whole is not None else given + _GOES_ON.split(blocks[0])[0]
    return f"{code}\n{test}\ncheck({name})\n"


def _given_code(row: ProblemRow) -> str:
    """The function's head; what stands before its code in a prompt file is a sentence."""
    if "turns" not in row.fields:
        return row.text("prompt", meaning="`prompt`, a function's head")
    _, _, code = row.text("turns", meaning="a prompt").partition("\n")
    return code
