"""Decides which rounds search earlier text for copies to propose."""

from __future__ import annotations

from collections import defaultdict

from eyas.engine.controller.budget import Budget
from eyas.engine.controller.records import RoundRecord

_BUDGET = 0.01
"""The share of all time that searches may take while they don't pay."""
_FADE = 1.0 - 1.0 / 16.0
"""The factor by which running means decay with each search. Short, because copied passages last only some rounds."""
_FIRST_GAIN = 2.0
"""The assumed gain of the first search, as a multiple of its cost: a few failed searches then don't stop all others."""


class CopySearch:
    """Decides which rounds look for copies: all while that pays, otherwise a few, within a share of all time.

    This is only about the host time of the search. Whether a copy is verified depends on the values of its nodes, which
    are learned from every copy found.
    """

    def __init__(self) -> None:
        self._budget = Budget(_BUDGET)
        self._gain: float | None = None
        """Running mean of the seconds that a search saves; None = there was no search yet."""
        self._cost = 0.0
        """Running mean of the seconds that a search takes."""
        self.looking = True
        """Whether the next round looks for copies."""

    @property
    def pays(self) -> bool:
        """Whether searches save at least the time that they take."""
        return self._gain is None or self._gain >= self._cost

    @property
    def seconds(self) -> float:
        """Seconds that searching adds to a network's draft; 0 while only few rounds search."""
        return self._cost if self.pays else 0.0

    def account(self, record: RoundRecord, copied: int, added: float, rate: float, beyond: float) -> None:
        """Account for a round of any kind; the rounds in use, plain or not, make `rate` tokens per second.

        `copied`: accepted tokens that no network guessed; `added`: seconds that copies' nodes added to the pass;
        `beyond`: seconds that a round that only looks up takes beyond what is measured.
        """
        self._budget.earn(record.whole)
        if record.spec is not None and (record.spec.found_only or record.lookup_seconds):
            cost = record.draft_seconds + beyond if record.spec.found_only else record.lookup_seconds
            if self._gain is None:
                self._gain = _FIRST_GAIN * cost
                self._cost = cost
            elif not self.pays:
                self._budget.spend(self._cost)
            self._gain = self._gain * _FADE + (1.0 - _FADE) * (copied / rate - added)
            self._cost = self._cost * _FADE + (1.0 - _FADE) * cost
        self.looking = self.pays or self._budget.affords(self._cost)


class CopySearches:
    """The decisions for batches of 1, 2 to 3, 4 to 7 rows and so on, as for costs.

    Where several rows' passes take time in proportion to their tokens, the same copies may save nothing that save most
    of the time of a row alone.
    """

    def __init__(self) -> None:
        self._by_size: defaultdict[int, CopySearch] = defaultdict(CopySearch)

    def of(self, rows: int) -> CopySearch:
        """The decision for a batch of so many rows."""
        return self._by_size[rows.bit_length()]
