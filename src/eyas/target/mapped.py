"""Large buffers that last, on a CPU in mappings of their own: what is freed is the system's again and leaves no hole.

The allocator is told to keep what is freed (`eyas.runtime`), which is right for temporaries. But a cache that changes
its shape again and again, or copies that come and go, leave holes in which small buffers settle, and the next one
doesn't fit any more.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

_LEAST = 1 << 17
"""Bytes from which on a mapping is worth its pages: the allocator's own opinion, where it isn't told otherwise."""


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`; pages that nothing is written to take no memory. RuntimeError if there is none."""
    nbytes = math.prod(size) * dtype.itemsize
    plain = partial(torch.zeros, *size, dtype=dtype, device=device)
    if device.type != "cpu" or nbytes < _LEAST:
        return plain()
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = mmap.mmap(-1, nbytes, **private)
    except OSError:  # no memory, which the allocator will say too, or too many mappings
        return plain()
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*size)


def copy(tensor: Tensor) -> Tensor:
    """`tensor.clone()`, contiguous. RuntimeError if there is no memory."""
    return zeros(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
