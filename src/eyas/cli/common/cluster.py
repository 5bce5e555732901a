"""Options of verbs that can share their work among machines, and the executor that they describe."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from eyas.cli.common.aliases import option_name
from eyas.errors import UsageError
from eyas.urls import is_url

if TYPE_CHECKING:
    from eyas.cluster.on_ray import RayExecutor


@dataclass(frozen=True)
class ClusterOptions:
    """Where the work is done, and the resources of each worker."""

    PANEL: ClassVar[str] = "Several machines (experimental)"
    on: Annotated[
        str | None,
        Option(
            metavar="ray[:ADDRESS]",
            help="Share the work among the machines of a Ray cluster: the one at ADDRESS, else the one that Ray finds, "
            "else a temporary one on this machine.",
        ),
    ] = None
    workers: Annotated[int | None, Option(min=1, help="With --on: number of workers (default: as many as fit).")] = None
    cpus_per_worker: Annotated[int | None, Option(min=1, help="With --on: CPU cores per worker (default: 1).")] = None
    gpus_per_worker: Annotated[
        float | None, Option(min=0, help="With --on: GPUs per worker, or a share of one (default: 1 if there is any).")
    ] = None

    def check(self, *folders: Path) -> bool:
        """Whether the work is shared. Raises UsageError for options that are wrong or would be ignored.

        `folders` are read and written by all machines.
        """
        from eyas.cluster.crew import parse_on

        given = [option_name(name) for name, value in vars(self).items() if value is not None and name != "on"]
        if self.on is None:
            if given:
                raise UsageError(f"{', '.join(given)} would be ignored without --on: give --on ray")
            return False
        parse_on(self.on)
        if "WORLD_SIZE" in os.environ:
            raise UsageError("--on starts all workers: run the command once, without torchrun")
        for folder in folders:
            if is_url(folder):
                raise UsageError(f"{folder} is a URL: give a folder that all machines share, such as a mounted bucket")
        return True

    def executor(self) -> AbstractContextManager[RayExecutor]:
        """The workers' executor, connected to the cluster."""
        from eyas.cluster.crew import ClusterConfig, parse_on
        from eyas.cluster.on_ray import RayExecutor

        assert self.on is not None
        cpus = self.cpus_per_worker or 1
        return RayExecutor(ClusterConfig(address=parse_on(self.on), cpus=cpus, gpus=self.gpus_per_worker))
