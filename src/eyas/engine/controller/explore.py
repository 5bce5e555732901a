"""Exploration: probes, rounds of other shapes than the one in use, within an allowance of lost time.

While speculating there are three kinds: a plain round, which keeps the price of plain decoding right; a draft that is
larger than the one in use, of which as ever only what pays is verified (on a CPU, and cheap); and a round that verifies
more. While not speculating: a draft of which only what pays is verified, so mostly nothing; and two rounds of a large
shape. Both begin with reading all that the drafter had deferred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from eyas.engine.controller.costs import CostModel
from eyas.engine.controller.planner import Prospect, Prospects

_FOR_PLAIN, _FOR_DRAFTS, _FOR_LARGER = 0.002, 0.005, 0.003
_FOR_DRAFTING, _FOR_SPECULATING = 0.003, 0.0015
_LEAST, _LEAST_DRAFT, _LEAST_LARGER = 0.02, 0.01, 0.05
"""The least share of its time that a probe is taken to lose, whatever the models say."""
_ON_TRIAL = {3: math.inf, 6: 1.5, 12: 1.3, 24: 1.2, 48: 1.1}
"""Speculating rounds after which a plain one is due whatever it loses, if speculation promises less than so many times
plain decoding: is that as slow as it was measured? The larger the promise, the less that is worth asking twice."""
_SECOND_THOUGHTS = (8, 24)
"""Plain rounds in a row after which a draft is looked at on credit: answers begin with words that nobody guesses."""
_DRAFTS = ({"deeper": 2}, {"wider": 1, "deeper": 1})
_LOWER = {"lower": 3}


class Probe(NamedTuple):
    """A few rounds of another shape, spent on learning."""

    prospect: Prospect | None
    """The shape's promise; None = plain rounds."""
    rounds: int
    least: float
    """Seconds that a round of it is taken to lose at the least: luck is not to call for another at once."""
    allowance: Allowance
    chooses: bool = False
    """Whether only nodes that pay are verified; a round then counts as a loss of `least`, whatever comes of it."""


class Allowance:
    """A budget of seconds that may be lost: a share of all time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit = 0.0

    def earn(self, seconds: float) -> None:
        """Add the share of `seconds` that went by."""
        self._credit += self._share * seconds

    def affords(self, cost: float) -> bool:
        """Whether `cost` seconds may be lost now. Savings beyond twice that are dropped: no spree follows a lull."""
        self._credit = min(self._credit, 2.0 * cost)
        return self._credit >= cost

    def spend(self, cost: float) -> None:
        """Take `cost` lost seconds from the budget."""
        self._credit -= cost


class Explorer:
    """Proposes probes, and keeps the budget of each kind."""

    def __init__(self) -> None:
        self._plain, self._drafts = Allowance(_FOR_PLAIN), Allowance(_FOR_DRAFTS)
        self._larger = Allowance(_FOR_LARGER)
        self._drafting, self._speculating = Allowance(_FOR_DRAFTING), Allowance(_FOR_SPECULATING)
        self._draft = self._direction = 0
        self._speculated = self._rested = 0

    def earn(self, seconds: float, speculating: bool) -> None:
        """Account for a round of `seconds`, with or without speculation."""
        self._speculated += speculating
        self._rested = 0 if speculating else self._rested + 1
        beside, instead = (self._plain, self._drafts, self._larger), (self._drafting, self._speculating)
        for allowance in beside if speculating else instead:
            allowance.earn(seconds)

    def beside(self, prospects: Prospects, choice: Prospect, rows: int, chooses: bool) -> Probe | None:
        """A probe beside a shape in use, if one is affordable; `chooses`: do rounds choose what they verify?"""
        least = _LEAST * choice.seconds
        doubtful = choice.rate < prospects.plain_rate * _ON_TRIAL.get(self._speculated, 0.0)
        if doubtful or self._plain.affords(max(prospects.plain_seconds - rows / choice.rate, least)):
            return Probe(None, 1, 0.0, self._plain)
        if chooses:
            larger = prospects.larger(choice.shape, **_DRAFTS[self._draft])
            loss = max(larger.drafting - choice.drafting, _LEAST_DRAFT * choice.seconds)
            if self._drafts.affords(loss):
                self._draft = (self._draft + 1) % len(_DRAFTS)
                return Probe(larger, 1, loss, self._drafts, chooses=True)
        directions = (_LOWER,) if chooses else (*_DRAFTS, _LOWER)
        larger = prospects.larger(choice.shape, **directions[self._direction % len(directions)])
        least = _LEAST_LARGER * choice.seconds
        if self._larger.affords(max(larger.seconds - (rows + larger.accepted) / choice.rate, least)):
            self._direction += 1
            return Probe(larger, 1, least, self._larger)
        return None

    def instead_of_plain(
        self, prospects: Prospects, costs: CostModel, rows: int, lengths: Sequence[int], deferred: int, chooses: bool
    ) -> Probe | None:
        """A probe of speculation, if reading what `deferred` rounds left unread is affordable too."""
        best = prospects.best()
        waiting = sum(min(length, deferred) for length in lengths)
        reading = float(costs.observe_seconds(waiting, rows))
        if chooses:
            deeper = prospects.larger(best.shape, deeper=1)
            loss = max(deeper.drafting, _LEAST_DRAFT * prospects.plain_seconds) + reading
            if self._drafting.affords(loss) or self._rested in _SECOND_THOUGHTS:
                return Probe(deeper, 1, loss, self._drafting, chooses=True)
        larger = prospects.larger(best.shape, wider=1, deeper=1, lower=2)
        loss = 2 * (larger.seconds - (rows + larger.accepted) / prospects.plain_rate)
        loss = max(loss, _LEAST * larger.seconds) + reading
        return Probe(larger, 2, 0.0, self._speculating) if self._speculating.affords(loss) else None
