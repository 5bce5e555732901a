"""The doctor's verdict, from teacher forcing alone.

A drafter that nobody trained, or that was trained for another target, doesn't understand the target's states: shown
those of other positions it drafts as well, or it is right less often than one who always guesses the commonest token.
That is looked at under the best reading there is. The matrices then tell the two apart, as far as that can be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eyas.doctor.judge import LEAST_FROM_TAPS, Gain, gain
from eyas.doctor.measure import Measured, measure
from eyas.doctor.reading import Reading
from eyas.doctor.search import Found, Progress, Search
from eyas.doctor.transcript import Transcript
from eyas.doctor.weights import DRAWN, unevenness
from eyas.target import Target

Verdict = Literal["sound", "misread", "random", "mismatched"]


@dataclass(frozen=True)
class Examined:
    """What teacher forcing says."""

    verdict: Verdict
    found: Found
    from_taps: Gain
    """Of the target's own states over those of other positions, under the best reading."""
    elsewhere: Measured
    """Shown the states of other positions."""
    chance: float
    """Share of the commonest answer token."""
    unevenness: float
    """Of its most uneven matrix."""
    understands: bool
    """Do the target's states help it, and beyond chance?"""
    other_target: str
    """The fingerprint the drafter was trained for, where that isn't this target's."""

    @property
    def faults(self) -> bool:
        """Is anything wrong?"""
        return self.verdict != "sound"


def examine(
    reading: Reading,
    target: Target,
    transcript: Transcript,
    length: int,
    other_target: str = "",
    progress: Progress = lambda *_: None,
) -> Examined:
    """Search, then judge what was found; `reading` is where the target computes."""
    found = Search(target, transcript, length, progress).run(reading)
    elsewhere = measure(found.reading, transcript.elsewhere(), target, length)
    from_taps, chance = gain(found.measured, elsewhere), transcript.commonest
    uneven = unevenness(found.reading)
    understands = from_taps.convincing(1, LEAST_FROM_TAPS) and found.measured.accepted[0] > chance
    verdict = judge(understands, uneven, bool(other_target), bool(found.adopted))
    return Examined(verdict, found, from_taps, elsewhere, chance, uneven, understands, other_target)


def judge(understands: bool, uneven: float, other_target: bool, adopted: bool) -> Verdict:
    """From what was found: does it understand the states, how uneven are its matrices, whose is it, what won?"""
    if not understands:
        return "random" if uneven <= DRAWN else "mismatched"
    if other_target:
        return "mismatched"
    return "misread" if adopted else "sound"
