"""What runs on the machines of a cluster: a worker, the units that it was given, and its reports.

A worker computes only while it is called. `WorkerActor.exchange` takes more units, works for a moment and returns the
reports so far, so that an executor needs only calls: no queues, no threads.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from eyas.errors import EyasError, UsageError
from eyas.files import file_hash
from eyas.runtime import versions
from eyas.work import MakeWorker, Unit, UnitReport, Worker

EXCHANGE_SECONDS = 0.2
"""Seconds after which an exchange returns the reports so far; a single step of a worker may take longer."""


class Refused(NamedTuple):
    """Why a worker can't continue, which ends the whole run: an error, as opposed to a worker's death."""

    message: str
    usage: bool = False
    """Whether the command was used wrongly (UsageError)."""


class WorkerActor:
    """A worker with its inbox, called from another machine."""

    def __init__(self) -> None:
        self._inbox: deque[Unit] = deque()
        self._worker: Worker | None = None
        self._reports: Iterator[UnitReport] | None = None

    def describe(self) -> dict[str, str]:
        """The machine, and the versions that must be the same on all machines."""
        return {"machine": f"{socket.gethostname()}, process {os.getpid()}", **installed()}

    def open(self, make: MakeWorker, folder: str) -> dict[str, Any] | Refused:
        """Make the worker in `folder`, if that exists here, since relative paths refer to it; return its identity."""
        if Path(folder).is_dir():
            os.chdir(folder)
        try:
            self._worker = make()
            return self._worker.identity
        except Exception as error:  # noqa: BLE001  # whatever it is, the run's own process reports it
            return refusal(error)

    def exchange(self, units: Sequence[Unit]) -> list[UnitReport] | Refused:
        """Take more units, work for a moment and return the reports; immediately if there is nothing to do."""
        assert self._worker is not None
        self._inbox.extend(units)
        found: list[UnitReport] = []
        until = time.monotonic() + EXCHANGE_SECONDS
        try:
            while self._reports is not None or self._inbox:
                if self._reports is None:
                    self._reports = iter(self._worker.work(self._take))
                report = next(self._reports, None)
                if report is None:
                    self._reports = None
                else:
                    found.append(report)
                if time.monotonic() >= until:
                    break
        except Exception as error:  # noqa: BLE001  # as above
            return refusal(error)
        return found

    def close(self) -> None:
        """Abandon work in progress and release what the worker has opened."""
        self._reports = None  # this closes a generator
        self._worker = None

    def _take(self, room: int) -> list[Unit]:
        return [self._inbox.popleft() for _ in range(min(room, len(self._inbox)))]


@cache
def installed() -> dict[str, str]:
    """Versions of eyas, torch and transformers, and a hash of eyas's source, which tells two checkouts apart."""
    source = sorted(Path(__file__).parents[2].rglob("*.py"))
    return {**versions(), "source": file_hash(*source)}


def refusal(error: Exception) -> Refused:
    """An exception in the form that a worker returns: with its message, whatever its class."""
    if isinstance(error, EyasError):
        return Refused(str(error), isinstance(error, UsageError))
    return Refused(f"unexpected {type(error).__name__}: {str(error).strip() or 'no message'}")
