"""An executor with its workers in this process: calls end in random order, and some workers die."""

from __future__ import annotations

import pickle
import random
from typing import Any

from eyas.labs.cluster.crew import Crew, WorkerDeath
from eyas.labs.cluster.worker import WorkerActor
from eyas.work import MakeWorker


class FakeExecutor:
    """`deaths` workers die at random calls, before or after working; every call of the method `doomed` is fatal."""

    def __init__(self, seed: int = 0, deaths: int = 0, room: int = 3, doomed: str | None = None) -> None:
        self.room = room
        self.deaths = deaths
        self.doomed = doomed
        self.started = 0
        self.stopped = False
        self.most = 0
        """Largest number of units given to a worker in one call."""
        self.describes: dict[int, dict[str, str]] = {}
        """Worker -> what it reports instead of its real machine and versions."""
        self._draw = random.Random(seed)
        self._actors: dict[int, WorkerActor] = {}
        self._calls: dict[int, tuple[str, bytes]] = {}

    def crew(self, make: MakeWorker, **options: Any) -> Crew:
        return Crew(self, make, **options)

    def start(self) -> int:
        self._actors[self.started] = WorkerActor()
        self.started += 1
        return self.started - 1

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        assert worker not in self._calls, "a worker has at most one call in progress"
        if method == "exchange":
            self.most = max(self.most, len(arguments[0]))
        self._calls[worker] = (method, pickle.dumps(arguments))

    def wait(self, seconds: float) -> list[tuple[int, Any]]:  # noqa: ARG002  # part of the protocol
        assert self._calls, "nothing is in progress: this would wait forever"
        worker = self._draw.choice(sorted(self._calls))
        method, arguments = self._calls.pop(worker)
        if worker not in self._actors:
            return [(worker, WorkerDeath("it is gone"))]
        dies = method == self.doomed or (self.deaths > 0 and self._draw.random() < 0.2)
        if dies and self._draw.random() < 0.5:
            return [(worker, self._end(worker))]
        if method == "describe" and worker in self.describes:
            return [(worker, dict(self.describes[worker]))]
        result = getattr(self._actors[worker], method)(*pickle.loads(arguments))
        return [(worker, self._end(worker) if dies else pickle.loads(pickle.dumps(result)))]

    def stop(self) -> None:
        self.stopped = True

    def _end(self, worker: int) -> WorkerDeath:
        self.deaths -= 1
        self._actors.pop(worker).close()  # frees its locks, as killing a process does
        return WorkerDeath("killed by a test")
