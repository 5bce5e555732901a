"""A trial: two generations of a drafter serve side by side until it is clear whether the new one may stay.

Rows are assigned at random, so both meet the same traffic at the same time and a shift can't be mistaken for a
difference. The test before promotion has already shown the win on the same states; the trial only has to show that
nothing is lost live. So it is short: a clear difference ends it at any time, and after `ROWS` requests the new
generation stays unless it is behind beyond noise. The next cycle of learning waits for the verdict.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

ROWS = 32
"""Requests of the new generation after which a trial ends."""
_MIN_REQUESTS = 8
"""Minimum requests of each generation before any verdict."""
_PROMOTION_Z = 3.3
"""Standard errors that end a trial early: it is checked after every request, so more than for 0.99."""
_REJECTION_Z = 2.33
"""Standard errors behind at which a full trial ends in a reversion: a single check at 0.99."""

Verdict = Literal["settle", "revert"]


class CanaryReport(NamedTuple):
    """How a trial ended, with its figures."""

    verdict: Verdict
    reason: str


@dataclass
class Arm:
    """The drafted rounds of one generation: accept length = tokens / rounds, and its variance.

    Kept as sums over requests: a request's rounds aren't independent, requests are.
    """

    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of tokens^2, tokens * rounds, rounds^2

    def add(self, tokens: int, rounds: int) -> None:
        """Count a request that emitted `tokens` in its drafted `rounds`."""
        self.requests += 1
        self.tokens += tokens
        self.rounds += rounds
        more = (tokens * tokens, tokens * rounds, rounds * rounds)
        self._squares = tuple(a + b for a, b in zip(self._squares, more, strict=True))  # type: ignore[assignment]

    @property
    def accept_length(self) -> float:
        """Tokens per drafted round; 1 = nothing was accepted, or there was no round."""
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
    """Chooses each row's generation while two are compared, and reaches the verdict."""

    old: int
    new: int
    share: float = 0.1
    """The share of rows that the new generation gets."""
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
        """Count a finished request of one of the two; a request without drafted rounds doesn't count."""
        if self.report is not None or generation not in self.arms or not rounds:
            return
        self.arms[generation].add(tokens, rounds)
        old, new = self.arms[self.old], self.arms[self.new]
        if min(old.requests, new.requests) < _MIN_REQUESTS:
            return
        ahead = new.accept_length - old.accept_length
        noise = math.sqrt(old.variance + new.variance)
        if ahead > 0.0 and ahead >= _PROMOTION_Z * noise:
            self.report = CanaryReport("settle", f"{self._figures()}: ahead beyond noise")
        elif ahead < 0.0 and -ahead >= (_PROMOTION_Z if new.requests < ROWS else _REJECTION_Z) * noise:
            self.report = CanaryReport("revert", f"{self._figures()}: behind beyond noise")
        elif new.requests >= ROWS:
            self.report = CanaryReport("settle", f"{self._figures()}: not behind")

    def _figures(self) -> str:
        old, new = self.arms[self.old], self.arms[self.new]
        return (
            f"live accept length {new.accept_length:.3f} in {new.requests} requests, "
            f"{old.accept_length:.3f} in {old.requests} of generation {self.old}"
        )
