"""The sandbox: hostile programs have their outcomes, leave nothing behind, and this process goes on."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from eyas.bench.accuracy.tasks import ProgramOutcome
from eyas.errors import UsageError
from eyas.labs.sandbox import sandbox as sandbox_module
from eyas.labs.sandbox.sandbox import Sandbox, SandboxLimits

LIMITS = SandboxLimits(seconds=20.0, memory_bytes=256 << 20, disk_bytes=1 << 20)
HASTY = SandboxLimits(seconds=1.0)


def sandboxes() -> list[bool]:
    """With namespaces, where there are any, and without."""
    return [True, False] if Sandbox().isolated else [False]


@pytest.fixture(params=[True, False], ids=["namespaces", "limits"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param not in sandboxes():
        pytest.skip("this system gives us no namespaces")
    return Sandbox(LIMITS, isolated=request.param)


@pytest.fixture
def isolated() -> Sandbox:
    if True not in sandboxes():
        pytest.skip("this system gives us no namespaces")
    return Sandbox(LIMITS, isolated=True)


def test_programs_run_to_their_end(sandbox: Sandbox) -> None:
    assert sandbox.run("import math, typing, hashlib, collections\nassert math.sqrt(4) == 2") == ProgramOutcome(
        "passed"
    )
    assert sandbox.run("x = 1\nassert x == 2, 'not two'") == ProgramOutcome("failed", "AssertionError: not two")
    assert sandbox.run("def f(:").detail.startswith("SyntaxError")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("program", "outcome", "words"),
    [
        ("x = ' ' * (1 << 30)", "failed", "MemoryError"),
        ("import sys; sys.exit(0)", "ended early", "sys.exit(0)"),
        ("import os; os._exit(0)", "ended early", "exited with 0"),
        ("import os; os._exit(3)", "ended early", "exited with 3"),
        ("import ctypes; ctypes.string_at(0)", "killed", "SIGSEGV"),
        ("input()", "failed", "EOFError"),
        ("def f(): f()\nf()", "failed", "RecursionError"),
        ("f = open('a', 'w')\nfor _ in range(9): f.write('x' * (1 << 20)); f.flush()", "failed", "File too large"),
        ("import os; assert dict(os.environ) == {}", "passed", ""),
        ("open('note', 'w').write('x'); assert open('note').read() == 'x'", "passed", ""),
        ("import os; assert os.listdir() == []", "passed", ""),
        ("for _ in range(20000): print('x' * 1000)", "passed", ""),
        ("import resource as r; r.setrlimit(r.RLIMIT_CPU, (1, 1))\nwhile True: pass", "killed", "SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", "SIGKILL"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", None, ""),
        ("import os, signal; os.killpg(0, signal.SIGKILL)", None, ""),
    ],
)
def test_hostile_programs(sandbox: Sandbox, program: str, outcome: str | None, words: str) -> None:
    found = sandbox.run(program)
    assert outcome in (None, found.outcome), found
    assert words in found.detail
    assert sandbox.run("pass").passed  # and this process is still here


@pytest.mark.every(3)
@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_time_is_limited(sandbox: Sandbox, program: str) -> None:
    began = time.monotonic()
    found = Sandbox(HASTY, isolated=sandbox.isolated).run(program)
    assert found.outcome in ("timed out", "killed")  # by the wall clock or the processor's, whichever is first
    assert time.monotonic() - began < 15


def test_a_forged_report_is_none(sandbox: Sandbox) -> None:
    forged = """import os
for fd in range(3, 60):
    try:
        os.write(fd, b'{"outcome": "passed", "nonce": "00000000000000000000000000000000"}')
    except OSError:
        pass
os._exit(0)"""
    assert sandbox.run(forged) == ProgramOutcome("ended early", "its process exited with 0")


def processes(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(path)] if mark.encode() in path.read_bytes() else []
        except OSError:
            continue
    return found


def test_a_fork_bomb_does_not_go_off(isolated: Sandbox) -> None:
    found = isolated.run("import os\nwhile True: os.fork()")
    assert (found.outcome, "temporarily unavailable" in found.detail) == ("failed", True)
    threads = isolated.run("import threading\nthreading.Thread(target=print).start()")
    assert "can't start new thread" in threads.detail
    until = time.monotonic() + 20.0  # those of other tests, which may run at the same time, end as well
    while processes("jail.py") and time.monotonic() < until:
        time.sleep(0.05)
    assert not processes("jail.py")


def test_the_network_is_out_of_reach(isolated: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = isolated.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)")
    assert "Network is unreachable" in found.detail


def test_files_and_processes_of_others_are_out_of_reach(isolated: Sandbox, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept", encoding="utf-8")
    tmp_path.chmod(0o777)
    kept.chmod(0o666)
    for program in (f"open({str(kept)!r}, 'w')", f"import os; os.remove({str(kept)!r})", f"open({str(kept)!r}, 'a')"):
        assert "Read-only file system" in isolated.run(program).detail
    assert kept.read_text(encoding="utf-8") == "kept"
    assert isolated.run("import os; assert os.listdir('/proc') == []").passed
    assert "No such process" in isolated.run(f"import os; os.kill({os.getpid()}, 9)").detail
    remount = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.mount(b'none', b'/', None, 32 | 4096, None) == 0, os.strerror(ctypes.get_errno())"
    )
    assert "not permitted" in isolated.run(remount).detail


def test_several_at_once(sandbox: Sandbox) -> None:
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(sandbox.run("x = 1").passed)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3


def test_what_holds_is_said_and_too_little_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "WITHOUT namespaces" in Sandbox(isolated=False).describe()
    assert "no network" in Sandbox(isolated=True).describe()
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda _: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UsageError, match="don't hold for root"):
        Sandbox()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not Sandbox().isolated
