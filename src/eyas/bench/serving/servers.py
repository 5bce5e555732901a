"""The servers of a benchmark: processes started for it, their counters, and sides with their request settings.

A process is ready before anything is measured and gone afterwards; the processor time it uses while idle is measured.

Speculation counters are the server's own, read from the pages on which engines publish them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

import httpx

from eyas.errors import EndpointError, UsageError

_ENGINES = ("eyas", "vllm", "llamacpp")
_PREFIX = "spec_decode_num_"
_SGLANG_LENGTH = "sglang:spec_accept_length"


@dataclass(frozen=True)
class SpeculationCounts:
    """Counts since the server's start, or during a run; all 0 where the server publishes none."""

    drafts: float = 0.0
    """Drafts that were verified: target passes with at least one draft token."""
    draft_tokens: float = 0.0
    accepted: float = 0.0
    """Draft tokens that were accepted."""
    by_position: tuple[float, ...] = ()
    """`[i]` = drafts accepted at depth i + 1."""
    length: float | None = None
    """SGLang publishes a mean accept length instead of counts: the latest one, not the run's."""

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        return self._with(other, 1.0)

    def __sub__(self, other: SpeculationCounts) -> SpeculationCounts:
        return self._with(other, -1.0)

    def _with(self, other: SpeculationCounts, sign: float) -> SpeculationCounts:
        positions = zip_longest(self.by_position, other.by_position, fillvalue=0.0)
        return SpeculationCounts(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted + sign * other.accepted,
            tuple(mine + sign * theirs for mine, theirs in positions),
            self.length if other.length is None or sign < 0 else other.length,
        )

    @property
    def rates(self) -> list[float]:
        """`[i]` = share of the drafts that were accepted at depth i + 1."""
        return [count / self.drafts for count in self.by_position] if self.drafts else []

    @property
    def accept_length(self) -> float | None:
        """1 + accepted / drafts, or the server's own mean; None if it publishes neither."""
        return 1.0 + self.accepted / self.drafts if self.drafts else self.length


def read_metrics(page: str) -> SpeculationCounts | None:
    """The counts on a Prometheus page; None if the page has none or isn't in Prometheus' format.

    The counters of eyas, vLLM and llama.cpp are summed over their labels; SGLang's gauge is averaged.
    """
    sums = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0.0)
    positions: dict[int, float] = {}
    lengths: list[float] = []
    known = False
    parse = _parser()
    try:
        samples = [sample for family in parse(page) for sample in family.samples]
    except ValueError:
        return None
    for sample in samples:
        engine, _, rest = sample.name.partition(":")
        name = rest.removeprefix(_PREFIX).removesuffix("_total")
        if sample.name == _SGLANG_LENGTH and sample.value > 0:  # 0: a rank without work
            lengths.append(sample.value)
        elif engine not in _ENGINES or not rest.startswith(_PREFIX):
            continue
        elif name in sums:
            known = True
            sums[name] += sample.value
        elif name == "accepted_tokens_per_pos" and sample.labels.get("position", "").isdecimal():
            depth = int(sample.labels["position"])
            positions[depth] = positions.get(depth, 0.0) + sample.value
    if not known and not lengths:
        return None
    return SpeculationCounts(
        sums["drafts"],
        sums["draft_tokens"],
        sums["accepted_tokens"],
        tuple(positions.get(depth, 0.0) for depth in range(max(positions, default=-1) + 1)),
        sum(lengths) / len(lengths) if lengths else None,
    )


def _parser() -> Callable[[str], Iterable[Any]]:
    """Prometheus' own parser of its text format; raises UsageError if the client library isn't installed."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UsageError(
            "reading a server's counters needs prometheus_client, which is part of an extra: pip install 'eyas[serve]'"
        ) from None
    return text_string_to_metric_families


def read_server_info(info: Any) -> SpeculationCounts | None:
    """SGLang's `/get_server_info`, for servers started without metrics; None if it has no accept length."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    lengths = [state.get("avg_spec_accept_length") for state in states or () if isinstance(state, dict)]
    known = [float(length) for length in lengths if isinstance(length, int | float) and length > 0]
    return SpeculationCounts(length=sum(known) / len(known)) if known else None


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

        `bound`: the server and all it started are killed when this process ends, even by kill -9.
        """
        self._bound = bound
        self.name = name
        self.port = _free_port()
        self._ready_seconds = ready_seconds
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
        """Start it; returns the seconds until it was ready. Raises EndpointError if it exits or isn't ready in time."""
        began = time.monotonic()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # so that all it starts can be found and ended
        )
        if self._bound:  # some engines' processes outlive their parent
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
        return sum(int(fields[11]) + int(fields[12]) for fields in self._processes()) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Resident memory of the server and all it started, mapped files included; 0 on systems without `/proc`."""
        return sum(int(fields[21]) for fields in self._processes()) * os.sysconf("SC_PAGE_SIZE")

    def _processes(self) -> Iterator[list[str]]:
        """The fields of `/proc/PID/stat` after the name, of each process of the server's session."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
                if fields[3] == str(self.pid):
                    yield fields


def eyas_server(
    name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, ready_seconds: float = 300.0
) -> ServerProcess:
    """The process of `eyas serve ARGUMENTS`, not started yet."""
    command = [sys.executable, "-m", "eyas", "serve", *arguments]
    return ServerProcess(
        name, lambda port: [*command, "--port", str(port)], environment=environment, ready_seconds=ready_seconds
    )


class IdleMeter:
    """Measures the processor time that idle servers take from the one under load."""

    def __init__(self, servers: Mapping[str, ServerProcess]) -> None:
        """`servers`: side -> its server; two sides may share one."""
        self._servers = servers
        self._used = {server.name: 0.0 for server in servers.values()}
        self._idle = dict.fromkeys(self._used, 0.0)

    @contextmanager
    def __call__(self, side: str) -> Iterator[None]:
        """Wait until the other servers are idle, then measure them while `side` is under load."""
        active = self._servers.get(side)
        idle = {server.name: server for server in self._servers.values() if server is not active}
        _settle(idle.values())
        before = {name: server.cpu_seconds() for name, server in idle.items()}
        began = time.monotonic()
        yield
        for name, server in idle.items():
            self._used[name] += server.cpu_seconds() - before[name]
            self._idle[name] += time.monotonic() - began

    def shares(self) -> dict[str, float]:
        """Server -> share of a core that it used while it was idle."""
        return {name: round(self._used[name] / idle, 4) if idle else 0.0 for name, idle in self._idle.items()}


_SETTLING, _LOOK = 3.0, 0.1  # seconds


def _settle(servers: Collection[ServerProcess]) -> None:
    """Wait until servers use less than a tenth of a core, for at most three seconds.

    vLLM polls for a second after its last answer, which would take a core from the server that is measured next.
    """
    until = time.monotonic() + _SETTLING
    busy = bool(servers)
    used = sum(server.cpu_seconds() for server in servers)
    while busy and time.monotonic() < until:
        time.sleep(_LOOK)
        before = used
        used = sum(server.cpu_seconds() for server in servers)
        busy = used - before > 0.1 * _LOOK + 0.001  # a single clock tick counts as idle


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
            f"{text!r} isn't a server: write http://HOST:PORT/v1 (or `side=NAME=http://...`), optionally followed by "
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
    """Raise UsageError if two sides have the same name or the baseline isn't a side."""
    if len(set(names)) < len(names):
        raise UsageError(f"two sides have the same name: {', '.join(names)}")
    if baseline not in names:
        raise UsageError(f"`baseline={baseline}` isn't one of the sides: {', '.join(names)}")
