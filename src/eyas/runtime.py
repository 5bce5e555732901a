"""The process: settings that decide CPU speed, and the versions of what computes."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import PackageNotFoundError, version

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let glibc keep big freed buffers instead of handing them back to the kernel.

    With its defaults every large temporary is mapped, page-faulted and unmapped again, which made a training step
    5-10x slower. Returns False where the C library has no `mallopt` (then nothing is changed).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP))


def versions() -> dict[str, str]:
    """Versions of what computed the weights."""
    found = {}
    for name in ("eyas", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that was never installed
            found[name] = "unknown"
    return found
