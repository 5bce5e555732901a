"""Large zeros of a CPU in mappings of their own: what is freed goes back to the system, and leaves no hole.

The allocator is told to keep what is freed (`eyas.runtime`), which is right for temporaries. But a cache that changes
its shape again and again leaves holes in which small buffers settle, and the next one doesn't fit any more.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST = 1 << 20
"""Bytes from which on a mapping is worth its pages."""


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`; pages that nothing is written to take no memory. MemoryError, RuntimeError if there is none."""
    nbytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or nbytes < _LEAST:
        return torch.zeros(*size, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(str(error)) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*size)
