"""The choice between drafting and plain rounds: which shape rounds use, if any.

It changes only for a clear gain, and a shape is used once it would have made up for what its beginning costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from eyas.engine.controller.arms import DraftArm
from eyas.engine.controller.planner import BEGIN, Prospect, Prospects

_CONTINUE = 1.015
"""The speedup that speculation must promise to continue."""
_CHANGE, _CHANGE_RECORDED = 1.01, 1.05
"""The factor by which a shape must be faster than the one in use to replace it; the same where shapes are recorded."""
_DOUBT = 3.0
"""A shape is recorded once it would have saved this many times the recording's seconds: forecasts may be too high."""
_DRIFT = 1.25
"""The factor by which the texts' yield must change for a new plan, unless less decides whether to speculate."""


class Choice:
    """The shape in use, and the one that is about to be."""

    def __init__(self, arm: DraftArm) -> None:
        self._arm = arm
        self.prospects: Prospects | None = None
        """The latest forecasts."""
        self.used: Prospect | None = None
        """The shape of the rounds; None = they are plain."""
        self._best: Prospect | None = None
        """The shape that decides whether to speculate. It is in use, unless a shorter one is used in hope."""
        self.wanted: Prospect | None = None
        """A shape that promises more than plain rounds, but hasn't yet made up for reading the deferred pairs."""
        self._missed = 0.0
        """Seconds that `wanted` would have saved so far."""
        self._recording = 0.0
        """Seconds that it takes to record the wanted shape."""

    @property
    def rests(self) -> bool:
        """Whether no shape is used or wanted."""
        return self.used is None and self.wanted is None

    @property
    def rate(self) -> float:
        """The tokens per second that rounds promise as they are."""
        if self.used is not None:
            return self.used.rate
        return 0.0 if self.prospects is None else self.prospects.plain_rate

    @property
    def speedup(self) -> float | None:
        """What speculation promises; None = rounds are plain."""
        if self.used is None or self.prospects is None:
            return None
        return self.used.rate / self.prospects.plain_rate

    def _least(self, doubt: float) -> float:
        """The multiple of the plain rounds' rate that a plan must promise, with `doubt` about the costs to begin."""
        return _CONTINUE if self.used is not None else BEGIN + doubt

    def renew(self, prospects: Prospects, doubt: float) -> None:
        """Choose again, by new forecasts."""
        arm, recordings = self._arm, self._arm.recordings
        best, least = prospects.best, prospects.plain_rate * self._least(doubt)
        if self.used is not None and self._best is not None:
            held = prospects.of(self._best.shape)
            change = _CHANGE if recordings is None else _CHANGE_RECORDED
            best = held if best.rate < change * held.rate else best
        used: Prospect | None = None
        if arm.drafts and best.rate_if(arm.texts.hope, prospects.rows) >= least:
            used = best if best.rate >= least else prospects.short(best.shape)  # in hope
        self._recording = 0.0
        if used is not None and recordings is not None:
            self._recording = recordings.cost(used, prospects)
            if self.used is not None and not recordings.affords(self._recording):
                used = prospects.of(self.used.shape)
            elif self._recording and used.rate < least:  # nothing is recorded in hope
                used = None
        self.wanted, self.used = (used, None) if self.used is None else (None, used)
        self._best, self.prospects = best, prospects
        if self.wanted is None:
            self._missed = 0.0

    def overtaken(self, rows: int, doubt: float) -> bool:
        """Whether the texts' yield has changed so much that the choice may have to change."""
        if self.prospects is None or self._best is None:
            return True
        texts = self._arm.texts
        drift = texts.drift
        if not 1.0 / _DRIFT < drift < _DRIFT:
            return True
        rate = self._best.rate_if(drift * texts.hope, rows)
        return self._arm.drafts and self.rests == (rate >= self._least(doubt) * self.prospects.plain_rate)

    def begin(self, rows: int, reading: Callable[[], float]) -> float:
        """Use the wanted shape if it has made up for its recording and the `reading` of deferred pairs, in seconds.

        Returns after how many rounds that will be so; infinite if none is wanted.
        """
        if self.wanted is None:
            return math.inf
        missing = reading() + _DOUBT * self._recording - self._missed
        if missing <= 0.0:
            self.used, self.wanted = self.wanted, None
            return math.inf
        saved = self._saved(rows)
        return missing / saved if saved > 0.0 else math.inf

    def wait(self, rows: int) -> None:
        """Account for a round of `rows` rows that the wanted shape wasn't used in."""
        self._missed += self._saved(rows)

    def _saved(self, rows: int) -> float:
        """Seconds that the wanted shape would save in each round of `rows` rows; 0 = none is wanted."""
        if self.wanted is None or self.prospects is None:
            return 0.0
        return self.prospects.plain_seconds - rows / self.wanted.rate_if(self._arm.texts.hope, rows)
