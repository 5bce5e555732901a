"""Where workers run: what an executor has to do, and what a user says about it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from eyas.config import StrictModel
from eyas.errors import UsageError


class ClusterConfig(StrictModel):
    """Where the workers of a run are, and what each of them gets."""

    address: str | None = None
    """The address of a Ray cluster; None: the one that Ray finds, or else one on this machine for this run."""
    cpus: int = Field(default=1, gt=0)
    gpus: float | None = Field(default=None, ge=0)
    """GPUs of a worker, or the share of one; None: one if the cluster has any."""


class Died(NamedTuple):
    """A worker that is gone: killed, out of memory, or with its machine."""

    reason: str


class Executor(Protocol):
    """Runs `WorkerActor`s somewhere and calls their methods; each has at most one call in progress."""

    room: int
    """The number of workers that a run gets if it doesn't say how many it wants."""

    def start(self) -> int:
        """Begin to start a worker; its number, at which it can be called already."""

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        """Call a method of a worker; `wait` returns the result."""

    def wait(self, seconds: float) -> list[tuple[int, Any]]:
        """(worker, result or `Died`) of calls that have ended; waits for the first, at most so long."""

    def stop(self) -> None:
        """End all workers, whatever they are doing; more than once does no harm."""


def parse_on(text: str) -> str | None:
    """The address in `ray[:ADDRESS]`. Raises UsageError for anything else."""
    kind, colon, address = text.partition(":")
    if kind != "ray" or (colon and not re.fullmatch(r"auto|(ray://)?[^/]+:\d+", address)):
        raise UsageError(
            f"--on {text}: write ray, or ray:ADDRESS, the address being HOST:PORT of a Ray cluster, or auto"
        )
    return address or None
