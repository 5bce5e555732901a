"""Trials on many machines: each worker runs `eyas train` for one trial after the other, in the sweep's shared folder.

Trials are proposed and scored by the process that runs the sweep, so a search learns from all scores as it does on one
machine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.cluster.crew import Crew
from eyas.cluster.executor import Executor
from eyas.cluster.worker import Key, Take, Unit, UnitReport
from eyas.errors import UsageError
from eyas.sweep.sweep import POLL_SECONDS, Sweep
from eyas.sweep.trial import TrainProcess, Trial


class TrialWorker:
    """Trains trials with the cores and devices that its process has."""

    identity: dict[str, Any] = {}  # noqa: RUF012  # an attribute of the protocol; recipes say what trials depend on

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def work(self, take: Take) -> Iterator[UnitReport]:
        """Train trials; the report on one has the reason for a failure, or None."""
        while units := take(1):
            key, (trial, until) = units[0]
            process = TrainProcess(trial, self._environment, until)
            try:
                while not process.ended():
                    yield UnitReport(key, None, done=False)
                    time.sleep(POLL_SECONDS)
            except GeneratorExit:  # the run was stopped: the trial goes on from its last state when it is run again
                process.stop()
                raise
            yield UnitReport(key, process.finish())


@dataclass(frozen=True)
class TrialWorkerMaker:
    """What a worker is made of, on its machine."""

    folder: Path
    """The sweep's trials, by their absolute path."""
    environment: dict[str, str]
    """Environment variables of training processes."""

    def __call__(self) -> TrialWorker:
        """Raises UsageError if the sweep's folder isn't shared with this machine."""
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} isn't here: output must be a folder that all machines share")
        return TrialWorker(self.environment)


def train_on(executor: Executor, sweep: Sweep, workers: int) -> None:
    """Have workers train all trials that are left, and score each when it is trained."""
    search = sweep.begin()
    first = sweep.next_trial(search)
    if first is None:
        return
    waiting, begun = deque([first]), dict[Key, tuple[Trial, int | None]]()

    def take(room: int) -> list[Unit]:
        units: list[Unit] = []
        while len(units) < room and (trial := waiting.popleft() if waiting else sweep.next_trial(search)) is not None:
            sweep.announce(trial, search.until)
            unit = Unit(f"{trial.name}/{search.until}", (trial, search.until))
            begun[unit.key] = unit.content
            units.append(unit)
        return units

    sweep.trials.folder.mkdir(parents=True, exist_ok=True)
    threads = {} if sweep.config.threads is None else {"OMP_NUM_THREADS": str(sweep.config.threads)}
    make = TrialWorkerMaker(sweep.trials.folder.absolute(), {"OMP_WAIT_POLICY": "PASSIVE", **threads})
    with Crew(executor, make, workers=workers, ahead=1) as crew:
        for report in crew.run(take):
            if report.done:
                trial, until = begun[report.key]
                sweep.ended(search, trial, report.value, until)
