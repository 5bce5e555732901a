"""This machine's processor, and what it computes fastest in: measured once, and kept for every later process.

Kernels sum in different orders, so the choice of kernel decides the last bits of every number. Processes that each
measured for themselves would sometimes choose differently (one in three did on a busy machine), and a capture that was
killed and resumed, or a seeded answer requested twice, would not be the same bytes. So the first process that needs a
measurement takes it, and all others read it. A measurement taken while others were busy is provisional: the first
process that finds the machine idle replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from eyas.cache.folder import cache_directory
from eyas.files import writing
from eyas.runtime import cores_of_others

_LOG = logging.getLogger("eyas")

_IDLE = 0.4
"""Cores that other processes may keep busy on a machine that still counts as idle."""

Measurement = TypeVar("Measurement")

clock: Callable[[], float] = time.perf_counter if sys.platform == "win32" else time.thread_time
"""CPU seconds of this thread, so other processes don't count; on Windows, which counts in 16 ms, wall time."""


def processor_model() -> str:
    """The processor's model name, or at least its architecture."""
    return _processor("model name") or platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """The features of an x86 processor as Linux names them; empty elsewhere."""
    return frozenset(_processor("flags").split() if platform.machine() in ("x86_64", "AMD64") else ())


@cache
def _processor(field: str) -> str:
    """A field of the first processor that Linux lists, or an empty string."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == field), "")


def measured_once(name: str, measure: Callable[[], Measurement]) -> Measurement:
    """The result of `measure` (numbers or lists of them), taken by the first process on this machine that needs it.

    It is kept as `machine/NAME-HASH.json` in the cache directory; the hash is of the processor and torch's version.
    Delete the file to measure again. A result from a busy machine holds until a process finds the machine idle. If the
    file can't be written, each process measures for itself.
    """
    made_by = {"processor": processor_model(), "flags": sorted(processor_flags()), "torch": torch.__version__}
    key = hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]
    try:
        path = cache_directory() / "machine" / f"{name}-{key}.json"
        record = _read_measurement(path)
        if record is None or not _is_current(record):
            with writing(path) as file:  # one at a time: a process that waited here reads the other's result
                record = _read_measurement(path)
                if record is None or not _is_current(record):
                    record = made_by | {"provisional": _machine_is_busy()} | _with_hash(measure())
                json.dump(record, file, indent=2)
    except OSError as error:
        _LOG.info("%s is measured in every process, since it can't be kept: %s", name, error)
        return measure()
    measured: Measurement = record["measured"]
    return measured


def _is_current(record: Mapping[str, Any]) -> bool:
    """Whether a measurement needn't be repeated now: a provisional one holds as long as others are busy."""
    return not record["provisional"] or _machine_is_busy()


@cache
def _machine_is_busy() -> bool:
    """Whether other processes keep more than `_IDLE` cores busy, as seen at this process's first call."""
    return cores_of_others() > _IDLE


def _read_measurement(path: Path) -> dict[str, Any] | None:
    """The measurement in a file; None if there is no file or it is damaged, which is logged."""
    if not path.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record["digest"] == _with_hash(record["measured"])["digest"] and isinstance(record["provisional"], bool):
            return record
    except (ValueError, KeyError, TypeError):  # not JSON, or not in this form
        pass
    _LOG.warning("%s is damaged or of an earlier version: it is measured and written again", path)
    return None


def _with_hash(measured: Any) -> dict[str, Any]:
    """A measurement with its hash, which reveals damage."""
    return {"measured": measured, "digest": hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:16]}


_SLOWDOWN = 1.5
"""Slowdown relative to float32 up to which half precision is still worth its smaller memory."""
_COMPUTE_BOUND_TOKENS = 256
"""Tokens in a matrix product that is compute-bound."""


def cpu_computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices in `dtype` at most 1.5 times slower than in float32.

    CPUs without kernels for bfloat16 or float16 convert on the fly, which makes decoding several times and training up
    to 28 times slower. Measured once per machine, in about 30 ms. Where a dtype is `auto`, float32 replaces a slow one,
    unless eyas's own kernels do all the work.
    """
    return dtype == torch.float32 or _slowdown(dtype) <= _SLOWDOWN


@cache
def report_slow(dtype: torch.dtype) -> None:
    """Log once per process that float32 replaces a dtype that is slow on this CPU."""
    name = _name(dtype)
    _LOG.warning(
        "this CPU is %.1f times slower in %s than in float32, so dtype auto means float32 here, which takes twice "
        "the memory; choose dtype %s to keep it",
        _slowdown(dtype),
        name,
        name,
    )


@cache
def _slowdown(dtype: torch.dtype) -> float:
    """How many times slower this CPU multiplies matrices in `dtype` than in float32."""
    return _product_seconds(dtype) / _product_seconds(torch.float32)


@cache
def cpu_trains_in(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies many tokens, as in training, at least as fast in `dtype` as in float32.

    Decoding is bound by reading weights, which are smaller in half precision; training is bound by arithmetic. Some
    CPUs with bfloat16 instructions multiply at half the speed of float32 (Intel's without AMX). Measured once per
    machine, in about 50 ms.
    """
    if dtype == torch.float32 or not cpu_computes_in(dtype):
        return dtype == torch.float32
    return _product_seconds(dtype, _COMPUTE_BOUND_TOKENS) <= _product_seconds(torch.float32, _COMPUTE_BOUND_TOKENS)


def _product_seconds(dtype: torch.dtype, count: int = 8) -> float:
    """Best time to multiply `count` tokens by a 1024 x 1024 weight on one thread, as first measured."""
    return measured_once(f"product-{_name(dtype)}-{count}", lambda: _measure_product(dtype, count))


def _measure_product(dtype: torch.dtype, count: int) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weight = torch.ones(1024, 1024, dtype=dtype)
        tokens = torch.ones(count, 1024, dtype=dtype)
        times = []
        for _ in range(8):  # the first run prepares the kernel
            began = clock()
            torch.nn.functional.linear(tokens, weight)
            times.append(clock() - began)
        return min(times)
    finally:
        torch.set_num_threads(threads)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
