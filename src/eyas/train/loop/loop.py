"""The training loop that all objectives share.

A micro-batch's data and randomness are pure functions of its number. So a resumed run gives the same result as an
uninterrupted one, bit for bit on the same number of threads, and several processes give the same result as one, up to
rounding.
"""

from __future__ import annotations

import hashlib
import math
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field, model_validator
from rich.console import Console
from torch import Tensor, nn
from torch.distributed import is_torchelastic_launched

from eyas.config import StrictModel
from eyas.errors import ConfigError, StoppedError, TrainingError
from eyas.runtime import SpareCores, keep_freed_memory, without_cudnn_attention
from eyas.train.loop.checkpoint import TrainingProgress, load_state, save_state, saved_identity
from eyas.train.loop.distributed import Parallel, ProcessGroup, full_tensor
from eyas.train.loop.log import Advance, Means, MicroBatchLoss, RunLog, check_trackers, writers
from eyas.train.loop.optimizer import (
    OptimizerConfig,
    ResolvedOptimizer,
    ScheduleConfig,
    build_optimizers,
    computes_in_bf16,
    schedule_factor,
    set_learning_rate,
)


class LoopConfig(StrictModel):
    """How long to train, with which optimizer, on how many processes, and how often to log, validate and save."""

    steps: int | None = Field(default=None, gt=0)
    epochs: float | None = Field(default=None, gt=0)  # passes over the data, instead of steps
    until: int | None = Field(default=None, gt=0)  # the run pauses after this step; the schedule covers all steps
    accumulate: int = Field(default=1, gt=0)  # micro-batches in a step, over all processes
    seed: int = Field(default=0, ge=0)
    bf16: bool | Literal["auto"] = "auto"  # autocast; the trained weights stay in float32
    parallel: Parallel = "auto"  # auto: ddp under torchrun, else none
    threads: int | None = Field(default=None, gt=0)  # on a CPU; None: fewer while other processes use the cores
    log_every: Annotated[int, Field(gt=0)] | Literal["auto"] = 10  # auto: 100 times, at least every 50 steps
    validate_every: Annotated[int, Field(gt=0)] | Literal["auto"] = 200  # auto: 5 times, at least every 1,000 steps
    save_seconds: float = Field(default=240.0, gt=0)  # the state is also saved at every validation
    wandb: str | None = None  # the wandb project to log to
    mlflow: str | None = None  # the MLflow experiment to log to
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @property
    def trackers(self) -> dict[str, str]:
        """Requested tracking library -> the project or experiment that it logs to."""
        trackers = {"wandb": self.wandb, "mlflow": self.mlflow}
        return {name: project for name, project in trackers.items() if project is not None}

    @model_validator(mode="after")
    def _one_length(self) -> LoopConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                "give either steps or epochs; to replace the one in a recipe, set it to null "
                "(as in loop.epochs=null loop.steps=300)"
            )
        return self


class ResolvedLoop(LoopConfig):
    """The settings of a loop with `auto` and epochs resolved."""

    steps: int = Field(gt=0)
    bf16: bool
    log_every: int
    validate_every: int
    optimizer: ResolvedOptimizer = ResolvedOptimizer()


def resolved(config: LoopConfig, batches: int, width: int, folder: Path, processes: ProcessGroup) -> ResolvedLoop:
    """Resolve epochs to steps, `auto` precision to bf16 where that is fast, and `auto` optimizer settings.

    An epoch has `batches` micro-batches, and the model has hidden size `width`. All processes must call this; rank 0
    decides. A resumed run in `folder` keeps the precision it began with on any machine.
    """
    steps, bf16 = config.steps, config.bf16
    if steps is None:
        assert config.epochs is not None  # one of the two is given
        steps = max(1, math.ceil(config.epochs * batches / config.accumulate))
    if bf16 == "auto":
        began = saved_identity(folder / "state").get("bf16")
        bf16 = processes.all_gather(computes_in_bf16(processes.device) if began is None else bool(began))[0]
    optimizer = config.optimizer.resolved(width, processes.mode == "fsdp")
    filled: dict[str, Any] = {"steps": steps, "epochs": None, "bf16": bf16, "optimizer": optimizer.model_dump()}
    for name, times, most in (("log_every", 100, 50), ("validate_every", 5, 1000)):
        if getattr(config, name) == "auto":
            filled[name] = min(most, math.ceil(steps / times))
    return ResolvedLoop.model_validate({**config.model_dump(), **filled})


