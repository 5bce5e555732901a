"""The process: settings that decide its speed on a CPU, how busy the machine is, versions of libraries.

torch is imported inside functions: the command line imports this module before it knows whether it needs torch.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import ParamSpec, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_LOG = logging.getLogger("eyas")

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_NEVER_TRIM = 2**31 - 1
_HUGE_PAGE = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MIN_LOOK_SECONDS = 0.5
"""Shortest interval for measuring other processes' work: the system counts it in hundredths of a second."""
KERNELS = {"LRU_CACHE_CAPACITY": "256", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
"""Environment variable -> number of compiled kernels that torch or oneDNN keeps, for `keep_few_kernels`."""

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def keep_freed_memory() -> bool:
    """Let glibc keep large freed buffers instead of returning them to the kernel, on every thread.

    With its defaults every large temporary is mapped, page-faulted and unmapped again, which made a training step
    5-10x slower. Threads have their own arenas, in which that happens whatever the thresholds, so threads started from
    now on share the main arena (a server's engine runs on a thread). Returns False, with nothing changed, if the C
    library has no `mallopt`.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_MMAP_THRESHOLD: _NEVER_TRIM, _M_TRIM_THRESHOLD: _NEVER_TRIM, _M_ARENA_MAX: 1}
    done = [bool(mallopt(name, value)) for name, value in settings.items()]
    return all(done)


LOADING = logging.getLogger("eyas.loading")
"""What a first load does and writes, at level INFO: later ones use it, so only the first takes long."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed", "bad_alloc")
"""Parts of the out-of-memory messages of torch, CUDA, cuBLAS and C++, in lower case."""


def out_of_memory(error: Exception) -> bool:
    """Whether an exception means that memory ran out: Python's or torch's own, or an allocator's RuntimeError."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)


@contextmanager
def out_of_memory_as(make: Callable[[], Exception]) -> Iterator[None]:
    """In the block, turn an out-of-memory error into the exception that `make` returns."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not out_of_memory(error):
            raise
        raise make() from error


def return_freed_memory() -> None:
    """Return memory that loading freed to the system, if the C library can: a tokenizer's file alone leaves 30 MiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def use_huge_pages() -> bool:
    """Move what is allocated now into huge pages, so that weights are read at full memory bandwidth.

    Decoding reads all weights in every pass. With 4 KiB pages the processor keeps translating addresses and stops
    prefetching at the end of each page; how much that costs varies from run to run. Call it after loading weights that
    others have allocated (`WeightMemory` has huge pages from the start): it copies memory at 2 seconds per GiB, but
    doesn't copy again what was moved before. Returns False if none of it could be moved (only Linux 6.1 and later can).
    """
    if not sys.platform.startswith("linux"):
        return False
    return_freed_memory()
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return False
    done = list[bool]()
    for line in _maps():
        addresses, access, _, _, inode, *name = line.split()
        # buffers of `mapped_zeros` have no name; one may be smaller than a huge page, but neighbors are one mapping
        if inode != "0" or not access.startswith("rw") or name not in ([], ["[heap]"]):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = begin + -begin % _HUGE_PAGE, end - end % _HUGE_PAGE
        # others say themselves which pages they want, and those that want small ones keep them
        if name and begin < end:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
        # one at a time, because a call for several stops at the first that was never written to
        for page in range(begin, end, _HUGE_PAGE):
            done.append(madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE) == 0)
    return any(done)


def _maps() -> list[str]:
    """The memory mappings of this process, one line each."""
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not every container shows them
        return []


_MIN_MAPPED = 1 << 17
"""Size in bytes from which a buffer gets its own mapping: glibc's default threshold."""


