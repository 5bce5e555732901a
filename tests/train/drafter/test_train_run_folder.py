"""Which checkpoints a run folder holds, and which of them is the best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.errors import CheckpointError
from eyas.files import writing_folder
from eyas.train.drafter.train import RunFolder, score


def drafter(value: float, by: str = "decoded_accept_length") -> Callable[[Path], None]:
    """Writes what looks like a drafter directory."""

    def write(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"eyas": {"chosen_by": by, "validation": {by: value, "other": 9.0}}})
        (path / "config.json").write_text(text)

    return write


def test_the_best_is_kept_and_of_equal_ones_the_earliest(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, keep=2)
    for step, value in ((10, 2.0), (20, 3.0), (30, 3.0), (40, 2.5), (50, 2.4)):
        run.add(step, drafter(value))
    assert list(run.checkpoints()) == [20, 40, 50]
    assert run.best().name == "step-000020"
    assert score(tmp_path / "best") == 3.0
    assert score(run.finish()) == 2.4


def test_the_end_says_what_came_out_and_what_is_next(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, value in ((10, 1.2), (20, 1.625), (30, 1.5)):
        run.add(step, drafter(value))
    came, lies, following = run.summary()
    assert "decoded accept length 1.50 after the last, 1.62 after the best, step-000020" in came
    assert str(tmp_path / "best") in lies
    assert following == f"next: eyas bench checkpoints {tmp_path} --prompt-file PROMPTS.jsonl --write"
    (tmp_path / "prompts.jsonl").touch()
    assert run.summary()[-1].endswith(f"--prompt-file {tmp_path}/prompts.jsonl --write")


def test_all_stay_by_default(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (5, 10, 15):
        run.add(step, drafter(step))
    assert list(run.checkpoints()) == [5, 10, 15]
    assert score(tmp_path / "best") == 15


def test_going_over_steps_again_forgets_what_came_after(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, value in ((10, 2.0), (20, 4.0), (30, 5.0)):
        run.add(step, drafter(value))
    run.add(20, drafter(1.0))
    assert list(run.checkpoints()) == [10, 20]
    assert score(tmp_path / "best") == 2.0


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "drafter"
    with writing_folder(path) as folder:
        drafter(1.0)(folder)

    def fails(path: Path) -> None:
        drafter(2.0)(path)
        raise OSError("full")

    with pytest.raises(OSError, match="full"), writing_folder(path) as folder:
        fails(folder)
    assert score(path) == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_nothing_to_choose_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        RunFolder(tmp_path).best()
