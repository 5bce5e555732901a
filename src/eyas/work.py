"""Work that may be done anywhere: units, the workers that do them, and a crew of workers on many machines.

The verbs that can share their work say what a unit is and make a worker; they know machines only by the protocols
here. What implements them is a plug-in, the feature `cluster` (`eyas.plugins`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from eyas.config import StrictModel

Key = str | tuple[str, int]


class Unit(NamedTuple):
    """A piece of work that any worker may do, any number of times, with the same result."""

    key: Key
    content: Any


class UnitReport(NamedTuple):
    """What a worker reports about a unit: a value at its end, or while it is being done."""

    key: Key
    value: Any
    done: bool = True


Take = Callable[[int], Sequence[Unit]]
"""`take(room)` returns at most `room` units, or none if there are none at present."""


class Worker(Protocol):
    """Does units, possibly several at a time; made on its machine by a function without arguments."""

    @property
    def identity(self) -> dict[str, Any]:
        """What results depend on, serializable as JSON: the same for all workers of a run."""

    def work(self, take: Take) -> Iterator[UnitReport]:
        """Do units until `take` has none and none is in progress; yield a report with `done` for each of them."""


MakeWorker = Callable[[], Worker]


class Crew(Protocol):
    """The workers of a run. Units of a worker that dies are done again by others."""

    def identity(self) -> dict[str, Any]:
        """Return what all workers compute with, after waiting until the first of them is ready."""

    def run(self, take: Take) -> Generator[UnitReport, None, None]:
        """Yield reports until `take` has no unit left and none is being done."""


class Cluster(Protocol):
    """Machines on which workers run."""

    room: int
    """The number of workers that a run gets by default."""

    def crew(
        self, make: MakeWorker, *, workers: int | None, ahead: int, expected: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[Crew]:
        """Start the workers of a run; they end with the block.

        Args:
            make: called on every worker's machine.
            workers: their number; None: as many as there is `room` for.
            ahead: units that each of them holds, so that it never waits for the next.
            expected: the identity that all workers must have; None: the first one's.
        """


class ClusterConfig(StrictModel):
    """Where the workers of a run are, and the resources of each."""

    address: str | None = None
    """Address of a cluster; None: the one that is found, or else one started on this machine for the run."""
    cpus: int = Field(default=1, gt=0)
    gpus: float | None = Field(default=None, ge=0)
    """GPUs per worker, or a fraction of one; None: one if the cluster has any."""


ConnectCluster = Callable[[ClusterConfig], AbstractContextManager[Cluster]]
"""Connects to a cluster for a block: what the feature `cluster` is. Raises UsageError if it can't be reached."""