def mapped_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device, huge: bool = True) -> Tensor:
    """`torch.zeros` in its own mapping, whose pages take no memory until they are written to.

    Its memory goes back to the system when it is freed. The allocator keeps freed memory, which is right for
    temporaries; but a cache that is resized again and again, or copies that come and go, would leave holes that small
    buffers fill, so that the next large buffer no longer fits. `huge` requests 2 MiB pages, from which a processor
    reads faster (see `use_huge_pages`).

    Raises RuntimeError if there is no memory.
    """
    import torch

    nbytes = math.prod(size) * dtype.itemsize
    pages = _mapping(nbytes, huge) if device.type == "cpu" and nbytes >= _MIN_MAPPED else None
    if pages is None:
        return torch.zeros(tuple(size), dtype=dtype, device=device)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(size))


def _mapping(nbytes: int, huge: bool) -> mmap.mmap | None:
    """New zeroed memory; None if there is none, which the allocator will report, or too many mappings."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = mmap.mmap(-1, nbytes, **private)
    except OSError:
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return pages


class WeightMemory:
    """Memory for weights that are read in every pass: side by side, in huge pages unless those are slow to get.

    A mapping of its own for each weight would end in small pages, at 1 MiB a weight. Here weights share mappings, which
    go back to the system when all weights in them are freed. Threads may share it.
    """

    CHUNK = 64 * 2**20
    """Bytes of a mapping, unless a weight is larger. What no weight was written to takes no memory."""
    ALIGNMENT = 64
    """Bytes of a cache line, which is also a vector register of AVX-512."""
    SLOW_PAGE = 2e-3
    """Seconds for the first byte of a huge page from which small pages are used. A core zeroes one in 0.1 to 0.4 ms. A
    virtual machine whose host has to find the memory may wait 20 ms for each, 10 s for a gigabyte of weights, where
    small pages take 1 s and are read as fast."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pages: mmap.mmap | None = None
        self._used = 0
        self._huge = True

    def zeros(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """`torch.zeros`; RuntimeError if there is no memory."""
        import torch

        count = math.prod(size)
        nbytes = count * dtype.itemsize
        pages, offset = self._room(nbytes) if device.type == "cpu" and nbytes else (None, 0)
        if pages is None:
            return torch.zeros(tuple(size), dtype=dtype, device=device)
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=offset).view(tuple(size))

    def _room(self, nbytes: int) -> tuple[mmap.mmap | None, int]:
        """A mapping with room for so many bytes, if there can be one, and where in it they begin."""
        with self._lock:
            if self._pages is None or self._used + nbytes > len(self._pages):
                self._pages = _mapping(max(self.CHUNK, nbytes + -nbytes % _HUGE_PAGE), self._huge)
                self._used = 0
                if self._huge and self._pages is not None:
                    self._huge = self._first_bytes(self._pages) < self.SLOW_PAGE
            first = self._used
            self._used += nbytes + -nbytes % self.ALIGNMENT
            return self._pages, first

    @staticmethod
    def _first_bytes(pages: mmap.mmap) -> float:
        """The median seconds for writing the first byte of a huge page, of three at the beginning of a mapping."""
        times = list[float]()
        for page in range(3):
            start = time.perf_counter()
            pages[page * _HUGE_PAGE] = 0
            times.append(time.perf_counter() - start)
        return sorted(times)[1]  # one in front of the first huge page is small


WEIGHTS = WeightMemory()
"""Where this process's weights are."""


def mapped_copy(tensor: Tensor) -> Tensor:
    """A contiguous clone, as `mapped_zeros` allocates it. Raises RuntimeError if there is no memory."""
    return mapped_zeros(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def release_mapped_file(model: nn.Module) -> None:
    """Copy the tensors that are still in the checkpoint's mapped file, which stays in memory as long as one is.

    Call it once linears, which are most of the file, have been packed, and before anything holds an address: experts
    and native passes do.
    """
    from torch import Tensor

    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor.data) is Tensor:  # not a library's quantized tensor
            tensor.data = WEIGHTS.zeros(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)


