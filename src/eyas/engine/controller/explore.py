"""Rounds spent on other shapes, to learn what the shape in use can't show, within an allowance of time lost.

While speculating there are two kinds: a plain round, which keeps the price of plain decoding right, and a round of a
shape that is larger in one direction. While not speculating: two rounds of a large shape, the first of which reads all
that the drafter had deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.planner import Prospect, Prospects

_FOR_PLAIN, _FOR_LARGER, _FOR_SPECULATING = 0.002, 0.003, 0.003
_LEAST = 0.02
"""A probe is taken to lose at least this part of its time, whatever the models say."""
_ON_TRIAL = (3, 4, 9, 20, 45)
"""Speculating rounds after which a plain one is due whatever it loses: is plain decoding as slow as it was measured?"""
_DIRECTIONS = ({"deeper": 2}, {"wider": 1, "deeper": 1}, {"lower": 3})


class Probe(NamedTuple):
    """Rounds of another shape."""

    prospect: Prospect | None
    """None = plain."""
    rounds: int
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
        self._credit -= max(cost, 0.0)


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
        doubtful = self._speculated in _ON_TRIAL
        if doubtful or self._plain.affords(max(prospects.plain_seconds - rows / choice.rate, least)):
            return Probe(None, 1, self._plain)
        larger = prospects.larger(choice.shape, **_DIRECTIONS[self._direction])
        if self._larger.affords(max(larger.seconds - (rows + larger.accepted) / choice.rate, least)):
            self._direction = (self._direction + 1) % len(_DIRECTIONS)
            return Probe(larger, 1, self._larger)
        return None

    def instead_of_plain(
        self, prospects: Prospects, costs: CostModel, rows: int, lengths: Sequence[int], deferred: int
    ) -> Probe | None:
        """A probe of speculation, if reading what `deferred` rounds left unread is affordable too."""
        best = prospects.best()
        larger = prospects.larger(best.shape, wider=1, deeper=1, lower=2)
        waiting = sum(min(length, deferred) for length in lengths)
        loss = 2 * (larger.seconds - (rows + larger.accepted) / prospects.plain_rate)
        loss = max(loss, _LEAST * larger.seconds) + float(costs.observe_seconds(waiting))
        return Probe(larger, 2, self._speculating) if self._speculating.affords(loss) else None
