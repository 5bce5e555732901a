"""The training loop, shared by every objective.

A step's data are a pure function of its number and all randomness is torch's own generator, so a run that
stops and resumes is the run that never stopped, bit for bit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import nn

from eyas.config import StrictModel
from eyas.runtime import keep_freed_memory
from eyas.train.checkpoint import load_state, save_state
from eyas.train.log import RunLog
from eyas.train.metrics import Means, Part
from eyas.train.optimizer import OptimizerConfig, build_optimizers, set_learning_rate
from eyas.train.schedule import ScheduleConfig, factor


class LoopConfig(StrictModel):
    """How long, how often, how fast."""

    steps: int = Field(gt=0)
    accumulate: int = Field(default=1, gt=0)  # micro-batches a step
    seed: int = 0
    bf16: bool = True  # autocast; the weights being trained stay float32
    log_every: int = Field(default=10, gt=0)
    validate_every: int = Field(default=200, gt=0)
    save_seconds: float = Field(default=240.0, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()


class Objective(Protocol):
    """What is trained, and on what."""

    @property
    def model(self) -> nn.Module: ...

    def part(self, number: int) -> Part:
        """The loss of micro-batch `number`, counted over the whole run."""

    def validate(self) -> dict[str, float]:
        """Metrics on held-out data."""


# May differ between a run and its resumption: a plateau can be wound down earlier or later than planned.
_FLEXIBLE = {"steps", "schedule", "log_every", "validate_every", "save_seconds"}


def train(
    objective: Objective, config: LoopConfig, folder: Path, device: torch.device, identity: dict[str, Any]
) -> None:
    """Run to `config.steps`, resuming from `folder`/state where there is one.

    `identity` is whatever else makes the run what it is; a state saved under another identity is refused.
    """
    keep_freed_memory()
    torch.manual_seed(config.seed)
    model = objective.model
    optimizers = build_optimizers(model, config.optimizer)
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state"
    fingerprint = {**config.model_dump(mode="json", exclude=_FLEXIBLE), **identity}
    start = load_state(state, model, optimizers, fingerprint) if state.exists() else 0
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = clock = time.monotonic()
    window = Means()
    with RunLog(folder / "metrics.jsonl", config.steps, start) as log:
        for step in range(start, config.steps):
            set_learning_rate(optimizers, factor(config.schedule, step, config.steps))
            weight = 0.0
            for micro in range(config.accumulate):
                with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                    part = objective.part(step * config.accumulate + micro)
                part.loss.backward()  # type: ignore[no-untyped-call]
                weight += part.weight
                window.add_part(part)
            for parameter in trained:
                if parameter.grad is not None:
                    parameter.grad.div_(max(weight, 1.0))
            norm = torch.nn.utils.clip_grad_norm_(trained, config.optimizer.clip).item()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            done = step + 1
            log.advance(done)
            if done % config.log_every == 0 or done == config.steps:
                speed = window.count("loss") / (time.monotonic() - clock)
                rate = optimizers[-1].param_groups[0]["lr"]
                log.record(done, {**window.means(), "norm": norm, "lr": rate, "per_second": speed})
                window, clock = Means(), time.monotonic()
            paused = time.monotonic()
            if done % config.validate_every == 0 or done == config.steps:
                log.record(done, {f"validation_{k}": v for k, v in objective.validate().items()})
            if paused - saved > config.save_seconds or done == config.steps:
                save_state(state, model, optimizers, done, fingerprint)
                saved = time.monotonic()
            clock += time.monotonic() - paused  # speed is that of training alone
