"""The choice between drafting and plain rounds: which shape rounds use, if any.

Drafting begins once the chosen shape would have saved as much time as starting it costs. This is the ski rental
problem: whatever happens next, the loss is at most twice that of the best decision in hindsight.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from eyas.engine.controller.arms import DraftArm
from eyas.engine.controller.planner import Prospect, Prospects
from eyas.engine.controller.records import ANSWER

_CHANGE_RECORDED = 1.05
"""The factor by which a shape must be faster than a recorded one to replace it."""
_RECORDING_MARGIN = 3.0
"""A shape is recorded once it would have saved this many times the recording's seconds, since forecasts may be high."""


class Choice:
    """The shape in use, and the one that may be used next."""

    def __init__(self, arm: DraftArm) -> None:
        self._arm = arm
        self.prospects: Prospects | None = None
        """The latest forecasts."""
        self.used: Prospect | None = None
        """The shape of the rounds; None = they are plain."""
        self.wanted: Prospect | None = None
        """A shape forecast to be faster than plain rounds, which wouldn't yet have saved the cost of starting it."""
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
        """The forecast tokens per second of the rounds in use."""
        if self.used is not None:
            return self.used.rate
        return 0.0 if self.prospects is None else self.prospects.plain_rate

    def renew(self, prospects: Prospects) -> None:
        """Choose again from new forecasts."""
        self.prospects = prospects
        self._choose(prospects, 1.0)

    def follow(self) -> None:
        """Begin or end drafting if the texts have changed so much since the forecasts were made."""
        prospects, drift = self.prospects, self._arm.texts.drift
        if prospects is None or not self._arm.drafts:
            return
        if self.rests == (prospects.best.drifted(drift, prospects.rows).rate > prospects.plain_rate):
            self._choose(prospects, drift)

    def _choose(self, prospects: Prospects, drift: float) -> None:
        """Choose among the shapes, of which `drift` times the forecast tokens are accepted."""
        recordings = self._arm.recordings
        best = prospects.best.drifted(drift, prospects.rows)
        if self.used is not None and recordings is not None:
            held = prospects.of(self.used.shape).drifted(drift, prospects.rows)
            best = held if best.rate < _CHANGE_RECORDED * held.rate else best
        used = best if self._arm.drafts and best.rate > prospects.plain_rate else None
        self._recording = 0.0
        if used is not None and recordings is not None:
            self._recording = recordings.cost(used, prospects)
            if self.used is not None and not recordings.affords(self._recording):
                used = prospects.of(self.used.shape).drifted(drift, prospects.rows)
        # one drafting shape may replace another at once, but from plain rounds it must first make up for its start
        self.wanted, self.used = (used, None) if self.used is None else (None, used)
        if self.wanted is None:
            self._missed = 0.0

    def restart(self) -> None:
        """Account for texts that are all new: speculation must make up for reading their prompts, too."""
        self.wanted, self.used = self.used or self.wanted, None
        self._missed = 0.0

    def reconsider(self, reading: float) -> None:
        """Account for texts that are all new: drafting goes on if their answers may save the `reading` of prompts."""
        if self.used is not None and reading > ANSWER * self._saved_by(self.used):
            self.restart()

    def begin(self, reading: Callable[[], float]) -> float:
        """Use the wanted shape if it would have saved its recording and the `reading` of deferred pairs, in seconds.

        In its first texts, what a drafter may save in the rest of an answer is enough. Returns after how many more
        rounds that will be the case; infinite if no shape is wanted.
        """
        if self.wanted is None or self.prospects is None:
            return math.inf
        missing = reading() + _RECORDING_MARGIN * self._recording - self._missed
        if not self._arm.texts.known:
            missing -= ANSWER * self.prospects.rows * self._arm.saved(self.prospects)
        if missing <= 0.0:
            self.used = self.wanted
            self.wanted = None
            return math.inf
        saved = self._saved_by(self.wanted)
        return missing / saved if saved > 0.0 else math.inf

    def wait(self, rows: int, copied: int) -> None:
        """Account for a round in which the wanted shape wasn't used, and in which `rows` rows accepted `copied` tokens.

        Where a copy is right, guesses beside it save nothing. So a small language model doesn't read a prompt for an
        answer that repeats it.
        """
        self._missed += self._saved_by(self.wanted) * max(0.0, 1.0 - copied / rows)

    def _saved_by(self, shape: Prospect | None) -> float:
        """Seconds that a shape saves in the time of a plain round; 0 without a shape."""
        if shape is None or self.prospects is None:
            return 0.0
        return self.prospects.plain_seconds - self.prospects.rows / shape.rate
