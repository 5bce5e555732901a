"""GSM8K: what both metrics find in answers, and the prompts with and without examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.bench.accuracy.tasks import FLEXIBLE, INVALID, STRICT, GradeSchoolMath, flexible, strict
from eyas.errors import DataError

from ...pairs import write_rows

REFERENCE = "He has 1,000+234 = <<1000+234=1234>>1234 dollars.\n#### 1,234"


def math(folder: Path, *rows: Any, **options: Any) -> GradeSchoolMath:
    return GradeSchoolMath(write_rows(folder / "math.jsonl", rows), **options)


@pytest.mark.parametrize(
    ("text", "found_strictly", "found_flexibly"),
    [
        ("so 72.\n#### 72", "72", "72"),
        ("#### 1,234", "1,234", "1,234"),
        ("#### -5", "-5", "-5"),
        ("#### 5 and then #### 6", "5", "6"),
        ("#### $18", INVALID, "$18"),
        ("####18", INVALID, "18"),
        ("The answer is 3, or rather 14", INVALID, "14"),
        ("It costs $2.50.", INVALID, "$2.50."),
        ("minus -7", INVALID, "-7"),
        ("about 7", INVALID, "7"),
        ("no number", INVALID, INVALID),
        ("", INVALID, INVALID),
        ("12 apples ... and", INVALID, "..."),  # as the harness's pattern has it
    ],
)
def test_what_is_found(text: str, found_strictly: str, found_flexibly: str) -> None:
    assert (strict(text), flexible(text)) == (found_strictly, found_flexibly)


@pytest.mark.parametrize(
    ("answer", "strictly", "flexibly"),
    [
        (REFERENCE, True, True),
        ("#### 1234", True, True),
        ("#### 1234.", True, True),
        ("#### 1234.0", False, False),
        ("#### 1235", False, False),
        ("It is $1,234.", False, True),
        ("1234 it is, not 99", False, False),
        ("#### 1234\n\nQuestion: How many are 2?\nAnswer: #### 2", True, True),
        ("#### 99\nno, 1,234", False, True),
        ("", False, False),
    ],
)
def test_scores(tmp_path: Path, answer: str, strictly: bool, flexibly: bool) -> None:
    task = math(tmp_path, {"question": "How much?", "answer": REFERENCE})
    assert task.score(task.rows[0], answer) == {STRICT: strictly, FLEXIBLE: flexibly}


def test_a_negative_reference(tmp_path: Path) -> None:
    task = math(tmp_path, {"question": "How cold?", "answer": "#### -5"})
    assert task.score(task.rows[0], "#### -5") == {STRICT: True, FLEXIBLE: True}
    assert task.score(task.rows[0], "#### 5") == {STRICT: False, FLEXIBLE: False}


def test_prompts_are_the_harness_s(tmp_path: Path) -> None:
    shots = write_rows(
        tmp_path / "train.jsonl",
        [
            {"question": "1+1?", "answer": "#### 2"},
            {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "#### 4"}]},
            {"question": "never shown", "answer": "#### 0"},
        ],
    )
    (row,) = math(tmp_path, {"question": "3+3?", "answer": "#### 6"}, shots=2, shots_file=shots).prompts(chat=True)
    examples = "Question: 1+1?\nAnswer: #### 2\n\nQuestion: 2+2?\nAnswer: #### 4\n\n"
    assert (row.prompt, row.raw) == (f"{examples}Question: 3+3?\nAnswer:", False)
    (row,) = math(tmp_path, {"question": "3+3?", "answer": "#### 6"}).prompts(chat=False)
    assert (row.prompt, row.raw) == ("Question: 3+3?\nAnswer:", True)


def test_rows_of_prompt_files_are_sent_as_they_stand_without_examples(tmp_path: Path) -> None:
    asked = {"question_id": 7, "turns": ["3+3?"], "reference": ["3+3=6\n#### 6"]}
    task = math(tmp_path, asked)
    (row,) = task.prompts(chat=True)
    assert (row.id, row.prompt) == ("7", "3+3?")
    assert task.prompts(chat=False)[0].prompt == "Question: 3+3?\nAnswer:"
    assert task.score(task.rows[0], "#### 6") == {STRICT: True, FLEXIBLE: True}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"turns": ["3+3?"]}, "math.jsonl:1: `reference` is missing"),
        ({"question": "3+3?"}, "math.jsonl:1: `answer` is missing"),
        ({"answer": "#### 6"}, "math.jsonl:1: `question` is missing"),
        ({"question": "3+3?", "answer": "6"}, "doesn't say `#### N`"),
        ({"turns": ["a", "b"], "reference": ["#### 6"]}, "several turns"),
        ({"messages": [{"role": "user", "content": "a"}]}, "one question of a user"),
        ("[]", "a row is a JSON object"),
        ("{", "math.jsonl:1: not JSON"),
    ],
)
def test_bad_rows(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        math(tmp_path, row)


def test_files_that_hold_too_little(tmp_path: Path) -> None:
    row = {"question": "3+3?", "answer": "#### 6"}
    with pytest.raises(DataError, match="has 1 rows: 5 examples"):
        math(tmp_path, row, shots=5, shots_file=write_rows(tmp_path / "train.jsonl", [row]))
    with pytest.raises(DataError, match="no rows"):
        math(tmp_path)
    with pytest.raises(DataError, match="can't read the problems"):
        GradeSchoolMath(tmp_path / "none.jsonl")


def test_the_first_rows(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(3)]
    assert [row.id for row in math(tmp_path, *rows, limit=2).rows] == ["1", "2"]
