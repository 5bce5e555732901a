"""One trial: a recipe with the knobs turned, a folder of its own, and a `eyas train` process that fills it.

The folder is named after everything that makes the trial what it is, so an edited sweep finds its old trials again.
In it: `recipe.yaml`, `values.json`, the run itself under `run/`, `log.txt`, and, once training ended well,
`trained.json`.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import yaml

from eyas.bench.ledger import write_json
from eyas.bench.training_run import TrainingRun
from eyas.sweep.search import Values


@dataclass(frozen=True)
class Trial:
    """What is trained, and where."""

    name: str
    folder: Path
    asked: Values
    """As the search gave them."""
    values: Values
    """As the recipe understood them."""
    recipe: dict[str, Any]

    @property
    def run(self) -> Path:
        """The training run."""
        return self.folder / "run"

    @property
    def drafter(self) -> Path:
        """The drafter it is judged by."""
        best = self.run / "best"
        return best if best.is_dir() else self.run / "drafter"

    @property
    def trained(self) -> bool:
        """Did training end well?"""
        return (self.folder / "trained.json").is_file()

    @property
    def seconds(self) -> float | None:
        """Training time, over resumptions; None if the run doesn't say."""
        records = TrainingRun(self.run).records
        return records[-1].get("seconds") if records else None

    @cached_property
    def described(self) -> str:
        """The knobs in words."""
        return ", ".join(f"{short(key)}={shown(value)}" for key, value in self.values.items())

    def write(self) -> None:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "values.json", {"asked": self.asked, "values": self.values})
        text = yaml.safe_dump(self.recipe, sort_keys=False)
        (self.folder / "recipe.yaml").write_text(text, encoding="utf-8")


def train_command(recipe: Path) -> list[str]:
    """`eyas train`, by this very Python."""
    return [sys.executable, "-m", "eyas", "train", str(recipe)]


class Process:
    """A trial being trained. It holds the folder's lock, also when whoever started it is killed."""

    def __init__(self, trial: Trial, environment: dict[str, str]) -> None:
        """Blocks while a process of an earlier, killed sweep still trains this trial."""
        trial.write()
        self.trial = trial
        self._lock = lock(trial.folder / "lock")
        self._log = (trial.folder / "log.txt").open("ab")
        self._process = subprocess.Popen(
            train_command(trial.folder / "recipe.yaml"),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **environment},
            pass_fds=(self._lock.fileno(),),
        )

    def ended(self) -> bool:
        """Has it?"""
        return self._process.poll() is not None

    def finish(self) -> str | None:
        """Note that training ended well; else, why it didn't."""
        code = self._process.wait()
        self._log.close()
        if code == 0:
            write_json(self.trial.folder / "trained.json", {"exit_code": 0})
        self._lock.close()
        return None if code == 0 else failure(self.trial.folder / "log.txt", code)

    def stop(self) -> None:
        """End it; its state stays, and a later sweep resumes it."""
        self._process.terminate()
        self._process.wait()
        self._log.close()
        self._lock.close()


def lock(path: Path) -> TextIO:
    """An exclusive lock that lasts until every process that inherited it is gone; waits for it."""
    held = path.open("a", encoding="utf-8")
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def failure(log: Path, code: int) -> str:
    """Why a process ended with `code`, from the end of its log."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{ended}: {lines[-1].strip() if lines else 'no output'} (see {log})"


def short(key: str) -> str:
    """A knob's last word or, for `kind`-like words, the section before it too."""
    parts = key.split(".")
    return parts[-1] if parts[-1] not in ("kind", "token", "feature", "name") else ".".join(parts[-2:])


def shown(value: Any) -> str:
    """A value, briefly."""
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
