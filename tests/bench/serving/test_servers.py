"""Servers of other programs, started and ended; a server here is Python's own, in a directory with a `health` file."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from eyas.bench.serving.servers import IdleMeter, ServerProcess
from eyas.errors import EndpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "health").write_text("ok", encoding="utf-8")
    return tmp_path


SERVE = "from http.server import SimpleHTTPRequestHandler as Handler, test; test(Handler, port={}, bind='127.0.0.1')"


def file_server(name: str, folder: Path, first: str = "pass") -> ServerProcess:
    """`first` is run before it serves."""
    code = f"import os; os.chdir({str(folder)!r}); {first}; {SERVE}"
    return ServerProcess(name, lambda port: [sys.executable, "-c", code.format(port)], ready_seconds=30)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_is_ready_inside_and_gone_after(folder: Path) -> None:
    with file_server("files", folder) as server:
        assert httpx.get(f"{server.root}/health").text == "ok"
        assert server.url == f"{server.root}/v1"
        pid = server.pid
        assert server.cpu_seconds() > 0
    assert not alive(pid)


def test_what_it_started_goes_with_it(folder: Path) -> None:
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    child = f"import subprocess, sys; print(subprocess.Popen({sleep}).pid, flush=True)"
    with file_server("files", folder, child) as server:
        started = int(server.log_tail(99).split()[0])
        assert alive(started)
    until = time.monotonic() + 5
    while alive(started) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(started)


def test_it_is_gone_with_all_it_started_once_its_process_is_killed(folder: Path) -> None:
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = f"import os, subprocess, sys; os.chdir({str(folder)!r}); subprocess.Popen({sleep}); {SERVE}"
    parent = (
        "import os, signal, sys; from eyas.bench.serving.servers import ServerProcess\n"
        f"server = ServerProcess('files', lambda port: [sys.executable, '-c', {code!r}.format(port)], bound=True)\n"
        "server.start(); print(server.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    session = done.stdout.strip()
    assert session.isdigit(), done.stderr

    def members() -> list[list[str]]:
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
                found += [fields] if fields[3] == session and fields[0] != "Z" else []
        return found

    until = time.monotonic() + 10
    while members() and time.monotonic() < until:
        time.sleep(0.02)
    assert members() == []


def test_it_can_be_killed_and_started_again(folder: Path) -> None:
    with file_server("files", folder) as server:
        server.kill()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.root}/health")
        assert server.start() < 30
        assert httpx.get(f"{server.root}/health").text == "ok"


def test_a_server_that_ends_says_why(folder: Path) -> None:
    with (
        pytest.raises(EndpointError, match="ended at once: no such model"),
        file_server("broken", folder, "raise SystemExit('no such model')"),
    ):
        pass


def test_a_server_that_is_never_ready_is_ended() -> None:
    code = "import time; time.sleep(60)"
    server = ServerProcess("slow", lambda _: [sys.executable, "-c", code], ready_seconds=0.3)
    with pytest.raises(EndpointError, match=r"wasn't ready in 0\.3 s"), server:
        pass
    assert not alive(server.pid)


def test_who_is_busy_while_another_is_measured(folder: Path) -> None:
    burning = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass'])"
    with file_server("quiet", folder) as quiet, file_server("burning", folder, burning) as hot:
        meter = IdleMeter({"a": quiet, "b": hot, "c": quiet})
        with meter("a"):
            time.sleep(0.5)
        with meter("b"):
            time.sleep(0.2)
        shares = meter.shares()
    assert shares["burning"] > 0.1
    assert shares["quiet"] < 0.1


def test_a_side_is_measured_once_the_others_rest(folder: Path) -> None:
    polling = "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"
    first = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {polling!r}])"
    with file_server("measured", folder) as measured, file_server("polling", folder, first) as other:
        meter = IdleMeter({"a": measured, "b": other})
        with meter("a"):
            time.sleep(0.5)
    assert meter.shares()["polling"] < 0.1
