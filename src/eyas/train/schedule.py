"""The learning rate over a run, as a factor of its peak."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from eyas.config import StrictModel


class ScheduleConfig(StrictModel):
    """Linear warm-up, then cosine to `floor`, or a plateau and a linear decay to `floor` (`wsd`)."""

    kind: Literal["cosine", "wsd", "constant"] = "wsd"
    warmup: float = Field(default=0.02, ge=0, le=1)  # share of all steps
    decay: float = Field(default=0.4, ge=0, le=1)  # share of all steps; read by wsd only
    floor: float = Field(default=0.0, ge=0, le=1)


def factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """The factor for zero-based `step` of `steps`."""
    warmup = math.ceil(config.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.kind == "constant":
        return 1.0
    if config.kind == "cosine":
        progress = (step - warmup) / max(1, steps - warmup)
        return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = max(1, math.ceil(config.decay * steps))
    left = min(1.0, (steps - step) / decay)
    return config.floor + (1 - config.floor) * left
