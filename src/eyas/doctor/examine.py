"""The doctor's verdict, from teacher forcing alone.

A drafter that nobody trained, or that was trained for another target, doesn't understand the target's states: shown
those of other positions it drafts as well, or it is right less often than one who always guesses the commonest token.
That is looked at under the best reading there is. The matrices then tell the two apart, as far as that can be told.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from torch import Tensor

from eyas.doctor.measure import LEAST_FROM_TAPS, Gain, Measurement, gain, measure
from eyas.doctor.reading import Reading
from eyas.doctor.search import Progress, ReadingSearch, SearchResult
from eyas.doctor.transcript import Transcript
from eyas.targets import Target

Verdict = Literal["sound", "misread", "random", "mismatched"]


@dataclass(frozen=True)
class Examination:
    """What teacher forcing says."""

    verdict: Verdict
    found: SearchResult
    from_taps: Gain
    """Of the target's own states over those of other positions, under the best reading."""
    elsewhere: Measurement
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
) -> Examination:
    """Search, then judge what was found; `reading` is where the target computes."""
    found = ReadingSearch(target, transcript, length, progress).run(reading)
    elsewhere = measure(found.reading, transcript.elsewhere(), target, length)
    from_taps, chance = gain(found.measured, elsewhere), transcript.commonest
    uneven = unevenness(found.reading)
    understands = from_taps.convincing(1, LEAST_FROM_TAPS) and found.measured.accepted[0] > chance
    verdict = judge(understands, uneven, bool(other_target), bool(found.adopted))
    return Examination(verdict, found, from_taps, elsewhere, chance, uneven, understands, other_target)


def judge(understands: bool, uneven: float, other_target: bool, adopted: bool) -> Verdict:
    """From what was found: does it understand the states, how uneven are its matrices, whose is it, what won?"""
    if not understands:
        return "random" if uneven <= DRAWN else "mismatched"
    if other_target:
        return "mismatched"
    return "misread" if adopted else "sound"


# Whether anybody trained these weights, told from the matrices alone.
#
# The rows of a matrix of independent draws are nearly equally long: with n columns and fourth moment k (3 for normal,
# 1.8 for uniform draws) their lengths spread by sqrt((k - 1) / (4 n)) of the mean, and so do columns. Training makes
# some rows and columns matter more than others. Spread * sqrt(2 n) is 1 for normal draws, 0.6 for uniform ones, 0 for
# orthogonal rows; in trained drafters it lies above 2 in rows or columns of nearly every matrix.


DRAWN = 1.4
"""Up to here a matrix may just have been drawn."""
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
"""Often copied from the target, so they say nothing of training."""


def unevenness(reading: Reading) -> float:
    """Of the most uneven matrix of the drafter's own layers: 1 or less where nobody trained them."""
    return max(
        (
            max(_spread(weight, 1), _spread(weight, 0))
            for name, weight in reading.tensors.items()
            if weight.ndim == 2 and name not in _BORROWED
        ),
        default=0.0,
    )


def _spread(weight: Tensor, dim: int) -> float:
    """Of the lengths along `dim`, in units of what independent normal draws have."""
    lengths = weight.float().norm(dim=dim)
    return float(lengths.std() / lengths.mean().clamp(min=1e-12)) * sqrt(2 * weight.shape[dim])
