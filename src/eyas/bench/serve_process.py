"""Servers of our own: `eyas serve` in a process each, up before anything is measured and gone afterwards."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

from eyas.errors import EndpointError

_TICKS = 100  # of /proc/PID/stat, a second: Linux's USER_HZ


class ServerProcess:
    """`eyas serve ARGUMENTS` on a free port of this machine. Use it as a context manager."""

    def __init__(self, name: str, arguments: Sequence[str], ready_seconds: float = 300.0) -> None:
        self.name, self.arguments, self._ready_seconds = name, list(arguments), ready_seconds
        self.port = _free_port()
        self.command = [sys.executable, "-m", "eyas", "serve", *arguments, "--port", str(self.port)]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Up to and including `/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def start(self) -> float:
        """Start it; returns the seconds until it answered `/health`. EndpointError if it ends or stays silent."""
        began = time.monotonic()
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        while time.monotonic() - began < self._ready_seconds:
            if self._process.poll() is not None:
                raise EndpointError(f"the server {self.name!r} ended at once: {self.log_tail()}")
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5, trust_env=False).is_success:
                    return time.monotonic() - began
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        self.stop()
        raise EndpointError(f"the server {self.name!r} wasn't ready in {self._ready_seconds:g} s: {self.log_tail()}")

    def stop(self) -> None:
        """End it, kindly for ten seconds."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def log_tail(self, lines: int = 12) -> str:
        """What it said last."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode("utf-8", "replace").splitlines()[-lines:])

    def cpu_seconds(self) -> float:
        """Processor time it has used so far; 0 where the system doesn't tell."""
        return _cpu_seconds(self.pid)


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class IdleMeter:
    """Which servers use the processor while another one is measured: they take time away from it."""

    def __init__(self, servers: Mapping[str, ServerProcess]) -> None:
        """`servers`: side -> the server behind it; two sides may share one."""
        self._servers = servers
        self._used = {server.name: 0.0 for server in servers.values()}
        self._idle = dict.fromkeys(self._used, 0.0)

    @contextmanager
    def __call__(self, side: str) -> Iterator[None]:
        """Watch the others while `side` is measured."""
        active = self._servers.get(side)
        idle = {server.name: server for server in self._servers.values() if server is not active}
        before, began = {name: server.cpu_seconds() for name, server in idle.items()}, time.monotonic()
        yield
        for name, server in idle.items():
            self._used[name] += server.cpu_seconds() - before[name]
            self._idle[name] += time.monotonic() - began

    def shares(self) -> dict[str, float]:
        """Server -> processor seconds a second while it had nothing to do."""
        return {name: round(self._used[name] / idle, 4) if idle else 0.0 for name, idle in self._idle.items()}
