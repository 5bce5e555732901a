"""Workers as actors of a Ray cluster: one that runs already, or one started on this machine for the run."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from eyas.errors import UsageError
from eyas.labs.cluster.crew import Crew, WorkerDeath
from eyas.labs.cluster.worker import Refused, WorkerActor
from eyas.work import ClusterConfig, MakeWorker

ANSWERS = 5.0
"""Seconds within which a cluster's address must accept a connection."""
CLOSES = 2.0
"""Seconds that workers get to stop their work before they are killed."""
PASSED_VARIABLES = ("HF_HUB_OFFLINE", "HF_HOME", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Environment variables that workers get from this process."""


class RayExecutor:
    """Starts every worker as a Ray actor with its own CPUs and GPUs. Use it in a `with` block."""

    def __init__(self, config: ClusterConfig) -> None:
        """Connect to the cluster. Raises UsageError if it can't be reached or no machine fits a worker."""
        self._ray = _imported()
        self._handles: list[Any] = []  # worker -> actor
        self._calls: dict[Any, int] = {}  # reference to a result -> worker
        self._connected = not self._ray.is_initialized()
        if self._connected:
            self._connect(config.address)
        try:
            machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            self._options = self._worker_options(config, machines)
            self.room = room(machines, config.cpus, self._options["num_gpus"])
            if not self.room:
                raise UsageError(_no_room(machines, config.cpus, self._options["num_gpus"]))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def crew(
        self, make: MakeWorker, *, workers: int | None, ahead: int, expected: Mapping[str, Any] | None = None
    ) -> Crew:
        """A crew whose workers are actors of this cluster."""
        return Crew(self, make, workers=workers, ahead=ahead, expected=expected)

    def start(self) -> int:
        self._handles.append(self._ray.remote(WorkerActor).options(**self._options).remote())
        return len(self._handles) - 1

    def call(self, worker: int, method: str, *arguments: Any) -> None:
        reference = getattr(self._handles[worker], method).remote(*arguments)
        self._calls[reference] = worker

    def wait(self, seconds: float) -> list[tuple[int, Any]]:
        ended, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=seconds)
        if ended:  # and all others that have ended by now
            ended, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        return [(worker := self._calls.pop(reference), self._result(worker, reference)) for reference in ended]

    def stop(self) -> None:
        if self._handles:
            closing = [handle.close.remote() for handle in self._handles]
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSES)
        for handle in self._handles:
            self._ray.kill(handle)
        self._handles = []
        self._calls = {}
        if self._connected:
            self._ray.shutdown()
            self._connected = False

    def _result(self, worker: int, reference: Any) -> Any:
        errors = self._ray.exceptions
        died = (errors.RayActorError, errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)
        try:
            return self._ray.get(reference)
        except died as error:
            if getattr(error, "actor_init_failed", False):
                return _unusable(error)
            self._ray.kill(self._handles[worker])  # in case it is only out of reach: another worker does its units
            return WorkerDeath(_last_line(error))
        except errors.RayError as error:
            return _unusable(error)

    def _connect(self, address: str | None) -> None:
        if address is not None and address != "auto":
            _check_answers(address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that is started here
        try:
            self._ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"`on=ray{f':{address}' if address else ''}`: {_last_line(error)}") from error
        # Ray would print the state dumps of lost machines on standard output, which carries a verb's JSON. It has no
        # public switch for that; the crew logs which worker died
        self._ray._private.worker._worker_logs_enabled = False

    def _worker_options(self, config: ClusterConfig, machines: Iterable[dict[str, float]]) -> dict[str, Any]:
        gpus = config.gpus
        if gpus is None:
            gpus = float(any(machine.get("GPU", 0) >= 1 for machine in machines))
        variables = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        variables["OMP_NUM_THREADS"] = str(config.cpus)
        return {"num_cpus": config.cpus, "num_gpus": gpus, "max_restarts": 0, "runtime_env": {"env_vars": variables}}


def room(machines: Iterable[dict[str, float]], cpus: int, gpus: float) -> int:
    """How many workers fit on the machines, given each machine's resources and those that a worker needs."""
    return sum(
        int(min(machine.get("CPU", 0) // cpus, machine.get("GPU", 0) // gpus if gpus else float("inf")))
        for machine in machines
    )


def _no_room(machines: Iterable[dict[str, float]], cpus: int, gpus: float) -> str:
    sizes = ", ".join(f"{machine.get('CPU', 0):g} CPUs and {machine.get('GPU', 0):g} GPUs" for machine in machines)
    return (
        f"no machine of the cluster fits a worker with {cpus} CPUs and {gpus:g} GPUs (they have {sizes}): "
        "lower `cpus_per_worker=` or `gpus_per_worker=`"
    )


def _imported() -> Any:
    """Import Ray. Raises UsageError if it isn't installed; a folder that happens to be called ray doesn't count."""
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError("`on=ray` needs the extra ray: pip install 'eyas[ray]'") from None
    return ray


def _check_answers(address: str) -> None:
    """Raise UsageError unless something accepts connections at `[ray://]HOST:PORT`; Ray would wait much longer."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"`on=ray:{address}`: nothing answers there ({error}). Start a cluster on its first machine with "
            f"`ray start --head --port {port}`, or give `on=ray`, which starts one on this machine"
        ) from None


def _unusable(error: Exception) -> Refused:
    return Refused(
        f"a worker can't be started or called: {_last_line(error)}. Every machine needs eyas with the extra ray, in "
        "the same version as this process"
    )


def _last_line(error: Exception) -> str:
    """The essence of a Ray exception: its last line, after descriptions and stack traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else type(error).__name__