def discard(tensor: Tensor) -> None:
    """Return the whole pages of a contiguous `mapped_zeros` tensor to the system; they read as zeros afterwards.

    Does nothing except on Linux.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
    begin = tensor.data_ptr()
    end = tensor.data_ptr() + tensor.nbytes
    begin, end = begin + -begin % mmap.PAGESIZE, end - end % mmap.PAGESIZE
    if madvise is not None and begin < end:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@contextmanager
def importing() -> Iterator[None]:
    """Turn off garbage collection in the block, and exempt all objects that exist at its end from later collections.

    Importing torch and transformers creates a million objects, none of them garbage; going through them again and again
    takes a fifth of the import's time.
    """
    enabled = gc.isenabled()
    if "transformers.modeling_utils" in sys.modules:  # little is left to import
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def keep_few_kernels() -> None:
    """Limit torch and oneDNN to 256 compiled kernels each instead of 1024, unless the environment sets a number.

    They compile one for every number of tokens in a pass and every weight shape, at 0.6 MB and 0.2 to 0.5 ms each. A
    server's passes have hundreds of sizes, and rounds with a fixed number of rows a few dozen, with about eight weight
    shapes. Call it before the first matrix product, when both libraries read the environment.
    """
    for name, count in KERNELS.items():
        os.environ.setdefault(name, count)


def inference(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """`torch.inference_mode()` as a decorator that costs nothing if that mode is already on.

    Entering it takes ten microseconds after a pass, whose weights fill the CPU caches, and a round makes a dozen calls.
    On a GPU, attention doesn't use cuDNN meanwhile, not even in recorded passes: a plan takes as long as ten passes.
    """
    import torch

    @torch.inference_mode()
    def guarded(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        with without_cudnn_attention() if on_gpu else nullcontext():
            return function(*args, **kwargs)

    @wraps(function)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        return (function if torch.is_inference_mode_enabled() else guarded)(*args, **kwargs)

    return run


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """In the block, CUDA attention doesn't use cuDNN, which builds a plan for every new shape.

    PyTorch prefers cuDNN on Hopper and Blackwell. A plan takes 25 to 500 ms, which pays off only if shapes recur often;
    those of prompts and of batches of chats hardly ever do, and each tree brings several.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `values` (numbers or nested lists of them) on `device`, without synchronizing with it.

    `torch.tensor(values, device=...)` copies from pageable memory, so the host waits until an accelerator has finished
    all earlier work. A copy from pinned memory is queued in the stream.
    """
    import numpy as np
    import torch

    if device.type == "cpu":
        # half the time of torch.tensor right after a pass, whose weights fill the CPU's caches: 50 microseconds
        made = torch.from_numpy(np.array(values))
        return made.to(dtype or (torch.get_default_dtype() if made.is_floating_point() else made.dtype))
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)  # NumPy can't be pinned


def machine_load() -> dict[str, Any]:
    """How much of this machine is in use: its cores, this process's threads, and the load averages if available."""
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


class CoreWatch:
    """Measures how many of the cores that this process may run on are kept busy by other processes.

    Without `yielding`, niced processes aren't counted if this one isn't niced: they make room for it.
    """

    def __init__(self, *, yielding: bool = True) -> None:
        self._niced = yielding or not hasattr(os, "nice") or os.nice(0) > 0
        self._began, self._worked, self._own = self._now()

    def _now(self) -> tuple[float, float | None, float]:
        return time.monotonic(), _worked(self._niced), time.process_time()

    @property
    def seconds(self) -> float:
        """Wall time since the last look, in seconds."""
        return time.monotonic() - self._began

    def look(self) -> float | None:
        """The number of cores that others kept busy since the last look; None = the system doesn't count that."""
        began = self._began
        before = self._worked
        own = self._own
        self._began, self._worked, self._own = self._now()
        if before is None or self._worked is None:
            return None
        return max(0.0, self._worked - before - (self._own - own)) / max(self._began - began, 1e-9)


