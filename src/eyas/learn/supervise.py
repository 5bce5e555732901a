"""The learner's process beside a server: cycles run in a child that gives way.

The child has the lowest priority (nice 19, Linux's SCHED_IDLE) and few threads, which keeps it off the cores that
serving wants. Besides it is stopped (SIGSTOP) while the server works, and goes on once that has been quiet for a
moment. It ends with this process, whatever ends that.
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
from eyas.learn.folder import LearnFolder

LOOK = 0.2
"""Seconds between two looks at the server's load."""
_PR_SET_PDEATHSIG = 1
_RETRY = 600.0
"""Seconds until a cycle that failed is tried again."""


def supervise(
    folder: LearnFolder,
    command: Sequence[str],
    is_due: Callable[[], bool],
    *,
    yields: bool = True,
    pause: float = 10.0,
    cycles: int | None = None,
) -> None:
    """Run `command`, one cycle, whenever one is due, forever or so many times. `pause`: seconds between two looks.

    Where it `yields` the child is stopped while the server is at work. Raises TrainingError if the first cycle fails,
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
    """Run a cycle to its end, stopped while the server works; its exit code."""
    child = subprocess.Popen([*command], preexec_fn=_give_way)
    stopped = False
    try:
        while (code := child.poll()) is None:
            busy = yields and folder.busy
            if busy != stopped:
                with folder.locked():  # never while the child has it: the server would wait for that to go on
                    child.send_signal(signal.SIGSTOP if busy else signal.SIGCONT)
                stopped = busy
            time.sleep(LOOK)
        return code
    except KeyboardInterrupt:
        raise StoppedError("the cycle's rows and the trainer's last state are kept", signal.SIGINT) from None
    finally:
        if child.poll() is None:
            child.kill()  # also one that is stopped; what it has saved is whole
            child.wait()


def _give_way() -> None:
    """In the child, before its program: the lowest priority, and death with the parent, where the system has these."""
    with suppress(OSError):
        os.nice(19)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
