"""What a machine sustains, as plans need it: a share of a GPU's published figures, or a measurement of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from eyas.errors import UsageError

COMPUTE_SHARE, BANDWIDTH_SHARE = 0.4, 0.8
"""Of the published peaks, what large models are assumed to reach."""

# dense bf16 TFLOP/s and GB/s, from the makers' data sheets
PUBLISHED: dict[str, tuple[float, float]] = {
    "A100": (312, 2039), "H100": (989, 3350), "H200": (989, 4800), "B200": (2250, 8000), "MI300X": (1307, 5300),
    "L40S": (362, 864), "A10": (125, 600), "L4": (121, 300), "RTX 4090": (165, 1008), "RTX 3090": (71, 936),
}  # fmt: skip


class Machine(NamedTuple):
    """Sustained speed of one device."""

    name: str
    tflops: float
    """bf16 matrix products."""
    bandwidth: float
    """GB/s from memory."""


def known_machine(name: str) -> Machine:
    """A GPU of the list; UsageError names the list."""
    found = [known for known in PUBLISHED if known.lower() in name.lower()]
    if not found:
        raise UsageError(f"--machine {name}: known are {', '.join(PUBLISHED)}; or give --tflops and --bandwidth")
    best = max(found, key=len)  # A100, not A10
    tflops, bandwidth = PUBLISHED[best]
    return Machine(best, tflops * COMPUTE_SHARE, bandwidth * BANDWIDTH_SHARE)


def this_machine() -> Machine:
    """This GPU if it is known, else what this device does with a matrix product and a copy."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if any(known.lower() in name.lower() for known in PUBLISHED):
            return known_machine(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 1024
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    block = torch.zeros(2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    product = _seconds(lambda: torch.mm(a, a), device)
    copy = _seconds(lambda: target.copy_(block), device)
    return Machine(f"this {device.type}, measured", 2 * size**3 / product / 1e12, 2 * len(block) / copy / 1e9)


def _seconds(work: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """The fastest of some runs, within about `budget` seconds."""
    best, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
