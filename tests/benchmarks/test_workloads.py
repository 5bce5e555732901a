"""Workloads that copy: the same every time, and edits that do what they say."""

from __future__ import annotations

import random

import pytest

from benchmarks import workloads

CODE = workloads.Code(
    "mean",
    "def mean(values, start=0):\n    total = start\n    count = 0\n    for value in values:\n"
    "        total = total + value\n        count += 1\n    return total / count\n",
    False,
)


@pytest.mark.parametrize("seed", [0, 1])
def test_edits_are_what_they_say(seed: int) -> None:
    made = {edit.kind: edit for edit in workloads.edits(CODE, random.Random(seed))}
    assert set(made) == {"rename", "default", "docstring"}
    old, new = (part.strip("`.") for part in made["rename"].instruction.split() if part.startswith("`"))
    assert old in ("total", "count")
    assert made["rename"].result == CODE.text.replace(old, new)
    new = made["default"].instruction.rsplit("`", 2)[1]
    assert made["default"].result == CODE.text.replace("start=0", f"start={new}")
    said = made["docstring"].instruction.split('"')[1]
    assert made["docstring"].result == CODE.text.replace("\n", f'\n    """{said}"""\n', 1)


def test_rows_are_the_same_every_time() -> None:
    for make in (workloads.editing_set, workloads.agent_loops):
        rows = make([CODE] * 3, 2, random.Random(5))
        assert len(rows) == 2
        assert rows == make([CODE] * 3, 2, random.Random(5))
        assert len(rows[0].get("turns", [0])) == len(rows[0].get("references", [0]))
