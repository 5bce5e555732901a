"""The learner's process next to a server: cycles run in a child process that yields to serving.

The child has the lowest priority (nice 19, Linux's SCHED_IDLE) and few threads, which keeps it off the cores that
serving needs. It is also stopped (SIGSTOP) while the server works, and continues once the server has been idle for a
moment. It ends with this process, however this process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from eyas.errors import StoppedError, TrainingError
from eyas.labs.learn.folder import LearnFolder

POLL_SECONDS = 0.2
"""Seconds between two checks of the server's load."""
_PR_SET_PDEATHSIG = 1
_RETRY = 600.0
"""Seconds before a failed cycle is retried."""


def supervise(
    folder: LearnFolder,
    command: Sequence[str],
    is_due: Callable[[], bool],
    *,
    yields: bool = True,
    pause: float = 10.0,
    cycles: int | None = None,
) -> None:
    """Run `command`, one cycle, whenever one is due: forever, or `cycles` times. `pause`: seconds between two checks.

    If it `yields`, the child is stopped while the server is at work. Raises TrainingError if the first cycle fails,
    StoppedError at SIGINT or SIGTERM, with the cycle's work kept.
    """
    done = 0
    while cycles is None or done < cycles:
        if not is_due() or (yields and folder.busy):
            time.sleep(pause)
            continue
        code = _run(folder, command, yields)
        if code and not done:
            raise TrainingError(f"a cycle of learning failed with exit code {code}; its messages are above")
        if code:
            folder.note("cycle failed", code=code)
            time.sleep(_RETRY)
        done += 1


def _run(folder: LearnFolder, command: Sequence[str], yields: bool) -> int:
    """Run a cycle to its end, stopped while the server works; returns its exit code."""
    child = subprocess.Popen([*command], preexec_fn=_lower_priority)
    stopped = False
    try:
        while (code := child.poll()) is None:
            busy = yields and folder.busy
            if busy != stopped:
                with folder.locked():  # a child stopped while it holds this lock would block the server
                    child.send_signal(signal.SIGSTOP if busy else signal.SIGCONT)
                stopped = busy
            time.sleep(POLL_SECONDS)
        return code
    except KeyboardInterrupt:
        raise StoppedError("the cycle's rows and the trainer's last state are kept", signal.SIGINT) from None
    finally:
        if child.poll() is None:
            child.kill()  # also if it is stopped; the state that it saved is complete
            child.wait()


def _lower_priority() -> None:
    """In the child, before exec: take the lowest priority and die with the parent, if the system supports these."""
    with suppress(OSError):
        os.nice(19)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
