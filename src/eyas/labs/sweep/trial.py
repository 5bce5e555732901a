"""Trials of a sweep: the recipe with one set of knob values, a folder, and an `eyas train` process that fills it.

The folder's name is a hash of the resolved recipe, so an edited sweep finds its old trials again. It holds
`recipe.yaml`, `values.json`, the run under `run/`, `log.txt` and, once training has succeeded, `trained.json`.
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

from eyas.bench.offline.trees import TrainingRun
from eyas.config import assign, validated
from eyas.errors import ConfigError, DataError
from eyas.files import FileLock, write_json, write_text
from eyas.labs.sweep.search import FixedSearch, Halving, Knob, Search, SweepConfig, Tpe, Values, draws, grid
from eyas.recipes import read_recipe
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.recipe import Recipe


@dataclass(frozen=True)
class Trial:
    """One set of knob values, the recipe that results from it, and the folder it is trained in."""

    name: str
    folder: Path
    proposed: Values
    """The knobs' values as the search proposed them; key `asked` in `values.json`."""
    values: Values
    """The knobs' values as the validated recipe holds them."""
    recipe: dict[str, Any]

    @property
    def run(self) -> Path:
        """The folder of the training run."""
        return self.folder / "run"

    @property
    def drafter(self) -> Path:
        """The folder of the drafter that is scored: the run's best if it has one, else its last."""
        best = self.run / "best"
        return best if best.is_dir() else self.run / "drafter"

    def trained(self, until: int | None = None) -> bool:
        """Whether training has finished successfully, or has reached the step `until`."""
        path = self.folder / "trained.json"
        if not path.is_file():
            return False
        reached = json.loads(path.read_text(encoding="utf-8")).get("until")
        return reached is None or (until is not None and reached >= until)

    @property
    def steps(self) -> int | None:
        """The step that training has reached; None if the run hasn't recorded any."""
        records = TrainingRun(self.run).records
        return records[-1]["step"] if records else None

    @property
    def seconds(self) -> float | None:
        """Training time in seconds, resumed runs included; None if the run hasn't recorded any."""
        records = TrainingRun(self.run).records
        return records[-1].get("seconds") if records else None

    @cached_property
    def described(self) -> str:
        """The knobs' values as `key=value`, for messages."""
        return ", ".join(f"{short_key(key)}={format_value(value)}" for key, value in self.values.items())

    def write(self, until: int | None = None) -> None:
        """Create the folder with `values.json` and a `recipe.yaml` that pauses training at the step `until`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "values.json", {"asked": self.proposed, "values": self.values})
        recipe = copy.deepcopy(self.recipe)
        if until is not None:
            assign(recipe, "drafter.loop.until", until, self.name)
        text = yaml.safe_dump(recipe, sort_keys=False)
        write_text(self.folder / "recipe.yaml", text)


def train_command(recipe: Path) -> list[str]:
    """The command line of `eyas train` with the interpreter of this process."""
    return [sys.executable, "-m", "eyas", "train", str(recipe)]


class TrainProcess:
    """A process that trains a trial. It holds the lock of the folder even if the sweep is killed."""

    def __init__(self, trial: Trial, environment: dict[str, str], until: int | None = None) -> None:
        """Start training; blocks while a process of an earlier, killed sweep is still training this trial."""
        trial.folder.mkdir(parents=True, exist_ok=True)
        self.trial = trial
        self.until = until
        self._lock = FileLock(trial.folder / "lock", wait=True)
        trial.write(until)
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
        """Whether the process has ended."""
        return self._process.poll() is not None

    def finish(self) -> str | None:
        """Wait for the process; write `trained.json` if it succeeded, and else return the reason for its failure."""
        code = self._process.wait()
        self._log.close()
        if code == 0:
            reached = {} if self.until is None else {"until": self.until}
            write_json(self.trial.folder / "trained.json", {"exit_code": 0, **reached})
        self._lock.release()
        return None if code == 0 else failure(self.trial.folder / "log.txt", code)

    def stop(self) -> None:
        """Terminate the process; its checkpoints stay, and a later sweep resumes from them."""
        self._process.terminate()
        self._process.wait()
        self._log.close()
        self._lock.release()


def failure(log: Path, code: int) -> str:
    """Why a process failed with `code`: its exit code or signal, and the last line of its log."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{ended}: {lines[-1].strip() if lines else 'no output'} (see {log})"


def short_key(key: str) -> str:
    """The last part of a knob's key, preceded by its section if the last part alone says too little."""
    parts = key.split(".")
    return parts[-1] if parts[-1] not in ("kind", "token", "feature", "name") else ".".join(parts[-2:])


