"""Description of the machine that a measurement was taken on."""

from __future__ import annotations

import platform
from typing import Any

import torch
import transformers

import eyas
from eyas.machine import processor_model
from eyas.runtime import machine_load


def describe_machine() -> dict[str, Any]:
    """Describe what determines this machine's speed, for JSON: processor, cores, threads, load, GPU, versions."""
    machine: dict[str, Any] = {
        "cpu": processor_model(),
        **machine_load(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "eyas": eyas.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine
