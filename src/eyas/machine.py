"""This machine's processor, and what it computes fastest in: measured once, and kept for every later process.

Kernels differ in the order of their sums, so which ones run decides the last bits of every number. Processes that each
measured for themselves would sometimes choose differently (one in three did on a busy machine), and a capture that was
killed and resumed, or a seeded answer asked for twice, would not be the same bytes. So a measurement is taken by the
first process that needs it, and read by all others. One that was taken beside other work is provisional: the first
process that finds the machine idle replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from eyas.files import writing
from eyas.runtime import cores_of_others

_LOG = logging.getLogger("eyas")

_IDLE = 0.4
"""The cores that others may keep busy on a machine that is idle enough to be measured."""

Measurement = TypeVar("Measurement")

clock: Callable[[], float] = time.perf_counter if sys.platform == "win32" else time.thread_time
"""Seconds that this thread was running, so other processes on its core don't count. (Windows counts in 16 ms.)"""


def cache_directory() -> Path:
    """Where files are kept that can be made again: `$XDG_CACHE_HOME/eyas`, `~/.cache/eyas`.

    Raises PermissionError if the folder of a user without a home could have been filled by somebody else.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "eyas"
    except RuntimeError:  # a user without a home
        return _own_folder(Path(tempfile.gettempdir()) / f"eyas-{os.getuid()}")


def _own_folder(path: Path) -> Path:
    """A folder beside those of others, made if need be; PermissionError unless it is this user's and only theirs."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{path} isn't a folder that only this user can write, so nothing is loaded from it: "
            "remove it, or set XDG_CACHE_HOME"
        )
    return path


def processor_model() -> str:
    """The processor's name as its maker writes it, or at least its architecture."""
    return _processor("model name") or platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """The features of an x86 processor as Linux names them; empty elsewhere."""
    return frozenset(_processor("flags").split() if platform.machine() in ("x86_64", "AMD64") else ())


@cache
def _processor(field: str) -> str:
    """A field of the first processor that Linux lists, or nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == field), "")


def measured_once(name: str, measure: Callable[[], Measurement]) -> Measurement:
    """What `measure` returns, numbers or lists of them, or what it returned to the first process of this machine.

    It is kept as `machine/NAME-HASH.json` in the cache directory, where the hash is of the processor and the version of
    torch; delete the file to have it measured anew. What was measured on a busy machine holds until a process finds an
    idle one. Where it can't be written, each process measures for itself.
    """
    made_by = {"processor": processor_model(), "flags": sorted(processor_flags()), "torch": torch.__version__}
    key = hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]
    try:
        path = cache_directory() / "machine" / f"{name}-{key}.json"
        kept = _kept(path)
        if kept is None or not _holds(kept):
            with writing(path) as file:  # one at a time: who waited here takes what it waited for
                kept = _kept(path)
                if kept is None or not _holds(kept):
                    kept = made_by | {"provisional": _others_work()} | _signed(measure())
                json.dump(kept, file, indent=2)
    except OSError as error:
        _LOG.info("%s is measured in every process, since it can't be kept: %s", name, error)
        return measure()
    measured: Measurement = kept["measured"]
    return measured


def _holds(kept: Mapping[str, Any]) -> bool:
    """Whether a measurement needn't be taken anew, or not now: a provisional one holds while others work."""
    return not kept["provisional"] or _others_work()


@cache
def _others_work() -> bool:
    """Whether other processes keep a good part of a core busy, as this one saw when it first asked."""
    return cores_of_others() > _IDLE


def _kept(path: Path) -> dict[str, Any] | None:
    """What a file of a measurement says; None if there is none, or it is damaged, which is reported."""
    if not path.exists():
        return None
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["digest"] == _signed(kept["measured"])["digest"] and isinstance(kept["provisional"], bool):
            return kept
    except (ValueError, KeyError, TypeError):  # no JSON, or not of this form
        pass
    _LOG.warning("%s is damaged or of an earlier version: it is measured and written anew", path)
    return None


def _signed(measured: Any) -> dict[str, Any]:
    """A measurement, and a hash that a damaged one doesn't have."""
    return {"measured": measured, "digest": hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:16]}


_SLOWDOWN = 1.5
"""How many times slower than float32 half precision may be and still be worth its smaller memory."""
_MANY = 256
"""Tokens of a product that is bound by arithmetic."""


def cpu_computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices in `dtype` at most 1.5 times slower than in float32.

    CPUs without kernels for bfloat16 or float16 convert on the fly, which makes decoding several times and training up
    to 28 times slower. Measured once on a machine, in some 30 ms. Wherever a dtype is `auto`, float32 takes the place
    of a slow one, unless eyas's own kernels do all the work.
    """
    return dtype == torch.float32 or _slowdown(dtype) <= _SLOWDOWN


@cache
def report_slow(dtype: torch.dtype) -> None:
    """Say in the log, once in a process, that float32 takes the place of a dtype that this CPU is slow in."""
    name = _name(dtype)
    _LOG.warning(
        "this CPU is %.1f times slower in %s than in float32, so dtype auto means float32 here, which takes twice "
        "the memory; choose dtype %s to keep it",
        _slowdown(dtype), name, name,
    )  # fmt: skip


@cache
def _slowdown(dtype: torch.dtype) -> float:
    """How many times slower than in float32 this CPU multiplies matrices."""
    return _product_seconds(dtype) / _product_seconds(torch.float32)


@cache
def cpu_trains_in(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies many tokens, as in training, at least as fast in `dtype` as in float32.

    Decoding reads weights, of which half precision has fewer bytes; training multiplies. Some CPUs with bfloat16
    instructions do that at half the speed of float32 (Intel's without AMX). Measured once on a machine, in some 50 ms.
    """
    if dtype == torch.float32 or not cpu_computes_in(dtype):
        return dtype == torch.float32
    return _product_seconds(dtype, _MANY) <= _product_seconds(torch.float32, _MANY)


def _product_seconds(dtype: torch.dtype, count: int = 8) -> float:
    """Best time of multiplying `count` tokens by a weight of 1024 x 1024 on one thread, as first measured."""
    return measured_once(f"product-{_name(dtype)}-{count}", lambda: _measure_product(dtype, count))


def _measure_product(dtype: torch.dtype, count: int) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weight, tokens = torch.ones(1024, 1024, dtype=dtype), torch.ones(count, 1024, dtype=dtype)
        times = []
        for _ in range(8):  # the first prepares the kernel
            began = clock()
            torch.nn.functional.linear(tokens, weight)
            times.append(clock() - began)
        return min(times)
    finally:
        torch.set_num_threads(threads)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
