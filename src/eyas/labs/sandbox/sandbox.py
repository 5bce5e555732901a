"""Run model-written programs in a subprocess with limits; nothing they start outlives them.

A program gets its own Python and session, an empty environment, a temporary directory, and limits on processor time,
memory, file size and processes (it can start none). When its time is up, it is killed together with everything it
started. Where Linux offers namespaces (util-linux's `unshare`), it also has no network, sees no other process, and can
write only to its own directory, which is in memory. `Sandbox.isolated` says whether that holds.

This guards against accidents and mischief in generated code. It won't hold attackers, who need a virtual machine. A
program passes only if it ran to its end: the report must repeat a random number that the program is never given.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench.accuracy.tasks import ProgramOutcome
from eyas.errors import UsageError

_NOBODY = 65534
_NAMESPACES = ("--net", "--ipc", "--uts", "--pid", "--mount", "--fork", "--kill-child")
_MAX_REPORTED = 65536
"""Bytes of the report that are read: a program may have written something else in its place."""


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of a program."""

    seconds: float = 10.0
    """Wall time; processor time is limited to the same, rounded up."""
    memory_bytes: int = 1 << 30
    disk_bytes: int = 16 << 20
    """Size of one file and, in an isolated sandbox, of all files together."""
    open_files: int = 64

    def resource_limits(self) -> dict[str, int]:
        """Name of a resource limit -> its value."""
        return {
            "RLIMIT_CPU": int(-(-self.seconds // 1)),
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.disk_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": 0,
        }


class Sandbox:
    """Runs programs one at a time. Raises UsageError where the system can't contain them."""

    def __init__(self, limits: SandboxLimits | None = None, *, isolated: bool | None = None) -> None:
        """`isolated`: with namespaces or without; None = with them if available."""
        if os.name != "posix":
            raise UsageError("programs can be contained on Linux and other POSIX systems only: leave out `execute=`")
        self.limits = limits or SandboxLimits()
        self._superuser = os.geteuid() == 0
        self.isolated = self._can_isolate() if isolated is None else isolated
        if not self.isolated and isolated is None and self._superuser:
            raise UsageError(
                "only resource limits can contain programs here, and they don't hold for root: run eyas as "
                "another user, or where `unshare --net --pid --mount true` works, or leave out `execute=`"
            )

    def describe(self) -> str:
        """Say in one sentence what contains programs here."""
        limits = self.limits
        common = (
            f"each at most {limits.seconds:g} s and {limits.memory_bytes >> 20} MiB of memory, no processes of its "
            "own, an empty environment"
        )
        if self.isolated:
            return f"programs are run in namespaces of their own: no network, other files read-only; {common}"
        return (
            f"programs are run WITHOUT namespaces, which this system doesn't offer: {common}; but they could reach "
            "the network and the files that you may write"
        )

    def run(self, program: str) -> ProgramOutcome:
        """Run a program to its end or until its time is up; nothing that it started outlives this call."""
        nonce = secrets.token_hex(16)
        with (
            tempfile.TemporaryDirectory(prefix="eyas-program-") as folder,
            tempfile.TemporaryFile() as job,
            tempfile.TemporaryFile() as report,
        ):
            job.write(json.dumps(self._job(program, nonce)).encode())
            job.seek(0)
            process = subprocess.Popen(
                [*self._wrapper(), sys.executable, "-I", str(Path(__file__).with_name("jail.py"))],
                stdin=job,
                stdout=report,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                start_new_session=True,
            )
            try:
                code = process.wait(self.limits.seconds)
            except subprocess.TimeoutExpired:
                return ProgramOutcome("timed out", f"after {self.limits.seconds:g} s")
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            report.seek(0)
            return _outcome(report.read(_MAX_REPORTED), nonce, code)

    def _job(self, program: str, nonce: str) -> dict[str, Any]:
        return {
            "program": program,
            "nonce": nonce,
            "isolated": self.isolated,
            "user": _NOBODY if self._superuser else None,
            "disk_bytes": self.limits.disk_bytes,
            "limits": self.limits.resource_limits(),
        }

    def _wrapper(self) -> list[str]:
        """The command that starts the program's Python under a shell.

        The shell is the parent that a program can kill in this process's stead. In a namespace it is process 1, which
        signals don't reach; and it passes on that a program was killed, which `unshare` can't do for SIGKILL.
        """
        shell = ["/bin/sh", "-c", '"$@"; exit $?', "sandbox"]
        if not self.isolated:
            return shell
        own = [] if self._superuser else ["--user", "--map-root-user"]
        return [str(shutil.which("unshare")), *own, *_NAMESPACES, *shell]

    def _can_isolate(self) -> bool:
        if shutil.which("unshare") is None:
            return False
        self.isolated = True
        return self.run("").passed


def _outcome(report: bytes, nonce: str, code: int) -> ProgramOutcome:
    """How a program ended: from its report if that is genuine, else from its exit code."""
    with suppress(ValueError):
        found = json.loads(report)
        if isinstance(found, dict) and found.get("nonce") == nonce:
            return ProgramOutcome(found["outcome"], found.get("detail", ""))
    number = -code if code < 0 else code - 128
    if number in signal.valid_signals():
        return ProgramOutcome("killed", f"by {signal.Signals(number).name}")
    return ProgramOutcome("ended early", f"its process exited with {code}")
