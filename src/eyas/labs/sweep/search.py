"""What a sweep varies, and how it searches: a grid, random draws, or Optuna's Parzen estimator (TPE)."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, field_validator, model_validator

from eyas.config import StrictModel, flat
from eyas.errors import UsageError


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
    """How a trial's drafter is scored: on which prompts, and with which decoding settings."""

    prompt_files: tuple[Path, ...] = ()
    """Prompt files; without any, prompts are taken from held-out chats of the recipe's data."""
    prompts: int = Field(default=16, gt=0)  # maximum prompts from each file, or from the held-out chats
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

    best: int | None = Field(default=None, gt=0)  # how many of the best trials are timed; None: all
    repeats: int = Field(default=3, gt=0)
    warmup: int = Field(default=1, ge=0)
    together: int = Field(default=6, gt=0)  # drafters in memory at the same time


class HalvingConfig(StrictModel):
    """Successive halving: all trials are trained for a few steps, then fewer and fewer trials for more and more."""

    rungs: int = Field(ge=2)
    factor: int = Field(default=3, ge=2)  # a rung keeps 1 / factor of its trials, and the next has factor x the steps


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
    parallel: int = Field(default=1, gt=0)  # trials trained at the same time
    threads: int | None = Field(default=None, gt=0)  # CPU threads of a trial; None: an equal share of the cores
    devices: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES of each trial that runs at the same time
    score: ScoreConfig = ScoreConfig()
    timing: TimingConfig = TimingConfig()

    @field_validator("set", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        """Flatten sections, as `set.drafter.store=DIR` on the command line makes them; they override earlier keys."""
        return flat(given) if isinstance(given, dict) else given

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
            raise ValueError("halving needs all trials in advance, but tpe proposes one at a time: use random or grid")
        both = sorted(self.knobs.keys() & self.set.keys())
        if both:
            raise ValueError(f"{', '.join(both)} is in both set and knobs: remove one")
        if self.devices and len(self.devices) < self.parallel:
            raise ValueError(f"{self.parallel} parallel trials need as many devices, got {len(self.devices)}")
        return self


Values = dict[str, Any]
"""Key of the recipe -> value, for one trial."""


class Search(Protocol):
    """A strategy that proposes values and may learn from their scores."""

    until: int | None
    """The step at which the last proposed trial is scored; None: at the end of training."""

    def ask(self) -> Values | None:
        """The values of the next trial; None if there are no more, or none until others have scores."""

    def record(self, values: Values, score: float | None) -> None:
        """Report the score of a trial with these values (higher is better); None if it failed."""


class FixedSearch:
    """Proposes values from a fixed sequence, whatever their scores: a grid or random draws."""

    until: int | None = None

    def __init__(self, values: Iterable[Values]) -> None:
        self._values = iter(values)

    def ask(self) -> Values | None:
        return next(self._values, None)

    def record(self, values: Values, score: float | None) -> None:
        """Ignore the score: the sequence is fixed."""


class Halving:
    """Successive halving over a fixed sequence: a rung begins when all trials of the previous one have scores.

    Nothing depends on which trial ends first, so the result is the same however many run in parallel, and where.
    """

    def __init__(self, values: Iterable[Values], steps: int, config: HalvingConfig) -> None:
        """`steps` is the number in the last rung; each earlier rung has 1 / `factor` of the next rung's, rounded up."""
        self._left = [
            math.ceil(steps / config.factor**number) if number else None for number in reversed(range(config.rungs))
        ]
        self._factor = config.factor
        self._waiting = deque(values)
        self._members = list(self._waiting)
        self._scores: dict[str, float | None] = {}
        self.until = self._left.pop(0)

    def ask(self) -> Values | None:
        return self._waiting.popleft() if self._waiting else None

    def record(self, values: Values, score: float | None) -> None:
        """Keep the score; the last score of a rung begins the next rung."""
        self._scores[_key(values)] = score
        if len(self._scores) < len(self._members) or not self._left:
            return
        good = [(score, values) for values in self._members if (score := self._scores[_key(values)]) is not None]
        good.sort(key=lambda pair: -pair[0])  # ties stay in the order of the sequence
        kept = math.ceil(len(self._members) / self._factor)
        self._members = [values for _, values in good[:kept]]
        self._waiting.extend(self._members)
        self._scores = {}
        self.until = self._left.pop(0)


def grid(knobs: Mapping[str, Knob]) -> Iterator[Values]:
    """All combinations of the knobs' values; the last knob varies fastest."""
    for chosen in product(*(knob.values or () for knob in knobs.values())):
        yield dict(zip(knobs, chosen, strict=True))


def draws(knobs: Mapping[str, Knob], trials: int, seed: int) -> Iterator[Values]:
    """`trials` distinct random combinations, or fewer if there aren't that many; the same for the same seed."""
    seen: set[str] = set()
    for attempt in range(trials * 100):
        source = random.Random(f"{seed}/{attempt}")
        values = {name: draw(knob, source) for name, knob in knobs.items()}
        key = json.dumps(values, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield values
        if len(seen) == trials:
            return


def draw(knob: Knob, source: random.Random) -> Any:
    """A random value of the knob: uniform over its list or range, or over the logarithm of its range."""
    if knob.values is not None:
        return source.choice(knob.values)
    low, high = knob.bounds
    if knob.log:
        value = min(max(math.exp(source.uniform(math.log(low), math.log(high))), low), high)
        return round(value) if knob.whole else value
    return source.randint(int(low), int(high)) if knob.whole else source.uniform(low, high)


def _key(values: Values) -> str:
    return json.dumps(values, sort_keys=True)


class Tpe:
    """Bayesian optimization with Optuna's TPE sampler."""

    until: int | None = None

    def __init__(
        self, config: SweepConfig, history: Iterable[tuple[Values, float]] = (), pending: Iterable[Values] = ()
    ) -> None:
        """`history` are the values and scores of finished trials, `pending` the values of unfinished ones.

        Raises UsageError if Optuna isn't installed.
        """
        try:
            import optuna
        except ImportError:
            raise UsageError("search tpe needs Optuna: pip install 'eyas[train]', or use search random") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._knobs = config.knobs
        self._spaces = {name: self._space(knob) for name, knob in config.knobs.items()}
        done = list(history)
        pending = list(pending)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                # the seed changes when a sweep is resumed; otherwise the sampler would repeat its first draws
                seed=config.seed + len(done) + len(pending),
                multivariate=True,
                constant_liar=config.parallel > 1,
                n_startup_trials=max(4, min(10, (config.trials or 0) // 3)),
            )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        for values, score in done:
            self._study.add_trial(
                optuna.trial.create_trial(params=self._params(values), distributions=self._spaces, value=score)
            )
        for values in pending:
            self._study.enqueue_trial(self._params(values))
        self._left = (config.trials or 0) - len(done)
        self._running: dict[str, Any] = {}

    def ask(self) -> Values | None:
        if self._left <= 0:
            return None
        self._left -= 1
        trial = self._study.ask(self._spaces)
        values = {
            name: value if self._knobs[name].values is None else json.loads(value)
            for name, value in trial.params.items()
        }
        self._running.setdefault(_key(values), []).append(trial)
        return values

    def record(self, values: Values, score: float | None) -> None:
        trial = self._running[_key(values)].pop()
        if score is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, score)

    def _space(self, knob: Knob) -> Any:
        spaces = self._optuna.distributions
        if knob.values is not None:
            return spaces.CategoricalDistribution([json.dumps(value) for value in knob.values])
        kind = spaces.IntDistribution if knob.whole else spaces.FloatDistribution
        return kind(knob.low, knob.high, log=knob.log)

    def _params(self, values: Values) -> dict[str, Any]:
        return {n: v if self._knobs[n].values is None else json.dumps(v) for n, v in values.items()}
