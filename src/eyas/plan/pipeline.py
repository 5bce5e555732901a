"""How long the steps from chats to a measured drafter take: a rough estimate before they run.

Every step's work is counted in passes of the target and of the drafter, at this machine's speed. Loading models and
reading chats are a constant for each step. While the steps run, the time that they took corrects the estimate of those
that are left (`Outlook`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from eyas.plan.costs import ModelSize, Workload
    from eyas.plan.devices import Machine

LOADING_SECONDS = 30.0
"""Seconds to start a step: imports, loading the target, reading files."""
CHATS_AT_ONCE = 64
"""Chats that are answered together."""
ASSUMED_LENGTH = 400
"""Tokens of a chat, before the chats are counted."""
DISTINCT_TOKENS_FACTOR = 15
"""Different tokens among N answer tokens, divided by the square root of N."""
VALIDATIONS = 5
"""Validations of a training run with `loop.validate_every: auto`."""


class Measuring(NamedTuple):
    """How much is decoded to measure checkpoints, trees and methods."""

    prompts: int
    tokens: int
    """Maximum tokens per answer."""
    repeats: int
    checkpoints: int = 4
    trees: int = 5
    methods: int = 9
    """Plain decoding, and four methods with two trees each."""


class Validating(NamedTuple):
    """What a validation decodes."""

    prompts: int
    tokens: int


def seconds_of_steps(
    size: ModelSize, work: Workload, taps: int, machine: Machine, measuring: Measuring, validating: Validating
) -> dict[str, float]:
    """Step -> seconds. Decoding is counted as plain decoding: a drafter shortens it."""
    from eyas.plan.costs import capture_hours, plain_speed, regeneration_hours
    from eyas.plan.drafters import Eagle3Plan

    speed = plain_speed(size, machine)
    run = measuring.prompts * measuring.tokens * measuring.repeats / speed
    validations = VALIDATIONS * (LOADING_SECONDS / 10 + validating.prompts * validating.tokens / speed)
    return {
        "data prepare": LOADING_SECONDS,
        "data regenerate": LOADING_SECONDS + 3600 * regeneration_hours(size, work, machine, 1, CHATS_AT_ONCE),
        "data capture": LOADING_SECONDS + 3600 * capture_hours(size, work, machine, 1),
        "train": LOADING_SECONDS + 3600 * Eagle3Plan(size, taps, work).training_hours(machine, 1) + validations,
        "bench checkpoints": LOADING_SECONDS + run * (measuring.checkpoints + 1 + measuring.trees),
        "bench methods": LOADING_SECONDS + run * measuring.methods,
        "bench report": LOADING_SECONDS / 3,
    }


MEASURED = ("bench checkpoints", "bench methods")
"""Steps that take whatever share of a budget is left for them, and at least a minute."""
MIN_CHATS = 64
"""Fewer chats teach a drafter nothing, whatever the budget."""
_MANY = 1000
"""Chats from whose time, and that of `MIN_CHATS`, the time of each is estimated: recipes may fix that of training."""
MEASURED_SHARE = 0.3
"""The share of a budget that goes to measuring."""


def distinct_tokens(answers: int, vocab: int) -> int:
    """How many different tokens occur in so many answer tokens, which is what an `auto` draft vocabulary holds."""
    return max(1, min(32_000, vocab, round(DISTINCT_TOKENS_FACTOR * sqrt(answers))))


def chats_within(minutes: float, seconds: Callable[[int], Mapping[str, float]]) -> int:
    """The number of chats, at least `MIN_CHATS`, whose steps fit a budget; `seconds` are those of so many chats."""
    few, many = (sum(took for name, took in seconds(n).items() if name not in MEASURED) for n in (MIN_CHATS, _MANY))
    each = (many - few) / (_MANY - MIN_CHATS)
    return MIN_CHATS + max(0, int((60 * minutes * (1 - MEASURED_SHARE) - few) / each))


@dataclass
class Outlook:
    """The estimate of all steps, corrected by the time that finished ones took."""

    seconds: Mapping[str, float]
    minutes: float | None = None
    """The budget, if there is one."""
    took: dict[str, float] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """How much longer than estimated steps have taken so far, those that were too short to tell left out."""
        done = {name: took for name, took in self.took.items() if self.seconds.get(name, 0.0) > LOADING_SECONDS}
        return sum(done.values()) / sum(self.seconds[name] for name in done) if done else 1.0

    def left(self, names: list[str]) -> float:
        """Seconds that these steps are expected to take."""
        return sum(self._expected(name) for name in names)

    def _expected(self, name: str) -> float:
        expected = self.factor * self.seconds.get(name, 0.0)
        if self.minutes is None or name not in MEASURED:
            return expected
        return min(expected, 60 * max(1.0, self.minutes * MEASURED_SHARE / len(MEASURED)))
