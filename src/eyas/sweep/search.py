"""Search strategies of a sweep: a grid, random draws, or Optuna's tree-structured Parzen estimator (TPE)."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Protocol

from eyas.errors import UsageError
from eyas.sweep.config import HalvingConfig, Knob, SweepConfig

Values = dict[str, Any]
"""Key of the recipe -> value, for one trial."""


class Search(Protocol):
    """A strategy that proposes values and may learn from their scores."""

    until: int | None
    """The step at which the trial asked for last is scored; None: when it is trained."""

    def ask(self) -> Values | None:
        """The values of the next trial; None if none is left, or none before others have scores."""

    def record(self, values: Values, score: float | None) -> None:
        """Report the score of a trial with these values, higher being better; None if it failed."""


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
    """Successive halving over a fixed sequence: a rung begins when all trials of the one before have scores.

    Nothing depends on which trial ends first, so the result is the same however many are trained at once, and wherever.
    """

    def __init__(self, values: Iterable[Values], steps: int, config: HalvingConfig) -> None:
        """`steps` of the last rung's trials; each earlier rung has a `factor`-th of the next one's, rounded up."""
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
        """Keep the score; the last one of a rung begins the next."""
        self._scores[_key(values)] = score
        if len(self._scores) < len(self._members) or not self._left:
            return
        good = [(score, values) for values in self._members if (score := self._scores[_key(values)]) is not None]
        good.sort(key=lambda pair: -pair[0])  # equals in the order of the sequence
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
    """`trials` distinct random combinations, or fewer if there aren't as many; the same for the same seed."""
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
    """Bayesian optimisation with Optuna's TPE sampler."""

    until: int | None = None

    def __init__(
        self,
        config: SweepConfig,
        history: Iterable[tuple[Values, float]] = (),
        pending: Iterable[Values] = (),
    ) -> None:
        """`history` are the values and scores of finished trials, `pending` the values of unfinished ones.

        Raises UsageError if Optuna isn't installed.
        """
        try:
            import optuna
        except ImportError:
            raise UsageError("search tpe needs Optuna: pip install 'eyas[train]', or use search random") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._knobs = optuna, config.knobs
        self._spaces = {name: self._space(knob) for name, knob in config.knobs.items()}
        done, pending = list(history), list(pending)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                # the seed changes when a sweep is resumed, or the sampler would repeat its first draws
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
