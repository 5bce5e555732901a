"""One trial: a recipe with the knobs turned, a folder of its own, and a `eyas train` process that fills it.

The folder is named after everything that makes the trial what it is, so an edited sweep finds its old trials again.
In it: `recipe.yaml`, `values.json`, the run itself under `run/`, `log.txt`, and, once training ended well,
`trained.json`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from eyas.bench.offline.checkpoints import TrainingRun
from eyas.config import assign, validated
from eyas.errors import ConfigError, DataError
from eyas.files import FileLock, write_json, write_text
from eyas.sweep.config import Knob, SweepConfig
from eyas.sweep.search import Listed, Search, Tpe, Values, draws, grid
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.recipe import Recipe, read_recipe


@dataclass(frozen=True)
class Trial:
    """What is trained, and where."""

    name: str
    folder: Path
    proposed: Values
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
        write_json(self.folder / "values.json", {"asked": self.proposed, "values": self.values})
        text = yaml.safe_dump(self.recipe, sort_keys=False)
        write_text(self.folder / "recipe.yaml", text)


def train_command(recipe: Path) -> list[str]:
    """`eyas train`, by this very Python."""
    return [sys.executable, "-m", "eyas", "train", str(recipe)]


class Process:
    """A trial being trained. It holds the folder's lock, also when whoever started it is killed."""

    def __init__(self, trial: Trial, environment: dict[str, str]) -> None:
        """Blocks while a process of an earlier, killed sweep still trains this trial."""
        trial.write()
        self.trial = trial
        self._lock = FileLock(trial.folder / "lock", wait=True)
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
        self._lock.release()
        return None if code == 0 else failure(self.trial.folder / "log.txt", code)

    def stop(self) -> None:
        """End it; its state stays, and a later sweep resumes it."""
        self._process.terminate()
        self._process.wait()
        self._log.close()
        self._lock.release()


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


# From a sweep's file to its trials: the recipe with the knobs turned, checked before anything runs.


@dataclass(frozen=True)
class Trials:
    """Makes trials, and finds those of earlier invocations."""

    config: SweepConfig

    @property
    def folder(self) -> Path:
        """Where their folders are."""
        return self.config.output / "trials"

    @cached_property
    def base(self) -> dict[str, Any]:
        """The recipe with what all trials share."""
        values = read_recipe(self.config.recipe)
        if "drafter" not in values:
            raise ConfigError(f"{self.config.recipe} has no section `drafter`: a sweep trains drafters")
        for key, value in self.config.set.items():
            assign(values, key, value, str(self.config.recipe))
        return values

    @cached_property
    def section(self) -> DrafterTrainConfig:
        """The recipe as the first values of all knobs make it: for what the trials have in common."""
        return self._section({name: _first(knob) for name, knob in self.config.knobs.items()})

    def make(self, proposed: Values) -> Trial:
        """The trial with these values; ConfigError names what the recipe refuses."""
        section = self._section(proposed)
        whole = {"drafter": section.model_dump(mode="json")}
        name = _name(section)
        values = {key: _lookup(whole, key) for key in self.config.knobs}
        recipe = self._turned(proposed)
        trial = Trial(name, self.folder / name, proposed, values, recipe)
        assign(recipe, "drafter.output", str(trial.run), str(self.config.recipe))
        return trial

    def check(self) -> None:
        """Refuse knobs that the recipe doesn't have, or values that it doesn't take, before anything runs."""
        for name, knob in self.config.knobs.items():
            if name.split(".")[0] != "drafter" or name == "drafter.output":
                raise ConfigError(f"knobs.{name}: a knob is a key of the recipe's section drafter, and not its output")
            first = {other: _first(each) for other, each in self.config.knobs.items()}
            for value in knob.values if knob.values is not None else (knob.low, knob.high):
                self.make(first | {name: value})

    def search(self, history: Iterable[tuple[Trial, float]]) -> Search:
        """The configured search; `history` are trials of earlier invocations and what they gave."""
        config = self.config
        if config.search == "grid":
            return Listed(grid(config.knobs))
        if config.search == "random":
            return Listed(draws(config.knobs, config.trials or 0, config.seed))
        done = {trial.name: (trial.proposed, score) for trial, score in history}
        pending = [trial.proposed for trial in self.earlier() if trial.name not in done]
        return Tpe(config, done.values(), pending)

    def earlier(self) -> list[Trial]:
        """Trials of earlier invocations with the same knobs, whatever became of them."""
        found = []
        for path in sorted(self.folder.glob("*/values.json")):
            try:
                proposed = json.loads(path.read_text(encoding="utf-8"))["asked"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} is damaged: delete {path.parent}, and the trial is run again") from error
            if proposed.keys() == self.config.knobs.keys() and (trial := self.make(proposed)).folder == path.parent:
                found.append(trial)
        return found

    def _turned(self, proposed: Values) -> dict[str, Any]:
        values = copy.deepcopy(self.base)
        for key, value in proposed.items():
            assign(values, key, value, str(self.config.recipe))
        return values

    def _section(self, proposed: Values) -> DrafterTrainConfig:
        values = self._turned(proposed)
        assign(values, "drafter.output", str(self.folder), str(self.config.recipe))
        turned = ", ".join(f"{key}={value}" for key, value in proposed.items())
        section = validated(Recipe, values, f"{self.config.recipe} with {turned}").drafter
        assert section is not None  # the section is there, and it is the only one a Recipe takes
        return section


def _name(section: DrafterTrainConfig) -> str:
    """A digest of what a recipe makes of a trial, wherever its run lies.

    What a version before 2026-11-22 wrote differently, meaning the same, is digested as it was then.
    """
    values = section.model_dump(mode="json") | {"output": None}
    if values["loop"]["epochs"] is None:
        del values["loop"]["epochs"]
    if values["shape"]["draft_vocab_size"] == "auto" and section.shape.head_owner == "shared":
        values["shape"]["draft_vocab_size"] = None
    identity = json.dumps({"drafter": values}, sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _first(knob: Knob) -> Any:
    return knob.low if knob.values is None else knob.values[0]


def _lookup(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
