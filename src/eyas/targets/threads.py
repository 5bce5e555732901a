"""How many threads native passes use, and torch next to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_MULTIPLICATIONS_PER_THREAD = 1 << 17
"""Multiplications for which one more thread is worth a synchronization between two steps of a pass."""
_THREADS: ContextVar[int | None] = ContextVar("threads of native passes", default=None)


def threads_for(multiplications: int) -> int:
    """Number of threads for a product or layer with this many multiplications; small ones need no synchronization."""
    return max(1, min(_THREADS.get() or torch.get_num_threads(), multiplications // _MULTIPLICATIONS_PER_THREAD))


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Run torch on this thread alone in this context; the kernels keep using torch's previous number of threads.

    Next to native passes, torch has little to do, and its threads spin while they wait for each other, which would take
    cores from the kernels' threads.
    """
    threads = torch.get_num_threads()
    token = _THREADS.set(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _THREADS.reset(token)
