"""The training loop, shared by every objective.

A micro-batch's data and its randomness are pure functions of its number, so a run that stops and resumes is the run
that never stopped, bit for bit, and several processes do what one does.
"""

from __future__ import annotations

import errno
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field, model_validator
from rich.console import Console
from torch import Tensor, nn

from eyas.config import StrictModel
from eyas.errors import CheckpointError, ConfigError, TrainingError
from eyas.runtime import keep_freed_memory
from eyas.train.loop.checkpoint import TrainingProgress, load_state, save_state, saved_identity
from eyas.train.loop.distributed import Parallel, Team, whole
from eyas.train.loop.log import RunLog, check_wandb, writers
from eyas.train.loop.metrics import Means, MicroBatchLoss
from eyas.train.loop.optimizer import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizers,
    computes_in_bf16,
    factor,
    set_learning_rate,
)


class LoopConfig(StrictModel):
    """How long, how often, how fast, on how many processes."""

    steps: int | None = Field(default=None, gt=0)
    epochs: float | None = Field(default=None, gt=0)  # instead of steps: how often to go through the data
    accumulate: int = Field(default=1, gt=0)  # micro-batches a step, over all processes
    seed: int = Field(default=0, ge=0)
    bf16: bool | Literal["auto"] = "auto"  # autocast; the weights being trained stay float32
    parallel: Parallel = "auto"  # under torchrun, auto is ddp
    log_every: int = Field(default=10, gt=0)
    validate_every: int = Field(default=200, gt=0)
    save_seconds: float = Field(default=240.0, gt=0)  # the state is saved at every validation too
    wandb: str | None = None  # a project to log to
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _one_length(self) -> LoopConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                "give either steps or epochs: to replace the one that a recipe has, set it to null "
                "(as in loop.epochs=null loop.steps=300)"
            )
        return self


class ResolvedLoop(LoopConfig):
    """A loop's configuration with nothing left to choose."""

    steps: int = Field(gt=0)
    bf16: bool


def resolved(config: LoopConfig, batches: int, folder: Path, team: Team) -> ResolvedLoop:
    """Choose what `config` leaves open: steps for its epochs of `batches` micro-batches, bf16 where it is fast.

    All processes call it, rank 0 decides. A run in `folder` keeps the precision it began with, whatever machine it is
    resumed on.
    """
    steps, bf16 = config.steps, config.bf16
    if steps is None:
        assert config.epochs is not None  # one of the two is given
        steps = max(1, math.ceil(config.epochs * batches / config.accumulate))
    if bf16 == "auto":
        began = saved_identity(folder / "state").get("bf16")
        bf16 = team.gathered(computes_in_bf16(team.device) if began is None else bool(began))[0]
    return ResolvedLoop.model_validate({**config.model_dump(), "steps": steps, "epochs": None, "bf16": bf16})


class Objective(Protocol):
    """What is trained, and on what."""

    @property
    def model(self) -> nn.Module:
        """Whose parameters train."""

    def part(self, number: int) -> MicroBatchLoss:
        """The loss of micro-batch `number`, counted over the whole run."""

    def validate(self, progress: TrainingProgress) -> dict[str, float]:
        """Figures of held-out data, by their names in the log; may leave a checkpoint behind."""


# May differ between a run and its resumption: a plateau can be wound down earlier or later than planned.
_FLEXIBLE = {"steps", "epochs", "schedule", "parallel", "log_every", "validate_every", "save_seconds", "wandb"}


