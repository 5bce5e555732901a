"""Prompt files as tasks."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from eyas.bench.offline.runner import read_tasks, run_group
from eyas.engine import Engine
from eyas.errors import DataError
from eyas.text.prompts import PromptRow
from eyas.types import SamplingParams

from ... import tiny
from ...pairs import write_rows


def test_good_rows_are_grouped_and_bad_ones_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, {"prompt": "c"}]
    file = write_rows(tmp_path / "math.jsonl", rows)
    (task,) = read_tasks([file], 2)
    assert task.name == "math"
    assert [[row.prompt for row in group] for group in task.groups] == [["a", "b"], ["c"]]
    (error,) = task.errors
    assert error.startswith("math.jsonl:2")
    assert [len(group) for group in read_tasks([file], 1, limit=3)[0].groups] == [1, 1]


def test_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [
        write_rows(tmp_path / "a.jsonl", [{"prompt": "x"}]),
        write_rows(tmp_path / "other" / "a.jsonl", [{"prompt": "x"}]),
        write_rows(tmp_path / "b.jsonl", [{"prompt": "x"}]),
    ]
    assert [task.name for task in read_tasks([*paths, paths[0]], 1)] == [str(paths[0]), str(paths[1]), "b"]


SPEED_BENCH = [  # a row as it is published; the first has a text that it may not pass on
    {"question_id": f"q{number}", "category": category, "sub_category": None, "turns": turns, "source": "a/b",
     "src_id": str(number), "difficulty": None, "multiturn": len(turns) > 1}
    for number, (category, turns) in enumerate((
        ("coding", ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nSolve {question}"]),
        ("coding", ["a"]), ("roleplay", ["b", "c"]), ("coding", ["d"]), ("roleplay", ["e"]),
    ))
]  # fmt: skip


def test_categories_of_speed_bench_are_tasks_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "qualitative.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(SPEED_BENCH), file)
    tasks = {task.name: task for task in read_tasks([file], 8, by_category=True)}
    assert [*tasks] == ["qualitative", "qualitative/coding", "qualitative/roleplay"]
    assert [[row.id for row in group] for group in tasks["qualitative/coding"].groups] == [["q1", "q3"]]
    assert [row.turns for row in tasks["qualitative/roleplay"].groups[0]] == [("b", "c"), ("e",)]
    (error,) = tasks["qualitative"].errors
    assert error.startswith("qualitative.parquet:1: its text isn't in the file")
    few = read_tasks([file], 8, limit=1, by_category=True)[1:]
    assert [row.id for task in few for row in task.groups[0]] == ["q1", "q2"]
    (whole,) = read_tasks([file], 2)
    assert [len(group) for group in whole.groups] == [2, 2]
    file.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match="can't read the prompts"):
        read_tasks([file], 1)


def test_a_group_is_decoded_together_and_a_row_that_cannot_run_is_left_out() -> None:
    good, other = tiny.prompts(5, 9)
    group = [PromptRow(str(i), f"f:{i}", token_ids=tuple(p)) for i, p in enumerate((good, [999], other))]
    run = run_group(Engine(tiny.target(), batch_size=3), group, SamplingParams(max_tokens=4, ignore_eos=True))
    assert run.token_ids == [tiny.continuation(tiny.target().model, p, 4) for p in (good, other)]
    assert (run.stats.tokens, run.stats.prefill_tokens, run.stats.target_passes) == (8, 2, 6)
    assert len(run.errors) == 1
    assert run.errors[0].startswith("f:1: ")
    assert run_group(Engine(tiny.target(), batch_size=3), group[1:2], SamplingParams()).stats.tokens == 0