def cores_of_others(seconds: float = 0.1) -> float:
    """How many cores other processes keep busy, measured for `seconds`; without Linux's counts, the load minus 1."""
    watch = CoreWatch()
    time.sleep(seconds)
    seen = watch.look()
    if seen is None:
        return max(0.0, os.getloadavg()[0] - 1) if hasattr(os, "getloadavg") else 0.0
    return seen


def _worked(niced: bool) -> float | None:
    """Seconds that this process's cores were busy or stolen by other virtual machines; None = not counted.

    `niced`: whether the work of niced processes is included.
    """
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        counts = [[int(count) for count in line.split()[1:9]] for line in lines if line.partition(" ")[0] in cores]
        ticks = sum(
            user + nice * niced + system + irq + softirq + stolen
            for user, nice, system, _, _, irq, softirq, stolen in counts
        )
    except (OSError, ValueError, AttributeError):  # not Linux
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if counts else None


class SpareCores:
    """A context that limits torch to as many threads as others leave cores for; call `follow` between steps.

    torch splits each operation into equal parts. A thread that waits for its core keeps all others waiting, at every
    operation, so that next to one busy process two threads get less done than one. In some cases the last bits of
    results depend on the number of threads: if the parts of an elementwise operation aren't whole vectors, and in sums
    over a whole tensor.
    """

    def __init__(self, work: str, device: torch.device, fixed: int | None = None) -> None:
        """`work` names it in the log. With a `fixed` number, or if `device` isn't the CPU, `follow` does nothing."""
        self._work = work
        self._said = False
        self._follows = device.type == "cpu" and fixed is None
        self._fixed = fixed

    def __enter__(self) -> Self:
        import torch

        self._max_threads = torch.get_num_threads()
        torch.set_num_threads(self._fixed or self._max_threads)
        self._watch = CoreWatch(yielding=False)
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_num_threads(self._max_threads)

    def follow(self) -> None:
        """Set the number of threads by the cores that others used since the last change, at most every half second."""
        import torch

        if not self._follows or self._max_threads == 1 or self._watch.seconds < _MIN_LOOK_SECONDS:
            return
        others = self._watch.look()
        if others is None:
            return
        cores = len(os.sched_getaffinity(0))
        threads = usable_threads(others, cores, self._max_threads)
        if threads < self._max_threads and not self._said:
            self._said = True
            _LOG.warning(
                "other processes use %.1f of %d cores: %s continues with %d of %d threads until they stop",
                others,
                cores,
                self._work,
                threads,
                self._max_threads,
            )
        torch.set_num_threads(threads)


def usable_threads(others: float, cores: int, max_threads: int) -> int:
    """How many threads that wait for each other pay off next to `others` busy cores: all, or one per free core.

    Free cores are rounded to the nearest number: a thread that waits half of the time halves the speed of all.
    """
    spare = cores - others
    return max_threads if spare >= min(max_threads, cores) - 0.5 else max(1, min(max_threads, math.floor(spare + 0.5)))


def taken_by_others(load: Mapping[str, Any]) -> float:
    """The share of a measured time that others may have taken: 0 unless more ran on the machine than it has cores."""
    running = float((load.get("load_average") or [0.0])[0])
    most = max(load["cores"], load["threads"])
    return 1.0 - most / running if running > most + 0.5 else 0.0


def busy(load: Mapping[str, Any]) -> str | None:
    """A warning if more than this process was running during a measurement; else None."""
    if not taken_by_others(load):
        return None
    return (
        f"the machine was busy (load {load['load_average'][0]:g} on {load['cores']} cores): tokens/s and speedups are "
        "unreliable; accept lengths are counts and not affected. Measure again when it is idle"
        + (", or on one thread (OMP_NUM_THREADS=1), which others disturb least" if load["threads"] > 1 else "")
    )


def duration(seconds: float) -> str:
    """A readable duration: in seconds below a minute, in minutes below two hours, else in hours."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def versions() -> dict[str, str]:
    """Versions of eyas, torch and transformers, to be saved with results."""
    found = {}
    for name in ("eyas", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that was never installed
            found[name] = "unknown"
    return found
