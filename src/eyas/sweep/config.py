"""The YAML file of `eyas sweep`: which recipe keys vary, how they are searched, and how trials are scored and timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from eyas.config import StrictModel


class Knob(StrictModel):
    """The values of one recipe key: a list, or a range of numbers from `low` to `high`, both included."""

    values: tuple[Any, ...] | None = None
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False  # sample the logarithm uniformly

    @model_validator(mode="before")
    @classmethod
    def _list(cls, given: Any) -> Any:
        if isinstance(given, list):
            return {"values": given}
        if not isinstance(given, dict):
            raise ValueError("give a list of values, or a range such as {low: 1.0e-4, high: 3.0e-3, log: true}")
        return given

    @model_validator(mode="after")
    def _one_kind(self) -> Knob:
        if self.values is not None:
            if (self.low, self.high, self.log) != (None, None, False):
                raise ValueError("give either values or a range, not both")
            if not self.values:
                raise ValueError("the list is empty: give at least one value")
            return self
        if self.low is None or self.high is None:
            raise ValueError("a range needs both low and high")
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a range with log must begin above 0, got {self.low}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and highest value of a range; only for knobs without a list of values."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    @property
    def whole(self) -> bool:
        """Whether the range holds whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)


class ScoreConfig(StrictModel):
    """How a trial's drafter is scored: on which prompts, and with which settings of decoding."""

    prompt_files: tuple[Path, ...] = ()
    """Prompt files; without any, prompts are taken from held-out chats of the recipe's data."""
    prompts: int = Field(default=16, gt=0)  # the most prompts of each file, or of the held-out chats
    max_tokens: int = Field(default=96, gt=0)
    batch_size: int = Field(default=1, gt=0)
    tree: str | None = None  # one tree for all trials; None: each drafter's own
    dtype: str = "float32"
    device: str | None = None

    @field_validator("prompt_files")
    @classmethod
    def _are_there(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path} is not a file")
        return paths


class TimingConfig(StrictModel):
    """How tokens/s are measured once all trials are done: one run at a time, interleaved with plain decoding."""

    best: int | None = Field(default=None, gt=0)  # the number of best trials that are timed; None: all
    repeats: int = Field(default=3, gt=0)
    warmup: int = Field(default=1, ge=0)
    together: int = Field(default=6, gt=0)  # drafters in memory at once


class HalvingConfig(StrictModel):
    """Successive halving: all trials are trained for a part of the steps, and ever fewer for ever more of them."""

    rungs: int = Field(ge=2)
    factor: int = Field(default=3, ge=2)  # a rung keeps one trial in so many, which go on to so many times the steps


class SweepConfig(StrictModel):
    """A recipe to train, and how the trials of a sweep vary it."""

    recipe: Path  # a file, or the name of one that comes with eyas
    output: Path
    set: dict[str, Any] = Field(default_factory=dict)  # changes to the recipe in all trials: key -> value
    knobs: dict[str, Knob] = Field(min_length=1)  # key of the recipe -> its values
    search: Literal["grid", "random", "tpe"] = "grid"
    trials: int | None = Field(default=None, gt=0)  # only for random and tpe
    halving: HalvingConfig | None = None  # only for grid and random
    seed: int = 0
    parallel: int = Field(default=1, gt=0)  # trials trained at once
    threads: int | None = Field(default=None, gt=0)  # CPU threads of a trial; None: an equal share of the cores
    devices: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES of each of the trials that run at once
    score: ScoreConfig = ScoreConfig()
    timing: TimingConfig = TimingConfig()

    @model_validator(mode="after")
    def _search_fits(self) -> SweepConfig:
        if self.search == "grid":
            ranges = [name for name, knob in self.knobs.items() if knob.values is None]
            if ranges:
                raise ValueError(
                    f"search grid needs lists of values, but {', '.join(ranges)} is a range: use search random or tpe"
                )
            if self.trials is not None:
                raise ValueError("search grid runs every combination: remove trials, or use search random or tpe")
        elif self.trials is None:
            raise ValueError(f"search {self.search} needs trials, the number of trials to run")
        if self.halving is not None and self.search == "tpe":
            raise ValueError("halving needs all trials in advance, which tpe proposes one by one: use random or grid")
        both = sorted(self.knobs.keys() & self.set.keys())
        if both:
            raise ValueError(f"{', '.join(both)} is in both set and knobs: remove one")
        if self.devices and len(self.devices) < self.parallel:
            raise ValueError(f"{self.parallel} parallel trials need as many devices, got {len(self.devices)}")
        return self
