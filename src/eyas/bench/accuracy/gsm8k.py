"""GSM8K: grade school maths. Prompts and metrics are those of lm-evaluation-harness's task `gsm8k`.

The right answer is the number after `####` in the reference. Strict-match looks for `#### N` in the answer, flexible-
extract takes the last number of the text; commas, dollar signs and a final full stop don't count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from eyas.bench.accuracy.tasks import AccuracyTask, ProblemRow, read_problems
from eyas.errors import DataError

STRICT, FLEXIBLE = "strict-match", "flexible-extract"
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(map(re.compile, (",", r"\$", r"(?s).*#### ", r"\.$")))
"""What exact match takes out of answer and reference, one after the other."""
_NEXT_QUESTION = "Question:"
"""A base model goes on with a question of its own: the harness stops there."""
INVALID = "[invalid]"
"""What is found where there is no number."""


class GradeSchoolMaths(AccuracyTask):
    """GSM8K with examples ahead of every question, or none."""

    name: ClassVar[str] = "gsm8k"
    metrics = (STRICT, FLEXIBLE)

    def __init__(self, path: Path, limit: int | None = None, shots: int = 0, shots_file: Path | None = None) -> None:
        """The first `shots` rows of `shots_file` are the examples. Raises DataError."""
        super().__init__(read_problems(path, limit))
        examples = [] if shots_file is None else read_problems(shots_file, shots)
        if len(examples) < shots:
            raise DataError(f"{shots_file} has {len(examples)} rows: {shots} examples were asked for")
        for row in self.rows:  # what is missing is said before anything runs
            _question(row)
            _right_answer(row)
        self._examples = "".join(f"{_harness_prompt(row)} {_reference(row)}\n\n" for row in examples)
        self._shots = shots

    def prompt(self, row: ProblemRow, *, chat: bool) -> str:
        """The harness's text; with no examples, a prompt file's question is sent to models of chats as it stands."""
        as_it_stands = chat and not self._examples and "turns" in row.fields
        return _question(row) if as_it_stands else self._examples + _harness_prompt(row)

    def score(self, row: ProblemRow, answer: str) -> dict[str, bool]:
        """Both metrics of an answer."""
        right = _right_answer(row)
        text = answer.partition(_NEXT_QUESTION)[0]
        return {STRICT: _plain(strict(text)) == right, FLEXIBLE: _plain(flexible(text)) == right}

    def settings(self) -> dict[str, Any]:
        """Problems and examples."""
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
