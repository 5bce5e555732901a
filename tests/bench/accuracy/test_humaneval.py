"""HumanEval: the program made of an answer, and what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.bench.accuracy.tasks import PASS_AT_1, FunctionWriting, ProgramOutcome, program_of
from eyas.errors import DataError, UsageError
from eyas.labs.sandbox.sandbox import Sandbox

from ...pairs import write_rows

HEAD = 'import math\n\ndef half(x):\n    return x / 2\n\ndef quarter(x: float):\n    """A quarter of x."""\n'
TEST = "def check(candidate):\n    assert candidate(8) == 2\n"
ROW = {"task_id": "HumanEval/0", "prompt": HEAD, "test": TEST, "entry_point": "quarter"}
EAGLE = {"question_id": 0, "turns": [f"Complete the code I provided.\n{HEAD}"], "reference": ["    return x / 4\n"]}


class Counted(Sandbox):
    """Runs nothing: a program passes if it says so, and all are kept."""

    def __init__(self) -> None:
        super().__init__(isolated=False)
        self.programs: list[str] = []

    def run(self, program: str) -> ProgramOutcome:
        self.programs.append(program)
        return ProgramOutcome("passed" if "right" in program else "failed")


def code(folder: Path, *rows: Any, sandbox: Sandbox | None = None) -> FunctionWriting:
    return FunctionWriting(write_rows(folder / "code.jsonl", rows), None, sandbox)


RIGHT = [
    "    return half(half(x))\n",
    "    return half(half(x))\n\nprint(quarter(1))\nassert False\n",
    "    return half(half(x))\ndef other():\n    return 1\nassert False\n",
    "Here it is:\n```python\ndef quarter(x):\n    return half(half(x))\n```\nIt halves twice.",
    "```\nassert False\n```\nor rather\n```python\nclass No: pass\ndef quarter(x):\n    return math.floor(x) / 4\n```",
    "```python\n    return half(half(x))\n```",
    "```py\ndef quarter(x):\n    return x / 4\n",
]
WRONG = [
    "    return x\n",
    "",
    "Sorry, no.",
    "```python\ndef quarter(x):\n    return x\n```",
    "def quarter(x):\nreturn 2",
]


@pytest.mark.parametrize("answer", RIGHT)
def test_right_answers_pass(tmp_path: Path, answer: str) -> None:
    sandbox = Sandbox()
    task = code(tmp_path, ROW, sandbox=sandbox)
    assert sandbox.run(program_of(task.rows[0], answer)) == ProgramOutcome("passed")
    assert task.score(task.rows[0], answer) == {PASS_AT_1: True}


@pytest.mark.parametrize("answer", WRONG)
def test_wrong_answers_fail(tmp_path: Path, answer: str) -> None:
    task = code(tmp_path, ROW, sandbox=Sandbox())
    assert task.score(task.rows[0], answer) == {PASS_AT_1: False}


def test_the_sentence_of_a_prompt_file_is_no_code(tmp_path: Path) -> None:
    task = code(tmp_path, EAGLE | {"test": TEST, "entry_point": "quarter"}, sandbox=Sandbox())
    assert task.score(task.rows[0], "    return x / 4\n") == {PASS_AT_1: True}


def test_a_program_is_run_once(tmp_path: Path) -> None:
    sandbox = Counted()
    task = code(tmp_path, ROW, sandbox=sandbox)
    assert [task.score(task.rows[0], text)[PASS_AT_1] for text in ("right", "right", "wrong", "right")] == [
        True,
        True,
        False,
        True,
    ]
    assert len(sandbox.programs) == 2
    assert task.settings() == {"problems": 1, "executed": True, "programs": {"failed": 1, "passed": 1}}


def test_nothing_is_run_and_scored_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "run", lambda *_: pytest.fail("code was run"))
    task = code(tmp_path, ROW, EAGLE)
    assert (list(task.metrics), task.score(task.rows[0], RIGHT[0])) == ([], {})
    assert task.settings() == {"problems": 2, "executed": False}


def test_prompts(tmp_path: Path) -> None:
    task = code(tmp_path, ROW, EAGLE)
    first, second = task.prompts(chat=True)
    assert first.id == "HumanEval/0"
    assert first.prompt == (
        f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{HEAD}\n```\n"
    )
    assert second.prompt == EAGLE["turns"][0]  # type: ignore[index]
    assert task.prompts(chat=False)[0].prompt == HEAD


def test_bad_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"code\.jsonl:1: no `test` and `entry_point`, so there is nothing to execute"):
        code(tmp_path, EAGLE, sandbox=Counted())
    with pytest.raises(DataError, match="`prompt` is missing"):
        code(tmp_path, {"task_id": "x", "test": TEST})
