"""The log of a run (JSON Lines, TensorBoard, wandb, MLflow, console), and the running means that it shows."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from eyas.errors import ConfigError
from eyas.files import write_text
from eyas.runtime import duration


@dataclass
class MicroBatchLoss:
    """The loss and metrics of a micro-batch, as sums."""

    loss: Tensor  # [] summed over positions
    weight: float  # the number of positions in the sum
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> sum and count


class Means:
    """Running means of metrics, each with its own count."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def add(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Add metrics: name -> (sum, count)."""
        for name, (total, count) in metrics.items():
            before = self.sums[name]
            self.sums[name] = (before[0] + total, before[1] + count)

    def add_micro_batch(self, part: MicroBatchLoss) -> None:
        """Add a micro-batch's metrics and its loss."""
        self.add({"loss": (part.loss.item(), part.weight), **part.metrics})

    @staticmethod
    def merged(parts: Iterable[Mapping[str, tuple[float, float]]]) -> Means:
        """The joint means of several processes, from the `sums` of each."""
        joint = Means()
        for sums in parts:
            joint.add(sums)
        return joint

    def count(self, name: str) -> float:
        """The number of positions in a metric's sum."""
        return self.sums[name][1]

    def means(self) -> dict[str, float]:
        """Name -> mean, without metrics whose count is zero."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}


Values = Mapping[str, float]
Advance = Callable[[str, int, int], None]
"""Called during a validation with its current task, the units of it that are done, and all units."""

_LATER_STEP = re.compile(r"_[1-9]\d*$")
"""Matches the names of metrics of later training-time-test steps, such as `accuracy_1`."""
_DECIDING_METRIC = "decoded_accept_length"
"""The metric that decides which checkpoint is best; shown first."""
SILENCE = 60.0
"""Without a progress bar, the time left is printed at the first step after this many seconds of silence."""
_FIRST_STEPS = 3
"""Steps after which the time left is printed for the first time."""


class Writer(Protocol):
    """A destination for the log's records."""

    def write(self, step: int, values: Values) -> None: ...

    def sync(self) -> None:
        """Make sure that everything written so far is on disk."""

    def close(self) -> None: ...


class JsonLines:
    """The file `metrics.jsonl`; when a run is resumed, records of later steps are removed."""

    def __init__(self, path: Path, done: int) -> None:
        write_text(path, "".join(line + "\n" for line in _lines_until(path, done)))
        self._out = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Values) -> None:
        self._out.write(json.dumps({"step": step, **values}) + "\n")
        self._out.flush()

    def sync(self) -> None:
        self._out.flush()
        os.fsync(self._out.fileno())

    def close(self) -> None:
        self._out.close()


def _lines_until(path: Path, done: int) -> list[str]:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() and done else ():
        try:
            step = json.loads(line)["step"]
        except json.JSONDecodeError:  # an incomplete line, written when the run was killed
            break
        if step <= done:
            kept.append(line)
    return kept


class TensorBoard:
    """TensorBoard's event files; when a run is resumed, TensorBoard hides the records of later steps."""

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._out: Any = SummaryWriter(folder, purge_step=done + 1 if done else None)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            section = "validation" if name.startswith(("validation_", "decoded_")) else "train"
            self._out.add_scalar(f"{section}/{name.removeprefix('validation_')}", value, step)

    def sync(self) -> None:
        self._out.flush()

    def close(self) -> None:
        self._out.close()