class Objective(Protocol):
    """A model with its loss and its data."""

    @property
    def model(self) -> nn.Module:
        """The module whose parameters are trained."""

    def micro_batch_loss(self, number: int) -> MicroBatchLoss:
        """The loss of micro-batch `number`, counted from the beginning of the run."""

    def validate(self, progress: TrainingProgress, advance: Advance) -> dict[str, float]:
        """Name in the log -> metric on held-out data; may also save a checkpoint. Calls `advance` as it proceeds."""


_TRACKERS = {"wandb", "mlflow"}
_FLEXIBLE = _TRACKERS | {
    "steps", "epochs", "until", "schedule", "parallel", "threads", "log_every", "validate_every", "save_seconds",
}  # fmt: skip
"""Settings that may differ when a run is resumed, for example to end a plateau earlier or later than planned."""


_COMPUTED = {
    "target_fingerprint": "the target's weights",
    "data_hash": "the chats or their tokens",
    "taps": "drafter.shape.taps",
}
"""Entries of an identity that no recipe key sets -> what determines them."""


def train(
    objective: Objective,
    config: ResolvedLoop,
    folder: Path,
    processes: ProcessGroup,
    identity: Mapping[str, Any],
    section: str = "drafter",
) -> None:
    """Train up to `config.steps`, resuming from the state in `folder`/state if there is one.

    `identity` holds further settings that must be equal when the run is resumed; `section` is their recipe section.
    Raises CheckpointError if they differ; OSError if the disk is full, which leaves the last state complete;
    TrainingError if a gradient is not finite; StoppedError, once the state is saved, after SIGINT or SIGTERM.
    """
    check_loop(config, processes)
    keep_freed_memory()
    model = objective.model
    optimizers = build_optimizers(model, config.optimizer)
    state = folder / "state"
    own = config.model_dump(mode="json", exclude=_FLEXIBLE)
    done = load_state(state, model, optimizers, {**own, **identity}, partial(_recipe_key, section, own.keys()))
    identity = {**own, **identity}
    trains = [p for p in model.parameters() if p.requires_grad]
    threads = SpareCores("training", processes.device, config.threads)
    with (
        _run_log(folder, config, done, processes) as log,
        _stopping() as stop,
        threads,
        without_cudnn_attention(),
    ):
        window = Means()
        clock = done.seconds
        saved = time.monotonic()
        end = min(config.steps, config.until or config.steps)
        for step in range(done.step, end):
            began = time.monotonic()
            set_learning_rate(optimizers, schedule_factor(config.schedule, step, config.steps))
            weight = processes.all_sum(_accumulate(objective, config, step, processes, window, threads))
            norm = _clip(trains, processes.world_size / max(weight, 1.0), config.optimizer.clip, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            done = TrainingProgress(step + 1, done.seconds + time.monotonic() - began)
            log.advance(done.step)
            last = done.step == end
            if done.step % config.log_every == 0 or last:
                joint = Means.merged(processes.all_gather(dict(window.sums)))
                speed = joint.count("loss") / max(done.seconds - clock, 1e-9)
                figures = {"norm": norm, "lr": optimizers[-1].param_groups[0]["lr"], "per_second": speed}
                log.record(*done, {**joint.means(), **figures})
                window = Means()
                clock = done.seconds
            judged = done.step % config.validate_every == 0 or last
            if judged:
                log.record(*done, objective.validate(done, log.validating))
            # one sum, so that all processes act alike: it is infinite if any of them got a signal
            waited = processes.all_sum(math.inf if stop.signal_number else time.monotonic() - saved)
            if judged or waited > config.save_seconds * processes.world_size:
                log.sync()  # before the state is saved, so that the log is complete up to its step
                save_state(state, model, optimizers, done, identity, processes)
                saved = time.monotonic()
            if math.isinf(waited) and not last:
                raise StoppedError(
                    f"training stopped after step {done.step} of {config.steps}; the state of that step is saved in "
                    f"{state}: run the same command again to resume, to the same weights as without the stop",
                    stop.signal_number or signal.SIGTERM,
                )


class _StopRequest:
    """The signal that requested training to stop, if any; a second one of its kind takes effect immediately.

    Under torchrun a second one is ignored: torchrun forwards a signal that its whole group got, so each process gets it
    twice. Processes that take more than 30 s are killed by torchrun.
    """

    def __init__(self) -> None:
        self.signal_number = 0

    def __call__(self, number: int, _: Any) -> None:
        self.signal_number = number
        if not is_torchelastic_launched():
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def _stopping() -> Iterator[_StopRequest]:
    """Take SIGINT and SIGTERM as requests to stop after the step; only a process's main thread gets signals."""
    stop = _StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _recipe_key(section: str, loop: Collection[str], key: str) -> str:
    """The recipe key of a state's setting: loop settings are in the section `loop`, others next to it."""
    first = key.partition(".")[0]
    if first in _COMPUTED:
        return _COMPUTED[first]
    return f"{section}.loop.{key}" if first in loop else f"{section}.{key}"


def check_loop(config: LoopConfig, processes: ProcessGroup) -> None:
    """Raise ConfigError for settings that don't fit each other or the processes; called before anything is loaded."""
    check_trackers(config.trackers)
    if config.accumulate % processes.world_size:
        raise ConfigError(
            f"loop.accumulate is {config.accumulate}, which can't be divided among {processes.world_size} processes: "
            f"make it a multiple of {processes.world_size} (it counts the micro-batches of a step over all processes)"
        )
    if processes.mode == "fsdp" and config.optimizer.kind == "muon":
        raise ConfigError("muon needs whole matrices, which fsdp shards: use adamw, or loop.parallel=ddp")


def _accumulate(
    objective: Objective, config: ResolvedLoop, step: int, processes: ProcessGroup, window: Means, threads: SpareCores
) -> float:
    """Accumulate the gradients of this process's micro-batches of a step and return the sum of their weights."""
    weight = 0.0
    numbers = range(step * config.accumulate + processes.rank, (step + 1) * config.accumulate, processes.world_size)
    for number in numbers:
        threads.follow()
        _seed(config.seed, number)
        with processes.gradient_sync(number == numbers[-1]):
            with torch.autocast(processes.device.type, torch.bfloat16, enabled=config.bf16):
                part = objective.micro_batch_loss(number)
            part.loss.backward()  # type: ignore[no-untyped-call]
        weight += part.weight
        window.add_micro_batch(part)
    return weight


def _clip(trains: list[nn.Parameter], scale: float, max_norm: float, step: int) -> float:
    """Scale all gradients, clip them to the norm `max_norm`, and return their norm before clipping."""
    for parameter in trains:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    total: Tensor = torch.nn.utils.clip_grad_norm_(trains, max_norm)
    norm = full_tensor(total).item()
    if not math.isfinite(norm):
        raise TrainingError(
            f"the gradient of step {step + 1} is not finite: lower the learning rate or set loop.bf16 to false, "
            "then run again from the last saved state"
        )
    return norm


def _seed(seed: int, number: int) -> None:
    """Seed torch for a micro-batch, so that its dropout depends only on `seed` and `number`."""
    digest = hashlib.sha256(f"{seed}.{number}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:4], "big"))  # the CPU's generator takes no more than 32 bits


def _run_log(folder: Path, config: ResolvedLoop, done: TrainingProgress, processes: ProcessGroup) -> RunLog:
    console = Console(stderr=True, quiet=not processes.is_main)
    precision = "bfloat16 (autocast)" if config.bf16 else "float32"
    console.print(f"training in {precision} from step {done.step} to {config.steps}", highlight=False)
    if not processes.is_main:
        return RunLog(config.steps, done.step, [], console)
    folder.mkdir(parents=True, exist_ok=True)
    return RunLog(config.steps, done.step, writers(folder, done.step, config.trackers, console), console)
