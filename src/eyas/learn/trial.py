"""A trial: two generations of a drafter serve side by side until it is clear whether the new one may stay.

Rows are assigned at random, so both meet the same traffic at the same time and a shift can't be mistaken for a
difference. The test before promotion has shown the win on the same states; what is left to show is that nothing is
lost live. So a trial is short: a clear difference ends it at any time, and after `ROWS` requests the new generation
stays unless it is behind beyond noise. The next cycle of learning waits for that.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

ROWS = 32
"""Requests of the new generation after which a trial ends."""
_LEAST = 8
"""Requests of both before anything is said."""
_SURE = 3.3
"""Standard errors that settle a trial at once: it is looked at after every request, so more than for 0.99."""
_BEHIND = 2.33
"""Standard errors behind with which a trial ends in a reversion: one look, 0.99."""

Verdict = Literal["settle", "revert"]


class CanaryReport(NamedTuple):
    """How a trial ended, with its figures."""

    verdict: Verdict
    reason: str


@dataclass
class Arm:
    """The drafted rounds of one generation: accept length = tokens / rounds, and how sure that is.

    Kept as sums over requests: a request's rounds aren't independent, requests are.
    """

    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of tokens^2, tokens * rounds, rounds^2

    def add(self, tokens: int, rounds: int) -> None:
        """Count a request that emitted `tokens` in its drafted `rounds`."""
        self.requests, self.tokens, self.rounds = self.requests + 1, self.tokens + tokens, self.rounds + rounds
        more = (tokens * tokens, tokens * rounds, rounds * rounds)
        self._squares = tuple(a + b for a, b in zip(self._squares, more, strict=True))  # type: ignore[assignment]

    @property
    def accept_length(self) -> float:
        """Tokens of a drafted round; 1 = nothing was accepted, or nothing is known."""
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def variance(self) -> float:
        """The variance of `accept_length`, as of a ratio of sums over requests (the delta method)."""
        if not self.rounds or self.requests < 2:
            return math.inf
        tokens, both, rounds = self._squares
        ratio = self.accept_length
        squares = max(0.0, tokens - 2 * ratio * both + ratio * ratio * rounds)
        return squares * self.requests / (self.requests - 1) / self.rounds**2


@dataclass
class Canary:
    """Which generation each row gets while two are compared, and the verdict once there is one."""

    old: int
    new: int
    share: float = 0.1
    """Of rows that the new one gets."""
    seed: int = 0
    arms: dict[int, Arm] = field(default_factory=dict)
    report: CanaryReport | None = None

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.arms = {self.old: Arm(), self.new: Arm()}

    @property
    def generations(self) -> tuple[int, int]:
        """The one in service, and the new one."""
        return self.old, self.new

    def choose(self) -> int:
        """The generation of a row that begins."""
        if self.report is not None:
            return self.new if self.report.verdict == "settle" else self.old
        return self.new if self._random.random() < self.share else self.old

    def finished(self, generation: int, tokens: int, rounds: int) -> None:
        """A request of one of the two has ended; one without a drafted round says nothing."""
        if self.report is not None or generation not in self.arms or not rounds:
            return
        self.arms[generation].add(tokens, rounds)
        old, new = self.arms[self.old], self.arms[self.new]
        if min(old.requests, new.requests) < _LEAST:
            return
        ahead, noise = new.accept_length - old.accept_length, math.sqrt(old.variance + new.variance)
        if ahead > 0.0 and ahead >= _SURE * noise:
            self.report = CanaryReport("settle", f"{self._figures()}: ahead beyond noise")
        elif ahead < 0.0 and -ahead >= (_SURE if new.requests < ROWS else _BEHIND) * noise:
            self.report = CanaryReport("revert", f"{self._figures()}: behind beyond noise")
        elif new.requests >= ROWS:
            self.report = CanaryReport("settle", f"{self._figures()}: not behind")

    def _figures(self) -> str:
        old, new = self.arms[self.old], self.arms[self.new]
        return (
            f"live accept length {new.accept_length:.3f} in {new.requests} requests, "
            f"{old.accept_length:.3f} in {old.requests} of generation {self.old}"
        )
