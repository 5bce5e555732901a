"""Records: cut where a run resumes, and the same in every writer."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from eyas.errors import ConfigError
from eyas.train.loop import log
from eyas.train.loop.log import RunLog, check_trackers, writers

QUIET = Console(quiet=True)


def run(folder: Path, done: int, steps: list[int], console: Console = QUIET) -> None:
    folder.mkdir(exist_ok=True)
    with RunLog(100, done, writers(folder, done, {}, console), console) as out:
        for step in steps:
            out.record(step, step / 2, {"loss": 1 / step})


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_resuming_cuts_what_came_after_and_a_torn_line(tmp_path: Path) -> None:
    run(tmp_path, 0, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 4, "lo')
    run(tmp_path, 2, [3, 4])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert lines(tmp_path)[1] == {"step": 2, "seconds": 1.0, "loss": 0.5}
    run(tmp_path, 0, [1])
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_event_files_hold_the_same_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(10, 0, writers(tmp_path, 0, {}, QUIET), QUIET) as out:
        out.record(5, 1.0, {"loss": 0.25})
        out.record(5, 1.0, {"validation_loss": 0.5, "decoded_accept_length": 3.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"] if "seconds" not in tag}
    assert found == {"train/loss": 0.25, "validation/loss": 0.5, "validation/decoded_accept_length": 3.0}


def test_a_missing_tensorboard_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "find_spec", lambda _name: None)
    run(tmp_path, 0, [1], Console(stderr=True))
    assert "no TensorBoard files" in capsys.readouterr().err
    assert not (tmp_path / "tensorboard").exists()
    assert len(lines(tmp_path)) == 1


def test_lines_where_nobody_watches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(stderr=True, force_terminal=False)
    with RunLog(9, 0, writers(tmp_path, 0, {}, console), console) as out:
        out.record(4, 1.0, {"loss": 0.25, "accuracy_0": 0.5, "accuracy_1": 0.4, "accuracy_12": 0.3})
    assert capsys.readouterr().err == "step 4 loss 0.25 accuracy_0 0.5\n"
    assert lines(tmp_path)[0]["accuracy_12"] == 0.3


@pytest.mark.parametrize(
    ("seconds", "first", "last"),
    [
        (50.0, "step 2 of 33: 50 s a step, about 26 min left", "about 23 min left"),
        (140.0, "step 1 of 33: 2 min a step, about 75 min left", "about 65 min left"),
        (1.25, "step 3 of 33: 1.2 s a step, about 38 s left", "about 38 s left"),
    ],
)
def test_it_is_said_how_long_it_takes_before_the_first_record(
    seconds: float,
    first: str,
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    console = Console(stderr=True, force_terminal=False)
    with RunLog(33, 0, writers(tmp_path, 0, {}, console), console) as out:
        for step in range(1, 6):
            now[0] += seconds
            out.advance(step)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == first
    assert said[-1].endswith(last)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_figure_that_decides_is_seen_on_a_terminal(tmp_path: Path, columns: int) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=columns)
    figures = {f"validation_{name}": 1.25 for name in ("loss", "accuracy_0", "overlap_0", "accept_length")}
    with RunLog(9, 0, writers(tmp_path, 0, {}, console), console) as out:
        out.record(4, 1.0, {**figures, "decoded_accept_length": 1.75})
        out.record(5, 1.0, {"loss": 0.25, "accuracy_0": 0.5})
    (line,) = [line for line in screen.getvalue().splitlines() if "decoded_accept_length 1.75" in line]
    assert line.index("1.75") < columns


def test_wandb_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_trackers({"wandb": "drafts"})
    check_trackers({})
    said: list[Any] = []
    fake = SimpleNamespace(log=lambda values, step: said.append((step, values)), finish=lambda: said.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: said.append(options) or fake))
    with RunLog(10, 0, writers(tmp_path, 0, {"wandb": "drafts"}, QUIET), QUIET) as out:
        out.record(3, 0.5, {"loss": 1.0})
    assert said[0]["project"] == "drafts"
    assert said[1:] == [(3, {"seconds": 0.5, "loss": 1.0}), "finished"]


def test_mlflow_goes_on_with_the_run_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="mlflow isn't installed: `pip install mlflow`"):
        check_trackers({"mlflow": "drafts"})
    said: list[Any] = []
    known: list[Any] = []
    module = SimpleNamespace(
        set_experiment=lambda name: said.append(name),
        search_runs=lambda **query: said.append(query["filter_string"]) or known,
        start_run=lambda **options: said.append(options),
        log_metrics=lambda values, step: said.append((step, values)),
        end_run=lambda: said.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    with RunLog(10, 0, writers(tmp_path, 0, {"mlflow": "drafts"}, QUIET), QUIET) as out:
        out.record(3, 0.5, {"loss": 1.0})
    folder = str(tmp_path.resolve())
    begun = {"run_name": tmp_path.name, "tags": {"eyas.folder": folder}}
    assert said == ["drafts", f"tags.`eyas.folder` = '{folder}'", begun, (3, {"seconds": 0.5, "loss": 1.0}), "ended"]
    known.append(SimpleNamespace(info=SimpleNamespace(run_id="r1")))
    for writer in writers(tmp_path, 0, {"mlflow": "drafts"}, QUIET):
        writer.close()
    assert said[-2:] == [{"run_id": "r1"}, "ended"]


def test_the_switches_of_train_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from eyas.cli.app import app
    from eyas.train import recipe

    called: list[Any] = []
    monkeypatch.setattr(recipe, "run_recipe", called.append)
    words = ["train", "smollm2/eagle3", "drafter.loop.steps=2", "--wandb", "drafts", "--mlflow", "trials"]
    assert CliRunner().invoke(app, words).exit_code == 0
    (recipe_run,) = called
    assert recipe_run.drafter.loop.steps == 2
    assert recipe_run.drafter.loop.trackers == {"wandb": "drafts", "mlflow": "trials"}
