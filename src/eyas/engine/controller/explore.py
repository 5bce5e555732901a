"""Exploration: probes, which are rounds spent on learning, within budgets of lost time.

While drafting, plain rounds keep the cost of plain decoding current, and rounds of a larger shape measure the values of
its nodes. While rounds are plain, a *trial* with a short chain shows whether the drafter guesses these texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from eyas.engine.controller.budget import Budget
from eyas.engine.controller.costs import SETTLING
from eyas.engine.controller.planner import Prospect, Prospects
from eyas.engine.controller.records import ANSWER
from eyas.tree import TreeSpec

_PROBE_BUDGET = 0.005
"""The share of all time that probes while drafting may lose."""
_TRIAL_BUDGET = 0.01
"""The share of all time that trials while not drafting may lose."""
_LEAST = 0.02
"""The least share of its time that a probe is assumed to lose, whatever the models predict."""
_LARGER = ({"deeper": 2}, {"wider": 1, "deeper": 1}, {"lower": 3})
_STRETCH = 0.03
"""Seconds of rounds that are planned, and learned from, together. It keeps this work below 0.2% of the time: Python is
slow right after a pass, whose weights fill the CPU caches."""


class Probe(NamedTuple):
    """Consecutive rounds that are spent on learning."""

    prospect: Prospect | None
    """The shape and its forecast; None = plain rounds."""
    rounds: int
    """The remaining rounds; of plain ones, those that are expected."""
    least: float = 0.0
    """The minimum seconds charged for a round, so that a lucky one doesn't lead straight to the next probe."""


class Explorer:
    """Proposes probes within the budget."""

    def __init__(self, trial_rounds: int = 1) -> None:
        """`trial_rounds`: the rounds of a trial; more than one for drafts that take several rounds to fill in."""
        self._trial_rounds = trial_rounds
        # the first ones are free, since nothing is known before them
        self.probes = Budget(_PROBE_BUDGET, math.inf)
        self.trials = Budget(_TRIAL_BUDGET, math.inf)
        self._turn = 0
        """Probes while drafting so far: every other one is plain."""
        self._since = math.inf
        """Seconds since the texts were found not to be worth a trial."""

    def earn(self, seconds: float) -> None:
        """Account for a round of any kind."""
        self.probes.earn(seconds)
        self.trials.earn(seconds)
        self._since += seconds

    def renew(self) -> None:
        """Account for a text that has just begun."""
        self._since = math.inf

    def ahead(self, planned: TreeSpec | None, seconds: float, left: float) -> int:
        """How many more rounds of `seconds` may reuse `planned`; `left` is the longest row's room in tokens."""
        more = int(_STRETCH / seconds)
        if planned is None:
            return more
        # not with candidates, which are kept to be analyzed once in a while, nor near the context's end, where trees
        # are cut: a round emits at most depth + 1 tokens
        return 0 if planned.keeps_candidates or left < (1 + more) * (planned.depth + 2) else more

    def while_drafting(self, prospects: Prospects, used: Prospect, analysis: float) -> Probe | None:
        """A probe that the budget allows, if any; one of a larger shape also costs the `analysis` of candidates."""
        least = _LEAST * used.seconds
        plain = self._turn % 2 == 0
        which = self._turn // 2
        if plain or self._trial_rounds > 1:
            rounds = 1 + math.ceil(SETTLING / prospects.plain_seconds)  # the last one counts
            loss = rounds * (prospects.plain_seconds - prospects.rows / used.rate) + prospects.catching_up
            probe = Probe(None, rounds, prospects.catching_up / rounds)
        else:
            larger = prospects.larger(used.shape, **_LARGER[which % len(_LARGER)])
            loss = larger.seconds - (prospects.rows + larger.accepted) / used.rate + analysis
            probe = Probe(larger, 1, least + analysis)
        if not self.probes.affords(max(loss, least)):
            return None
        self._turn += 1
        return probe

    def while_plain(
        self, prospects: Prospects, saved: Callable[[], float], reading: Callable[[], float], *, known: bool
    ) -> Probe | None:
        """A trial of the texts if the expected value of its result exceeds its cost.

        Drafts may save some time in each of the remaining tokens, or they aren't used and save none. The mean, which
        `saved` gives in seconds, is the value of information (Howard, "Information value theory", 1966). The cost
        includes the `reading` of deferred pairs, in seconds. The first texts, about which nothing is `known`, are tried
        outside the budget.
        """
        if self._since < _STRETCH:  # rounds that look for copies are planned one by one, which is too often for this
            return None
        self._since = 0.0
        tried = prospects.trial
        loss = max(tried.seconds - prospects.plain_seconds, _LEAST * prospects.plain_seconds) * self._trial_rounds
        loss += reading()
        if (known and not self.trials.affords(loss)) or ANSWER * prospects.rows * saved() <= loss:
            return None
        self._since = math.inf  # what this trial shows decides about the next
        return Probe(tried, self._trial_rounds)
