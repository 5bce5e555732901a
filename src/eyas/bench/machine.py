"""The machine a measurement was taken on, without which its figures mean nothing."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import eyas


def describe_machine() -> dict[str, Any]:
    """What decides the speed of this machine, for JSON: processor, cores, threads, load, GPU, versions."""
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "eyas": eyas.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def busy(machine: Mapping[str, Any]) -> str | None:
    """A warning if more than this process was running during a measurement; else None."""
    load = (machine.get("load_average") or [0.0])[0]
    cores = machine["cores"]
    if load <= max(cores, machine["threads"]) + 0.5:
        return None
    return (
        f"the machine was busy (load {load:g} on {cores} cores): tokens/s and speedups are unreliable; accept lengths "
        "are counts and not affected"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
