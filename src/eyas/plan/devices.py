"""Devices for `eyas plan`: published speeds and prices of GPUs, clusters of them, and this machine.

The sustained speed of a GPU is a share of its published figures. That also goes for this machine if its GPU is known;
if not, its speed is measured, which takes about half a second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from eyas.errors import UsageError
from eyas.machine import cpu_trains_in

COMPUTE_SHARE, BANDWIDTH_SHARE = 0.4, 0.8
"""The shares of published peak compute and bandwidth that large models are assumed to reach.

The share of compute also goes for a speed measured with one large product: on a Xeon with AMX, a prompt of Qwen's 1.5B
and a training step of its drafter reach 0.4 of that.
"""

# dense bf16 TFLOP/s and GB/s, from the manufacturers' data sheets
PUBLISHED: dict[str, tuple[float, float]] = {
    "A100": (312, 2039), "H100": (989, 3350), "H200": (989, 4800), "B200": (2250, 8000), "MI300X": (1307, 5300),
    "L40S": (362, 864), "A10": (125, 600), "L4": (121, 300), "RTX 4090": (165, 1008), "RTX 3090": (71, 936),
}  # fmt: skip

PRICES: dict[str, float] = {
    "A100": 2.0, "H100": 3.0, "H200": 4.0, "B200": 6.0, "MI300X": 3.0,
    "L40S": 1.2, "A10": 0.8, "L4": 0.7, "RTX 4090": 0.5, "RTX 3090": 0.3,
}  # fmt: skip
"""Dollars per GPU hour: round figures for estimates, not a provider's offer."""


class Machine(NamedTuple):
    """The sustained speed of one device."""

    name: str
    tflops: float
    """TFLOP/s of bf16 matrix products."""
    bandwidth: float
    """Memory bandwidth in GB/s."""


def known_machine(name: str, parameter: str = "machine") -> Machine:
    """The GPU in `PUBLISHED` whose name is part of `name`; UsageError, listing them all, if there is none."""
    found = [known for known in PUBLISHED if known.lower() in name.lower()]
    if not found:
        known = ", ".join(PUBLISHED)
        raise UsageError(f"`{parameter}={name}` is unknown: use {known}, or give `tflops=` and `bandwidth=`")
    best = max(found, key=len)  # "A100" also contains "A10"
    tflops, bandwidth = PUBLISHED[best]
    return Machine(best, tflops * COMPUTE_SHARE, bandwidth * BANDWIDTH_SHARE)


class Cluster(NamedTuple):
    """Equal devices on equal machines."""

    device: Machine
    nodes: int
    each: int
    """Devices per machine."""

    @property
    def devices(self) -> int:
        return self.nodes * self.each

    @property
    def described(self) -> str:
        """The devices in words, as in `4 machines with 8 H100 each`."""
        machines = "1 machine" if self.nodes == 1 else f"{self.nodes} machines"
        return f"{machines} with {self.each} {self.device.name}{'' if self.nodes == 1 else ' each'}"


def cluster_of(text: str) -> Cluster:
    """The cluster in `[MACHINESx]GPUSxNAME`, such as 8xH100 or 4x8xH100. Raises UsageError for anything else."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text)
    nodes, each = (int(found[1] or 1), int(found[2])) if found else (0, 0)
    if found is None or not nodes or not each:
        raise UsageError(f"`machines={text}`: write how many of which GPU, such as 8xH100, or 4x8xH100 for 4 machines")
    return Cluster(known_machine(found[3], "machines"), nodes, each)


def this_machine() -> Machine:
    """The speed of this machine: published if its GPU is known, else measured with a matrix product and a copy."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if any(known.lower() in name.lower() for known in PUBLISHED):
            return known_machine(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 1024
    half = device.type == "cuda" or cpu_trains_in(torch.bfloat16)  # what training and capture compute in
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if half else torch.float32)
    block = torch.zeros(2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    product = _seconds(lambda: torch.mm(a, a), device)
    copy = _seconds(lambda: target.copy_(block), device)
    tflops = 2 * size**3 / product / 1e12
    return Machine(f"this {device.type}, measured", tflops * COMPUTE_SHARE, 2 * len(block) / copy / 1e9)


def _seconds(work: Callable[[], object], device: torch.device, budget: float = 0.3) -> float:
    """Seconds of the fastest run, of at least three and as many as fit into about `budget` seconds."""
    best = float("inf")
    end = time.perf_counter() + budget
    runs = 0
    while runs < 3 or time.perf_counter() < end:
        runs += 1
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
