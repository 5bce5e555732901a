"""Trials on many machines: each worker runs `eyas train` for one trial after the other, in the sweep's shared folder.

Trials are proposed and scored by the process that runs the sweep, so a search learns from all scores as it does on one
machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
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
            trial: Trial = units[0].content
            process = TrainProcess(trial, self._environment)
            try:
                while not process.ended():
                    yield UnitReport(trial.name, None, done=False)
                    time.sleep(POLL_SECONDS)
            except GeneratorExit:  # the run was stopped: the trial goes on from its last state when it is run again
                process.stop()
                raise
            yield UnitReport(trial.name, process.finish())


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
    search, waiting = sweep.begin()
    first = next(waiting, None)
    if first is None:
        return
    waiting, trials = chain([first], waiting), dict[Key, Trial]()

    def take(room: int) -> list[Unit]:
        found = {trial.name: trial for trial in islice(waiting, room)}
        for trial in found.values():
            sweep.announce(trial)
        trials.update(found)
        return [Unit(name, trial) for name, trial in found.items()]

    sweep.trials.folder.mkdir(parents=True, exist_ok=True)
    threads = {} if sweep.config.threads is None else {"OMP_NUM_THREADS": str(sweep.config.threads)}
    make = TrialWorkerMaker(sweep.trials.folder.absolute(), {"OMP_WAIT_POLICY": "PASSIVE", **threads})
    with Crew(executor, make, workers=workers, ahead=1) as crew:
        for report in crew.run(take):
            if report.done:
                sweep.ended(search, trials[report.key], report.value)