def train(objective: Objective, config: ResolvedLoop, folder: Path, team: Team, identity: Mapping[str, Any]) -> None:
    """Run to `config.steps`, resuming from `folder`/state where there is one.

    `identity` is whatever else makes the run what it is; a state saved under another identity is refused. A full disk
    raises CheckpointError and leaves the last state whole.
    """
    check_loop(config, team)
    keep_freed_memory()
    model = objective.model
    optimizers = build_optimizers(model, config.optimizer)
    state = folder / "state"
    identity = {**config.model_dump(mode="json", exclude=_FLEXIBLE), **identity}
    done = load_state(state, model, optimizers, identity)
    trains = [p for p in model.parameters() if p.requires_grad]
    with _explained(folder), _run_log(folder, config, done, team) as log:
        window, clock, saved = Means(), done.seconds, time.monotonic()
        for step in range(done.step, config.steps):
            began = time.monotonic()
            set_learning_rate(optimizers, factor(config.schedule, step, config.steps))
            weight = team.total(_accumulate(objective, config, step, team, window))
            norm = _clip(trains, team.world / max(weight, 1.0), config.optimizer.clip, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            done = TrainingProgress(step + 1, done.seconds + time.monotonic() - began)
            log.advance(done.step)
            last = done.step == config.steps
            if done.step % config.log_every == 0 or last:
                joint = Means.merged(team.gathered(dict(window.sums)))
                speed = joint.count("loss") / max(done.seconds - clock, 1e-9)
                figures = {"norm": norm, "lr": optimizers[-1].param_groups[0]["lr"], "per_second": speed}
                log.record(*done, {**joint.means(), **figures})
                window, clock = Means(), done.seconds
            judged = done.step % config.validate_every == 0 or last
            if judged:
                log.record(*done, objective.validate(done))
            if judged or team.total(time.monotonic() - saved) > config.save_seconds * team.world:
                log.sync()  # the state comes last: what it says was done has been written
                save_state(state, model, optimizers, done, identity, team)
                saved = time.monotonic()


def check_loop(config: LoopConfig, team: Team) -> None:
    """Refuse what can't run, before anything is loaded."""
    check_wandb(config.wandb)
    if config.accumulate % team.world:
        raise ConfigError(
            f"loop.accumulate is {config.accumulate}, which {team.world} processes can't share equally: "
            f"make it a multiple of {team.world} (it counts the micro-batches of a step over all processes)"
        )
    if team.mode == "fsdp" and config.optimizer.kind == "muon":
        raise ConfigError("muon needs whole matrices and fsdp cuts them up: use adamw, or loop.parallel=ddp")


def _accumulate(objective: Objective, config: ResolvedLoop, step: int, team: Team, window: Means) -> float:
    """This process's micro-batches of a step, gradients summed; returns their weight."""
    weight = 0.0
    numbers = range(step * config.accumulate + team.rank, (step + 1) * config.accumulate, team.world)
    for number in numbers:
        _seed(config.seed, number)
        with team.syncing(number == numbers[-1]):
            with torch.autocast(team.device.type, torch.bfloat16, enabled=config.bf16):
                part = objective.part(number)
            part.loss.backward()  # type: ignore[no-untyped-call]
        weight += part.weight
        window.add_part(part)
    return weight


def _clip(trains: list[nn.Parameter], scale: float, most: float, step: int) -> float:
    """Scale gradients, then clip them; returns their norm before clipping."""
    for parameter in trains:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    total: Tensor = torch.nn.utils.clip_grad_norm_(trains, most)
    norm = whole(total).item()
    if not math.isfinite(norm):
        raise TrainingError(
            f"the gradient of step {step + 1} is not finite: lower the learning rate or set loop.bf16 to false, "
            "then run again; the last saved state is from before"
        )
    return norm


def _seed(seed: int, number: int) -> None:
    """Dropout and noise of a micro-batch follow from its number, whoever computes it and whatever came before."""
    digest = hashlib.sha256(f"{seed}.{number}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:4], "big"))  # the CPU's generator takes no more than 32 bits


def _run_log(folder: Path, config: ResolvedLoop, done: TrainingProgress, team: Team) -> RunLog:
    console = Console(stderr=True, quiet=not team.leads)
    precision = "bfloat16 (autocast)" if config.bf16 else "float32"
    console.print(f"training in {precision} from step {done.step} to {config.steps}", highlight=False)
    if not team.leads:
        return RunLog(config.steps, done.step, [], console)
    folder.mkdir(parents=True, exist_ok=True)
    return RunLog(config.steps, done.step, writers(folder, done.step, config.wandb, console), console)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Say what to do about a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and "os error 28" not in str(error):
            raise
        raise CheckpointError(
            f"the disk that holds {folder} is full ({error}); the last saved state is whole: free some space and run "
            "the same command again"
        ) from error
