"""From a sweep's file to its trials: the recipe with the knobs turned, checked before anything runs."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.config import assign, read_yaml, validated
from eyas.errors import ConfigError, DataError
from eyas.sweep.config import Knob, SweepConfig
from eyas.sweep.search import Listed, Search, Tpe, Values, draws, grid
from eyas.sweep.trial import Trial
from eyas.train.drafter_recipe import DrafterTrainConfig
from eyas.train.recipes import Recipe


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
        values = read_yaml(self.config.recipe)
        if "drafter" not in values:
            raise ConfigError(f"{self.config.recipe} has no section `drafter`: a sweep trains drafters")
        for key, value in self.config.set.items():
            assign(values, key, value, str(self.config.recipe))
        return values

    @cached_property
    def section(self) -> DrafterTrainConfig:
        """The recipe as the first values of all knobs make it: for what the trials have in common."""
        return self._section({name: _first(knob) for name, knob in self.config.knobs.items()})

    def make(self, asked: Values) -> Trial:
        """The trial with these values; ConfigError names what the recipe refuses."""
        section = self._section(asked)
        whole = {"drafter": section.model_dump(mode="json")}
        identity = json.dumps({"drafter": {**whole["drafter"], "output": None}}, sort_keys=True)
        name = hashlib.sha256(identity.encode()).hexdigest()[:8]
        values = {key: _lookup(whole, key) for key in self.config.knobs}
        recipe = self._turned(asked)
        trial = Trial(name, self.folder / name, asked, values, recipe)
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
        done = {trial.name: (trial.asked, score) for trial, score in history}
        pending = [trial.asked for trial in self.earlier() if trial.name not in done]
        return Tpe(config, done.values(), pending)

    def earlier(self) -> list[Trial]:
        """Trials of earlier invocations with the same knobs, whatever became of them."""
        found = []
        for path in sorted(self.folder.glob("*/values.json")):
            try:
                asked = json.loads(path.read_text(encoding="utf-8"))["asked"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} is damaged: delete {path.parent}, and the trial is run again") from error
            if asked.keys() == self.config.knobs.keys() and (trial := self.make(asked)).folder == path.parent:
                found.append(trial)
        return found

    def _turned(self, asked: Values) -> dict[str, Any]:
        values = copy.deepcopy(self.base)
        for key, value in asked.items():
            assign(values, key, value, str(self.config.recipe))
        return values

    def _section(self, asked: Values) -> DrafterTrainConfig:
        values = self._turned(asked)
        assign(values, "drafter.output", str(self.folder), str(self.config.recipe))
        turned = ", ".join(f"{key}={value}" for key, value in asked.items())
        section = validated(Recipe, values, f"{self.config.recipe} with {turned}").drafter
        assert section is not None  # the section is there, and it is the only one a Recipe takes
        return section


def _first(knob: Knob) -> Any:
    return knob.low if knob.values is None else knob.values[0]


def _lookup(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
