"""Rounds spent on other shapes, to learn what the shape in use can't show, within an allowance of time lost.

While speculating there are two kinds: a plain round, which keeps the price of plain decoding right, and a round of a
shape that is larger in one direction. While not speculating: two rounds of a large shape, the first of which reads all
that the drafter had deferred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.planner import Prospect, Prospects

_FOR_PLAIN, _FOR_LARGER, _FOR_SPECULATING = 0.002, 0.003, 0.003
_LEAST, _LEAST_LARGER = 0.02, 0.05
"""A probe is taken to lose at least this part of its time, whatever the models say."""
_ON_TRIAL = {3: math.inf, 6: 1.5, 12: 1.3, 24: 1.2, 48: 1.1}
"""Speculating rounds after which a plain one is due whatever it loses, if speculation promises less than so many times
plain decoding: is that as slow as it was measured? The larger the promise, the less that is worth asking twice."""
_DIRECTIONS = ({"deeper": 2}, {"wider": 1, "deeper": 1}, {"lower": 3})


class Probe(NamedTuple):
    """Rounds of another shape."""

    prospect: Prospect | None
    """None = plain."""
    rounds: int
    least: float
    """Seconds that a round of it is taken to lose at the least: luck is not to call for another at once."""
    allowance: Allowance


class Allowance:
    """Seconds that may be lost: a share of all time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 0.0

    def earn(self, seconds: float) -> None:
        """Time went by."""
        self._credit += self._share * seconds

    def affords(self, cost: float) -> bool:
        """Is there enough? What is saved beyond twice the cost is forgotten: no spree follows a quiet time."""
        self._credit = min(self._credit, 2.0 * cost)
        return self._credit >= cost

    def spend(self, cost: float) -> None:
        """Seconds were lost."""
        self._credit -= cost


class Explorer:
    """Proposes probes and keeps their accounts."""

    def __init__(self) -> None:
        self._plain, self._larger = Allowance(_FOR_PLAIN), Allowance(_FOR_LARGER)
        self._speculating = Allowance(_FOR_SPECULATING)
        self._direction = 0
        self._speculated = 0

    def earn(self, seconds: float, speculating: bool) -> None:
        """A round went by."""
        self._speculated += speculating
        for allowance in (self._plain, self._larger) if speculating else (self._speculating,):
            allowance.earn(seconds)

    def beside(self, prospects: Prospects, choice: Prospect, rows: int) -> Probe | None:
        """A probe beside a shape in use, if one is affordable."""
        least = _LEAST * choice.seconds
        doubtful = choice.rate < prospects.plain_rate * _ON_TRIAL.get(self._speculated, 0.0)
        if doubtful or self._plain.affords(max(prospects.plain_seconds - rows / choice.rate, least)):
            return Probe(None, 1, 0.0, self._plain)
        larger = prospects.larger(choice.shape, **_DIRECTIONS[self._direction])
        least = _LEAST_LARGER * choice.seconds
        if self._larger.affords(max(larger.seconds - (rows + larger.accepted) / choice.rate, least)):
            self._direction = (self._direction + 1) % len(_DIRECTIONS)
            return Probe(larger, 1, least, self._larger)
        return None

    def instead_of_plain(
        self, prospects: Prospects, costs: CostModel, rows: int, lengths: Sequence[int], deferred: int
    ) -> Probe | None:
        """A probe of speculation, if reading what `deferred` rounds left unread is affordable too."""
        best = prospects.best()
        larger = prospects.larger(best.shape, wider=1, deeper=1, lower=2)
        waiting = sum(min(length, deferred) for length in lengths)
        loss = 2 * (larger.seconds - (rows + larger.accepted) / prospects.plain_rate)
        loss = max(loss, _LEAST * larger.seconds) + float(costs.observe_seconds(waiting, rows))
        return Probe(larger, 2, 0.0, self._speculating) if self._speculating.affords(loss) else None
