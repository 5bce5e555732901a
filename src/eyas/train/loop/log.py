"""What a run says: JSON Lines and TensorBoard always, wandb if asked, a bar or lines on the console."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eyas.errors import ConfigError
from eyas.files import write_text

Values = Mapping[str, float]

_LATER = re.compile(r"_[1-9]\d*$")


class Writer(Protocol):
    """Somewhere records go."""

    def write(self, step: int, values: Values) -> None: ...

    def sync(self) -> None:
        """Make sure of what was written."""

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`; on resume, records past the resumed step are cut."""

    def __init__(self, path: Path, done: int) -> None:
        write_text(path, "".join(line + "\n" for line in _kept(path, done)))
        self._out = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Values) -> None:
        self._out.write(json.dumps({"step": step, **values}) + "\n")
        self._out.flush()

    def sync(self) -> None:
        self._out.flush()
        os.fsync(self._out.fileno())

    def close(self) -> None:
        self._out.close()


def _kept(path: Path, done: int) -> list[str]:
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() and done else ():
        try:
            step = json.loads(line)["step"]
        except json.JSONDecodeError:  # the line that was being written when the run was killed
            break
        if step <= done:
            kept.append(line)
    return kept


class TensorBoard:
    """Event files; on resume, TensorBoard hides what lies past the resumed step."""

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
    """A wandb run that goes on where the folder's run goes on."""

    def __init__(self, project: str, folder: Path) -> None:
        name = str(folder.resolve())
        own = hashlib.sha256(name.encode()).hexdigest()[:12]
        module: Any = importlib.import_module("wandb")
        self._run = module.init(project=project, name=folder.name, dir=str(folder), id=own, resume="allow")

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def sync(self) -> None:
        """wandb sends on its own."""

    def close(self) -> None:
        self._run.finish()


def check_wandb(project: str | None) -> None:
    """Refuse early what could not be logged."""
    if project is not None and find_spec("wandb") is None:
        raise ConfigError("loop.wandb asks for wandb, which isn't installed: `pip install wandb`, or leave it out")


def writers(folder: Path, done: int, project: str | None, console: Console) -> list[Writer]:
    """All that this run writes to; says when TensorBoard is missing."""
    found: list[Writer] = [JsonLines(folder / "metrics.jsonl", done)]
    if find_spec("tensorboard") is not None:
        found.append(TensorBoard(folder / "tensorboard", done))
    else:
        console.print("no TensorBoard files: `pip install eyas[train]` has the writer", highlight=False)
    if project is not None:
        found.append(Wandb(project, folder))
    return found


class RunLog:
    """Records to all writers, progress to the console."""

    def __init__(self, steps: int, done: int, writers: list[Writer], console: Console) -> None:
        self._writers, self._console = writers, console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done)

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
        """Move the bar to `step` finished steps."""
        self._bar.update(self._task, completed=step)

    def record(self, step: int, seconds: float, values: Values) -> None:
        """Write one record; `seconds` = training time so far."""
        for writer in self._writers:
            writer.write(step, {"seconds": round(seconds, 3), **values})
        if self._console.is_terminal:
            self._bar.update(self._task, description=_shown(values, 4))
        elif self._writers:
            self._console.print(f"step {step} {_shown(values)}", highlight=False, soft_wrap=True)

    def sync(self) -> None:
        """Make sure of all records so far."""
        for writer in self._writers:
            writer.sync()


def _shown(values: Values, most: int | None = None) -> str:
    """What fits a console: of figures by step of a chain only the first."""
    few = [(name, value) for name, value in values.items() if not _LATER.search(name)]
    return " ".join(f"{name} {value:.4g}" for name, value in few[:most])
