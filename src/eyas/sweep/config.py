"""What a sweep varies, how it searches, and by what it ranks: a strict YAML file."""

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
    log: bool = False  # equal chances for equal ratios

    @model_validator(mode="before")
    @classmethod
    def _list(cls, given: Any) -> Any:
        if isinstance(given, list):
            return {"values": given}
        if not isinstance(given, dict):
            raise ValueError("write a list of values, or a range such as {low: 1.0e-4, high: 3.0e-3, log: true}")
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
            raise ValueError(f"a range with log begins above 0, got {self.low}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Of a range."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    @property
    def whole(self) -> bool:
        """Does the range hold whole numbers only?"""
        return isinstance(self.low, int) and isinstance(self.high, int)


class ScoreConfig(StrictModel):
    """Which prompts a trial's drafter is decoded on; by default held-out chats of the recipe's own data."""

    prompt_files: tuple[Path, ...] = ()
    prompts: int = Field(default=16, gt=0)  # at most so many of each file, or of the held-out chats
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
                raise ValueError(f"there is no file {path}")
        return paths


class TimingConfig(StrictModel):
    """Tokens/s, measured when all trials are done: one at a time, interleaved with plain decoding."""

    best: int | None = Field(default=None, gt=0)  # only so many of the best trials; None: all
    repeats: int = Field(default=3, gt=0)
    warmup: int = Field(default=1, ge=0)
    together: int = Field(default=6, gt=0)  # drafters in memory at a time


class SweepConfig(StrictModel):
    """A recipe, and how its trials differ."""

    recipe: Path
    output: Path
    set: dict[str, Any] = Field(default_factory=dict)  # changes to the recipe that all trials share
    knobs: dict[str, Knob] = Field(min_length=1)
    search: Literal["grid", "random", "tpe"] = "grid"
    trials: int | None = Field(default=None, gt=0)
    seed: int = 0
    parallel: int = Field(default=1, gt=0)
    threads: int | None = Field(default=None, gt=0)  # of a trial; None: the machine's cores shared out
    devices: tuple[str, ...] = ()  # what CUDA_VISIBLE_DEVICES is for the trials that run side by side
    score: ScoreConfig = ScoreConfig()
    timing: TimingConfig = TimingConfig()

    @model_validator(mode="after")
    def _search_fits(self) -> SweepConfig:
        if self.search == "grid":
            ranges = [name for name, knob in self.knobs.items() if knob.values is None]
            if ranges:
                raise ValueError(f"a grid needs lists of values, {', '.join(ranges)} is a range: search random or tpe")
            if self.trials is not None:
                raise ValueError("a grid runs every combination: leave out trials, or search random or tpe")
        elif self.trials is None:
            raise ValueError(f"search {self.search} needs trials: how many to run")
        both = sorted(self.knobs.keys() & self.set.keys())
        if both:
            raise ValueError(f"{', '.join(both)} is both set and varied: keep one")
        if self.devices and len(self.devices) < self.parallel:
            raise ValueError(f"{self.parallel} trials side by side need as many devices, got {len(self.devices)}")
        return self
