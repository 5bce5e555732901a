"""The servers of a benchmark: processes started for it, and sides, each a server with the settings of its requests.

A process is up before anything is measured and gone afterwards; the processor time that it uses while idle is measured.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from eyas.errors import EndpointError, UsageError

_FLAGS = {"true": True, "false": False}


class ServerProcess:
    """A server on a free port of this machine that answers `/health` when it is ready. Use it as a context manager."""

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        environment: Mapping[str, str] | None = None,
        ready_seconds: float = 300.0,
        bound: bool = False,
    ) -> None:
        """`command(port)` is what to run; `environment` is added to this process's.

        `bound`: it is killed when this process ends, even by kill -9, with all that it started.
        """
        self._bound = bound
        self.name, self.port, self._ready_seconds = name, _free_port(), ready_seconds
        self.command = list(command(self.port))
        self._environment = os.environ | (environment or {})
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed on leaving
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> str:
        """The address without a path, `http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The base address of the API, which ends with `/v1`."""
        return f"{self.root}/v1"

    @property
    def pid(self) -> int:
        """The id of the process, which leads a session of its own."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def start(self) -> float:
        """Start it; returns the seconds until it was ready. EndpointError if it ends or isn't ready in time."""
        began = time.monotonic()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # so that all it starts can be found and ended
        )
        if self._bound:  # engines' processes don't all notice that the one that started them is gone
            self._guard = subprocess.Popen(
                ["sh", "-c", f"read -r _; kill -s KILL -- -{self.pid}"],
                stdin=subprocess.PIPE,  # closed by the system when this process ends
                start_new_session=True,
            )
        while time.monotonic() - began < self._ready_seconds:
            if self._process.poll() is not None:
                raise EndpointError(f"the server {self.name!r} ended at once: {self.log_tail()}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.root}/health", timeout=5, trust_env=False).is_success:
                    return time.monotonic() - began
            time.sleep(0.1)
        raise EndpointError(f"the server {self.name!r} wasn't ready in {self._ready_seconds:g} s: {self.log_tail()}")

    def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL after ten seconds."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self.kill()

    def kill(self) -> None:
        """Kill the server and all it started (SIGKILL)."""
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the server's output."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode("utf-8", "replace").splitlines()[-lines:])

    def cpu_seconds(self) -> float:
        """Processor time used so far by the server and all it started; 0 on systems without `/proc`."""
        used = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
                if fields[3] == str(self.pid):  # its session
                    used += int(fields[11]) + int(fields[12])
        return used / os.sysconf("SC_CLK_TCK")


def eyas_server(
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    ready_seconds: float = 300.0,
) -> ServerProcess:
    """The process of `eyas serve ARGUMENTS`, not started yet."""
    command = [sys.executable, "-m", "eyas", "serve", *arguments]
    return ServerProcess(
        name, lambda port: [*command, "--port", str(port)], environment=environment, ready_seconds=ready_seconds
    )


class IdleMeter:
    """Measures what servers use of the processor while another one is under load, which that takes from it."""

    def __init__(self, servers: Mapping[str, ServerProcess]) -> None:
        """`servers`: side -> its server; two sides may share one."""
        self._servers = servers
        self._used = {server.name: 0.0 for server in servers.values()}
        self._idle = dict.fromkeys(self._used, 0.0)

    @contextmanager
    def __call__(self, side: str) -> Iterator[None]:
        """Measure the other servers while `side` is under load."""
        active = self._servers.get(side)
        idle = {server.name: server for server in self._servers.values() if server is not active}
        before, began = {name: server.cpu_seconds() for name, server in idle.items()}, time.monotonic()
        yield
        for name, server in idle.items():
            self._used[name] += server.cpu_seconds() - before[name]
            self._idle[name] += time.monotonic() - began

    def shares(self) -> dict[str, float]:
        """Server -> share of a core that it used while it was idle."""
        return {name: round(self._used[name] / idle, 4) if idle else 0.0 for name, idle in self._idle.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Side:
    """A server under a name, and settings of its requests. Two sides may share a server, with different settings."""

    name: str
    url: str
    """The base address of the API, which ends with `/v1`."""
    model: str = ""
    """The model's name in requests; empty = the first one that the server lists."""
    speculate: bool | None = None
    """Sent as `{"eyas": {"speculate": ...}}`, which only eyas understands; None = not sent."""

    @property
    def root(self) -> str:
        """The server's address without `/v1`, where `/health` and `/metrics` are."""
        return self.url.removesuffix("/v1")

    @property
    def extra(self) -> dict[str, Any]:
        """Fields that are added to the body of every request."""
        return {} if self.speculate is None else {"eyas": {"speculate": self.speculate}}

    def settings(self) -> dict[str, Any]:
        """The side as it is kept in reports."""
        return {"url": self.url, "model": self.model, "speculate": self.speculate}


def parse_side(text: str, default_name: str = "") -> Side:
    """Parse `NAME=URL[,speculate=true|false][,model=NAME]`; `default_name` stands in for a missing `NAME=`."""
    address, *settings = text.split(",")
    name, given, url = address.partition("=")
    if not given or name.startswith(("http://", "https://")):
        name, url = default_name, address
    if not name or not url.startswith(("http://", "https://")):
        raise UsageError(
            f"{text!r} is no server: write http://HOST:PORT/v1 (with --side NAME=http://...), perhaps with "
            ",speculate=false or ,model=NAME"
        )
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "model" and value:
            values[key] = value
        elif key == "speculate" and value in _FLAGS:
            values[key] = _FLAGS[value]
        else:
            raise UsageError(f"{text!r}: {setting!r} is neither speculate=true|false nor model=NAME")
    url = url.rstrip("/")
    return Side(name, url if url.endswith("/v1") else f"{url}/v1", **values)


def check_names(names: Sequence[str], baseline: str) -> None:
    """Raise UsageError for two sides of one name, and for a baseline that is no side."""
    if len(set(names)) < len(names):
        raise UsageError(f"two sides have the same name: {', '.join(names)}")
    if baseline not in names:
        raise UsageError(f"--baseline {baseline!r} is none of the sides: {', '.join(names)}")
