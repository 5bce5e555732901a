"""Which layout of weights is the fastest on this machine: native, oneDNN's, or row-major."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from eyas.machine import measured_once
from eyas.targets.linears import PrepackedLinear, can_prepack
from eyas.targets.native.library import KINDS, kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.microkernels import SEVERAL, best_seconds


@cache
def best_layout(device: torch.device, dtype: torch.dtype) -> type[PrepackedLinear] | None:
    """The fastest layout of weights on a device: native, oneDNN's or (None) PyTorch's own row-major layout.

    Measured once per machine, in about 100 ms: native weights are chosen unless oneDNN is more than 1.5 times as fast
    with 1, 4 and 16 tokens, or more than three times with a prompt's 256. They may be slower, because a model with
    native weights runs native passes: where AMX makes oneDNN 1.1 and 1.75 times as fast, models of 0.1 and 0.5 billion
    parameters still decode 3 and 1.8 times as fast natively, and read prompts 1.4 times as fast.
    """
    if device.type != "cpu" or dtype not in KINDS:
        return None
    prepacked = can_prepack(device, dtype)
    found = kernels()
    if found is None:
        return PrepackedLinear if prepacked else None
    if not prepacked:
        return NativeLinear
    name = f"layouts-{str(dtype).removeprefix('torch.')}-{found.name}"
    native, other = measured_once(name, lambda: _seconds((NativeLinear, PrepackedLinear), dtype))
    slower = sum(native[:3]) > 1.5 * sum(other[:3]) or native[3] > 3.0 * other[3]
    return PrepackedLinear if slower else NativeLinear


def _seconds(layouts: Sequence[type[PrepackedLinear]], dtype: torch.dtype) -> list[list[float]]:
    """Each layout's best times of multiplying 1, 4, 16 and 256 tokens by one of several 1024 x 1024 weights."""
    linears = _trial_linears(dtype)
    multiplications = [[layout(linear, False).multiply for linear in linears] for layout in layouts]
    found = [
        best_seconds(multiplications, torch.ones(tokens, 1024, dtype=dtype), repeats)
        for tokens, repeats in ((1, 4), (4, 4), (16, 4), (256, 2))
    ]
    return [list(times) for times in zip(*found, strict=True)]


def _trial_linears(dtype: torch.dtype) -> list[nn.Linear]:
    return [nn.Linear(1024, 1024, bias=False, dtype=dtype).requires_grad_(False) for _ in range(SEVERAL)]
