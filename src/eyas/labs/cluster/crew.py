"""Hands units out to workers, collects their reports, and hands out again the units of workers that died.

Every unit is done at least once. Its results are the same on every worker, so it doesn't matter which one did it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol

from eyas.config import differences
from eyas.errors import ClusterError, InvariantError, UsageError
from eyas.labs.cluster.worker import Refused, installed
from eyas.work import Key, MakeWorker, Take, Unit, UnitReport


class WorkerDeath(NamedTuple):
    """A worker that is gone: killed, out of memory, or lost with its machine."""

    reason: str


class Executor(Protocol):
    """Runs `WorkerActor`s somewhere and calls their methods; each has at most one call in progress."""

    room: int
    """The number of workers that a run gets by default."""

    def start(self) -> int:
        """Begin to start a worker and return its number, by which it can be called already."""

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        """Call a method of a worker; `wait` returns the result."""

    def wait(self, seconds: float) -> list[tuple[int, Any]]:
        """Wait at most `seconds` for a call to end; return (worker, result or `WorkerDeath`) of all that have ended."""

    def stop(self) -> None:
        """End all workers, whatever they are doing; may be called more than once."""


_LOG = logging.getLogger("eyas")

DEATHS = 10
"""Workers that may die in a row with no unit finished in between, or twice the run's workers if that is more."""
PATIENCE = 30.0
"""Seconds without a first worker after which a warning says what the run is waiting for."""
SILENCE = 300.0
"""Seconds without an answer from a worker after which a warning names it."""


class Crew:
    """The workers of a run; each holds up to `ahead` units, so that it never waits for the next.

    A worker that dies is replaced, and its units are handed out again. Raises ClusterError if too many workers die in a
    row, run other versions than this process, or disagree about what they compute with.
    """

    def __init__(
        self,
        executor: Executor,
        make: MakeWorker,
        *,
        workers: int | None,
        ahead: int,
        expected: Mapping[str, Any] | None = None,
    ) -> None:
        """`make` is called on every worker's machine; `expected`: the identity of all workers; None: the first's."""
        self._executor = executor
        self._make = make
        self._ahead = ahead
        self.size = executor.room if workers is None else workers
        self._expected = None if expected is None else dict(expected)
        self._next_step: dict[int, Callable[[int, Any], list[UnitReport]]] = {}  # of workers with a call in progress
        self._since: dict[int, float] = {}  # start of each call in progress, until its warning
        self._machines: dict[int, str] = {}
        self._units: dict[int, dict[Key, Unit]] = {}  # of open workers
        self._returned: deque[Unit] = deque()
        self._deaths = 0

    def __enter__(self) -> Crew:
        self._versions = installed()
        for _ in range(self.size):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.stop()

    def identity(self) -> dict[str, Any]:
        """Return what all workers compute with, after waiting until the first of them is open."""
        while self._expected is None:
            self._receive()
        return self._expected

    def run(self, take: Take) -> Generator[UnitReport, None, None]:
        """Yield reports until `take` has no unit left and none is being done.

        The caller processes a report before it requests the next, so the unit that follows from it can be taken then.
        """
        while True:
            self._hand_out(take)
            if not self._returned and not any(self._units.values()) and self._idle():
                return
            yield from self._receive()

    def _idle(self) -> list[int]:
        """Open workers without a call in progress, those with the fewest units first."""
        return sorted(self._units.keys() - self._next_step.keys(), key=lambda worker: len(self._units[worker]))

    def _hand_out(self, take: Take) -> None:
        for worker in self._idle():
            held = self._units[worker]
            room = self._ahead - len(held)
            units = list[Unit]()
            while self._returned and len(units) < room:
                units.append(self._returned.popleft())
            if len(units) < room:
                units += take(room - len(units))
            held.update({unit.key: unit for unit in units})
            if held:
                self._call(worker, self._reported, "exchange", units)

    def _receive(self) -> list[UnitReport]:
        """Wait until calls have ended, and continue with their workers."""
        began = time.monotonic()
        said = bool(self._units)
        while not (ended := self._executor.wait(1.0)):
            if not said and time.monotonic() - began > PATIENCE:
                _LOG.warning("no worker has started yet: the cluster is busy, or the workers are still loading")
                said = True
            self._report_silence()
        reports: list[UnitReport] = []
        for worker, result in ended:
            step = self._next_step.pop(worker)
            self._since.pop(worker, None)
            if isinstance(result, WorkerDeath):
                self._lost(worker, result.reason)
            elif isinstance(result, Refused):
                machine = self._machines.get(worker)
                message = result.message if machine is None else f"{result.message} (the worker on {machine})"
                raise UsageError(message) if result.usage else ClusterError(message)
            else:
                reports += step(worker, result)
        return reports

    def _report_silence(self) -> None:
        """Warn about workers that take very long, once per call: one that hangs isn't dead and keeps its units."""
        for worker, since in list(self._since.items()):
            if worker in self._units and time.monotonic() - since > SILENCE:
                _LOG.warning(
                    "the worker on %s has not answered for %.0f s: if it hangs, kill it, and another does its work",
                    self._machines[worker],
                    SILENCE,
                )
                del self._since[worker]

    def _call(self, worker: int, step: Callable[[int, Any], list[UnitReport]], method: str, *arguments: Any) -> None:
        """Call a method of a worker; `step` continues with its result."""
        self._next_step[worker] = step
        self._since[worker] = time.monotonic()
        self._executor.call(worker, method, *arguments)

    def _start(self) -> None:
        self._call(self._executor.start(), self._described, "describe")

    def _described(self, worker: int, found: dict[str, str]) -> list[UnitReport]:
        self._machines[worker] = found.pop("machine")
        if others := differences(self._versions, found):
            raise ClusterError(
                f"the worker on {self._machines[worker]} runs another version than this process: {'; '.join(others)}. "
                "Install the same versions on all machines, and restart Ray there"
            )
        self._call(worker, self._opened, "open", self._make, os.getcwd())
        return []

    def _opened(self, worker: int, identity: dict[str, Any]) -> list[UnitReport]:
        if self._expected is None:
            self._expected = identity
        elif others := differences(self._expected, identity):
            raise ClusterError(
                f"the worker on {self._machines[worker]} computes with something else: {'; '.join(others)}. All "
                "machines need the same model files and the same kind of device"
            )
        self._units[worker] = {}
        return []

    def _reported(self, worker: int, reports: list[UnitReport]) -> list[UnitReport]:
        held = self._units[worker]
        for report in reports:
            if report.key not in held:
                raise InvariantError(f"a worker reported on {report.key}, which it was not given")
            if report.done:
                del held[report.key]
                self._deaths = 0
        return reports

    def _lost(self, worker: int, reason: str) -> None:
        machine = self._machines.pop(worker, None)
        units = self._units.pop(worker, {})
        self._returned.extend(units.values())
        self._deaths += 1
        where = "" if machine is None else f" on {machine}"
        if self._deaths > max(DEATHS, 2 * self.size):
            raise ClusterError(
                f"{self._deaths} workers died without finishing anything in between, the last{where}: {reason}. What "
                "is finished is kept: look at that machine's memory and Ray's logs, then run the same command again"
            )
        again = f"; its unfinished units are done again ({len(units)})" if units else ""
        _LOG.warning("a worker%s died: %s%s", where, reason, again)
        self._start()
