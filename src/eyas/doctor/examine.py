"""The doctor's verdict, from teacher forcing alone.

A drafter that nobody trained, or that was trained for another target, gains nothing from the target's states: shown
those of other positions, it drafts as well. That is looked at under the best reading there is. The matrices then tell
the two apart, as far as that can be told.
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
    unevenness: float
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
    from_taps = gain(found.measured, elsewhere)
    uneven = unevenness(found.reading)
    verdict: Verdict
    if not from_taps.convincing(1, LEAST_FROM_TAPS):
        verdict = "random" if uneven <= DRAWN else "mismatched"
    elif other_target:
        verdict = "mismatched"
    else:
        verdict = "misread" if found.adopted else "sound"
    return Examined(verdict, found, from_taps, elsewhere, uneven, other_target)
