"""Sweeps whose trials are trained by workers: the same scores as on one machine, whoever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.errors import UsageError
from eyas.labs.cluster import worker
from eyas.labs.sweep import sweep as workers
from eyas.labs.sweep.sweep import Sweep, TrialWorkerMaker, train_on

from ..cluster.fake import FakeExecutor
from .conftest import Setup
from .test_sweep import swept


def test_trials_are_trained_by_workers(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "EXCHANGE_SECONDS", 0.0)
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.02)
    (setup.drafters / "block-1").touch()  # this trial is in progress when its worker dies
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)

    made = Sweep(setup.config(threads=3), say)
    executor = FakeExecutor(seed=1, deaths=4)
    monkeypatch.setattr(executor, "_end", lambda number, end=executor._end: (release(setup), end(number))[1])
    train_on(executor, made, workers=2)
    assert executor.deaths < 4
    assert {call.split()[0] for call in setup.calls} == {"0", "1", "2"}
    assert {call.split()[1] for call in setup.calls} == {"3"}
    assert sum("training, see" in line for line in said) == 3
    again = swept(setup.config(threads=3))  # finds all trials trained
    assert {r.trial.name: r.accept_lengths for r in made.ranked} == {
        r.trial.name: r.accept_lengths for r in again.ranked
    }
    executor = FakeExecutor()
    train_on(executor, Sweep(setup.config(), say), workers=2)
    assert executor.started == 0


def release(setup: Setup) -> None:
    (setup.drafters / "block-1").unlink(missing_ok=True)


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="output must be a folder that all machines share"):
        TrialWorkerMaker(tmp_path / "none", {})()


def test_halving_by_workers_is_halving_in_one_process(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "EXCHANGE_SECONDS", 0.0)
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.02)
    halving = {"set": {"drafter.loop.steps": 8}, "halving": {"rungs": 2}}
    alone = swept(setup.config(output=setup.folder / "alone", **halving))
    made = Sweep(setup.config(**halving), lambda line: None)  # noqa: ARG005
    train_on(FakeExecutor(seed=2, deaths=2), made, workers=2)
    rows = [[(row.trial.values, row.accept_lengths, row.until) for row in each.ranked] for each in (alone, made)]
    assert rows[0] == rows[1]
    assert [until for *_, until in rows[0]] == [None, 3, 3]
