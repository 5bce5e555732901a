"""The inside of the sandbox: drops privileges, runs the program, and reports how it ended.

`sandbox.py` runs this file as a script in a separate Python; it uses only the standard library. The job comes as JSON
on standard input, the report goes to standard output, and the program sees neither.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

# the same values for mount and for mount_setattr
_READ_ONLY = 1
_NO_SETUID = 2
_NO_DEVICES = 4
_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_RECURSIVE = 0x8000
_DIE_WITH_PARENT = 1
_KEEP_CAPABILITIES = 8
_NO_NEW_PRIVILEGES = 38
_CAPABILITY_VERSION = 0x20080522
_READ_ANY_FILE = 1 << 2


def isolate(disk_bytes: int, user: int | None) -> None:
    """Close off files and processes: every mount becomes read-only, the working directory a new one in memory.

    This process must have namespaces of its own. `user`: whom a superuser process becomes, since the process limit
    doesn't apply to root. It then keeps one capability: to read any file, such as Python's own library.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | _NO_SETUID)
    must(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _RECURSIVE, attributes, ctypes.sizeof(attributes)))
    here = os.getcwd()
    flags = ctypes.c_ulong(_NO_SETUID | _NO_DEVICES)
    for folder in (here, "/proc"):  # /proc shows other processes and their environments
        must(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, f"size={disk_bytes}".encode()))
    os.chdir(here)
    if user is not None:
        must(libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0))
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kept = 0 if user is None else _READ_ANY_FILE
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    capabilities = (ctypes.c_uint32 * 6)(kept, kept)
    must(libc.capset(header, capabilities))
    must(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))


def main() -> None:
    """Read the job, run its program, report, and exit without waiting for anything that the program left running."""
    job: dict[str, Any] = json.load(sys.stdin)
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.environ.clear()  # the shell and Python itself set some variables
    if job["isolated"]:
        isolate(job["disk_bytes"], job["user"])
    elif sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    for name, most in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (most, most))
    try:
        exec(compile(job["program"], "program", "exec"), {"__name__": "program"})
        ended = {"outcome": "passed"}
    except SystemExit as error:
        ended = {"outcome": "ended early", "detail": f"sys.exit({error.code!r})"}
    except BaseException as error:  # noqa: BLE001  # whatever a program raises is its outcome
        ended = {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"[:300]}
    os.write(report, json.dumps(ended | {"nonce": job["nonce"]}).encode())
    os._exit(0)


main()