class Wandb:
    """A wandb run whose id is a hash of the folder, so that a resumed run continues it."""

    def __init__(self, project: str, folder: Path) -> None:
        name = str(folder.resolve())
        own = hashlib.sha256(name.encode()).hexdigest()[:12]
        module: Any = importlib.import_module("wandb")
        self._run = module.init(project=project, name=folder.name, dir=str(folder), id=own, resume="allow")

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def sync(self) -> None:
        """Do nothing: wandb sends records by itself."""

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run at MLFLOW_TRACKING_URI, found by its folder, so that a resumed run continues it."""

    def __init__(self, experiment: str, folder: Path) -> None:
        module: Any = importlib.import_module("mlflow")
        module.set_experiment(experiment)
        where = str(folder.resolve())
        known = module.search_runs(
            experiment_names=[experiment], filter_string=f"tags.`eyas.folder` = '{where}'", output_format="list"
        )
        if known:
            module.start_run(run_id=known[0].info.run_id)
        else:
            module.start_run(run_name=folder.name, tags={"eyas.folder": where})
        self._module = module

    def write(self, step: int, values: Values) -> None:
        self._module.log_metrics(dict(values), step=step)

    def sync(self) -> None:
        """Do nothing: MLflow stores records immediately."""

    def close(self) -> None:
        self._module.end_run()


_TRACKERS: dict[str, Callable[[str, Path], Writer]] = {"wandb": Wandb, "mlflow": MLflow}


def check_trackers(trackers: Mapping[str, str]) -> None:
    """Raise ConfigError if a library among `trackers` (`wandb`, `mlflow` -> project) isn't installed."""
    for name in trackers:
        if find_spec(name) is None:
            raise ConfigError(f"loop.{name} is set, but {name} isn't installed: `pip install {name}`, or leave it out")


def writers(folder: Path, done: int, trackers: Mapping[str, str], console: Console) -> list[Writer]:
    """The destinations of a run's records. `done`: steps already finished; `trackers`: as in `check_trackers`."""
    found: list[Writer] = [JsonLines(folder / "metrics.jsonl", done)]
    if find_spec("tensorboard") is not None:
        found.append(TensorBoard(folder / "tensorboard", done))
    else:
        console.print("no TensorBoard files are written: `pip install 'eyas[train]'`", highlight=False)
    found += [_TRACKERS[name](project, folder) for name, project in trackers.items()]
    return found


class RunLog:
    """Sends records to all writers and shows progress on the console."""

    def __init__(self, steps: int, done: int, writers: list[Writer], console: Console) -> None:
        self._writers = writers
        self._console = console
        self._steps = steps
        self._first = done
        self._began = self._said = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=SILENCE * 60,  # steps may take minutes
        )
        self._task = self._bar.add_task("training", total=steps, completed=done)
        self._validation = self._bar.add_task("validating", total=1, visible=False)

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        for writer in self._writers:
            writer.close()

    def advance(self, step: int) -> None:
        """Move the progress bar to `step` finished steps; without a bar, print the time left at intervals."""
        self._bar.update(self._task, completed=step)
        now = time.monotonic()
        made = step - self._first
        if self._console.is_terminal or not self._writers or step == self._steps:
            return
        if made == _FIRST_STEPS or now - self._said >= SILENCE:
            self._said = now
            each = (now - self._began) / made
            left = duration(each * (self._steps - step))
            took = f"{each:.1f} s" if each < 10 else duration(each)
            self._console.print(f"step {step} of {self._steps}: {took} a step, about {left} left", soft_wrap=True)

    def validating(self, what: str, done: int, total: int) -> None:
        """Show a validation's progress in a bar of its own; without a bar, print it at intervals."""
        self._bar.update(self._validation, description=f"validating: {what}", completed=done, total=total, visible=True)
        if self._console.is_terminal or not self._writers or time.monotonic() - self._said < SILENCE:
            return
        self._said = time.monotonic()
        self._console.print(f"validating: {what}, {done / total:.0%}", soft_wrap=True)

    def record(self, step: int, seconds: float, values: Values) -> None:
        """Write a record of `step`, `seconds` of training after the run began."""
        for writer in self._writers:
            writer.write(step, {"seconds": round(seconds, 3), **values})
        judged = any(name.startswith(("validation_", _DECIDING_METRIC)) for name in values)
        if judged:
            self._bar.update(self._validation, visible=False)
        if self._console.is_terminal and not judged:
            self._bar.update(self._task, description=_shown(values, 1))
        elif self._writers:
            self._console.print(f"step {step} {_shown(values)}", highlight=False, soft_wrap=True)

    def sync(self) -> None:
        """Make sure that all records so far are on disk."""
        for writer in self._writers:
            writer.sync()


def _shown(values: Values, most: int | None = None) -> str:
    """At most `most` metrics in one line, `_DECIDING_METRIC` first, without those of later training-time-test steps."""
    few = [(name, value) for name, value in values.items() if not _LATER_STEP.search(name)]
    few.sort(key=lambda figure: figure[0] != _DECIDING_METRIC)
    return " ".join(f"{name} {value:.4g}" for name, value in few[:most])
