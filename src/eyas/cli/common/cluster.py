"""Options of verbs that can share their work among machines, and the cluster that they describe."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from typer import Option

from eyas.cli.common.aliases import option_name
from eyas.errors import UsageError
from eyas.plugins import feature
from eyas.urls import is_url

if TYPE_CHECKING:
    from eyas.work import Cluster, ConnectCluster


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

    def connected(self) -> AbstractContextManager[Cluster]:
        """The cluster, connected for a block. Raises UsageError if it can't be reached."""
        from eyas.work import ClusterConfig

        assert self.on is not None
        connect: ConnectCluster = feature("cluster", "--on")
        cpus = self.cpus_per_worker or 1
        return connect(ClusterConfig(address=parse_on(self.on), cpus=cpus, gpus=self.gpus_per_worker))


def parse_on(text: str) -> str | None:
    """The address in `ray[:ADDRESS]`. Raises UsageError for anything else."""
    kind, colon, address = text.partition(":")
    if kind != "ray" or (colon and not re.fullmatch(r"auto|(ray://)?[^/]+:\d+", address)):
        raise UsageError(
            f"--on {text}: write ray, or ray:ADDRESS, where ADDRESS is auto or the HOST:PORT of a Ray cluster"
        )
    return address or None