def format_value(value: Any) -> str:
    """A knob's value for tables and messages; floats have three significant digits."""
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Trials:
    """Makes the trials of a sweep from its recipe, and finds those of earlier runs."""

    config: SweepConfig

    @property
    def folder(self) -> Path:
        """The folder that holds the folders of all trials."""
        return self.config.output / "trials"

    @cached_property
    def base(self) -> dict[str, Any]:
        """The recipe with the changes that all trials share."""
        values = read_recipe(self.config.recipe)
        if "drafter" not in values:
            raise ConfigError(f"{self.config.recipe} has no section drafter, which is what a sweep trains")
        for key, value in self.config.set.items():
            assign(values, key, value, str(self.config.recipe))
        return values

    @cached_property
    def section(self) -> DrafterTrainConfig:
        """The recipe with the first value of every knob; used for what all trials have in common."""
        return self._section({name: _first(knob) for name, knob in self.config.knobs.items()})

    def make(self, proposed: Values) -> Trial:
        """The trial with these values; ConfigError if the recipe doesn't accept one of them."""
        section = self._section(proposed)
        whole = {"drafter": section.model_dump(mode="json")}
        name = _name(section)
        values = {key: _lookup(whole, key) for key in self.config.knobs}
        recipe = self._recipe_with(proposed)
        trial = Trial(name, self.folder / name, proposed, values, recipe)
        assign(recipe, "drafter.output", str(trial.run), str(self.config.recipe))
        return trial

    def check(self) -> None:
        """Raise ConfigError for knobs that the recipe doesn't have, or values that it doesn't accept."""
        for name, knob in self.config.knobs.items():
            if name.split(".")[0] != "drafter" or name == "drafter.output":
                raise ConfigError(f"knobs.{name}: a knob must be a key of the recipe's section drafter, except output")
            first = {other: _first(each) for other, each in self.config.knobs.items()}
            for value in knob.values if knob.values is not None else (knob.low, knob.high):
                self.make(first | {name: value})

    def search(self, history: Iterable[tuple[Trial, float]]) -> Search:
        """The configured search; `history` are scored trials of earlier runs."""
        config = self.config
        if config.search != "tpe":
            values = (
                grid(config.knobs) if config.search == "grid" else draws(config.knobs, config.trials or 0, config.seed)
            )
            return FixedSearch(values) if config.halving is None else Halving(values, self._steps, config.halving)
        done = {trial.name: (trial.proposed, score) for trial, score in history}
        pending = [trial.proposed for trial in self.earlier() if trial.name not in done]
        return Tpe(config, done.values(), pending)

    @property
    def _steps(self) -> int:
        """The number of steps of all trials, which halving divides. Raises ConfigError if the recipe doesn't fix it."""
        steps = self.section.loop.steps
        if steps is None or self.config.knobs.keys() & {"drafter.loop.steps", "drafter.loop.epochs"}:
            raise ConfigError(
                "halving needs the same number of steps in all trials: set drafter.loop.steps, and "
                "drafter.loop.epochs to null"
            )
        return steps

    def earlier(self) -> list[Trial]:
        """Trials of earlier runs with the same knobs, trained or not. DataError if `values.json` of one is damaged."""
        found = []
        for path in sorted(self.folder.glob("*/values.json")):
            try:
                proposed = json.loads(path.read_text(encoding="utf-8"))["asked"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} is damaged: delete {path.parent} to run the trial again") from error
            if proposed.keys() == self.config.knobs.keys() and (trial := self.make(proposed)).folder == path.parent:
                found.append(trial)
        return found

    def _recipe_with(self, proposed: Values) -> dict[str, Any]:
        values = copy.deepcopy(self.base)
        for key, value in proposed.items():
            assign(values, key, value, str(self.config.recipe))
        return values

    def _section(self, proposed: Values) -> DrafterTrainConfig:
        values = self._recipe_with(proposed)
        assign(values, "drafter.output", str(self.folder), str(self.config.recipe))
        changes = ", ".join(f"{key}={value}" for key, value in proposed.items())
        section = validated(Recipe, values, f"{self.config.recipe} with {changes}").drafter
        assert section is not None  # `base` checks that the recipe has it
        return section


_FIRST = {
    "shape": frozenset(
        "bias default_tree depth draft_vocab_size dropout embedding fc_norm gate head head_dim heads hidden_size "
        "intermediate_size kv_heads kv_lora_rank layers norm_before_fc norm_before_residual norm_output q_lora_rank "
        "qk_nope_head_dim qk_rope_head_dim taps train_head v_head_dim".split()
    ),
    "loop": frozenset({"steps", "epochs", "wandb"}),
    "loss": frozenset({"kl_decay"}),
}
"""Settings of the first sweeps that may be None. Any other setting that is None is left out of the hash, since the
recipe means what it meant before the setting was added."""


def _name(section: DrafterTrainConfig) -> str:
    """The first 8 hexadecimal digits of a hash of the validated recipe without its output.

    Settings that versions before 2026-11-22 wrote differently with the same meaning are hashed in the old form.
    """
    values = section.model_dump(mode="json") | {"output": None}
    if values["loop"]["epochs"] is None:
        del values["loop"]["epochs"]
    if values["data_share"] == 1.0:
        del values["data_share"]
    if values["segments"] is None:
        del values["segments"]
    if values["shape"]["draft_vocab_size"] == "auto" and section.shape.head_owner == "shared":
        values["shape"]["draft_vocab_size"] = None
    for part, names in _FIRST.items():
        values[part] = {name: value for name, value in values[part].items() if value is not None or name in names}
    identity = json.dumps({"drafter": values}, sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _first(knob: Knob) -> Any:
    return knob.low if knob.values is None else knob.values[0]


def _lookup(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
