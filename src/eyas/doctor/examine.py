"""The doctor's verdict, from teacher forcing and the weights.

A drafter that nobody trained, or that was trained for another target, doesn't understand the target's states: shown
those of other positions it drafts as well, or it is right less often than a drafter that always guesses the most common
token. That is measured with the best reading. Whether such a drafter was trained at all shows in its matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from torch import Tensor

from eyas.doctor.measure import MIN_GAIN_FROM_TAPS, Gain, Measurement, gain, measure
from eyas.doctor.reading import Reading
from eyas.doctor.search import Progress, ReadingSearch, SearchResult
from eyas.doctor.transcript import Transcript
from eyas.drafters.formats.tensor_names import SHAREABLE
from eyas.targets import Target

Verdict = Literal["sound", "misread", "random", "mismatched"]
"""Nothing is wrong; another reading is better; the weights are untrained; they were trained for another target."""


@dataclass(frozen=True)
class Examination:
    """What teacher forcing and the weights say about a drafter."""

    verdict: Verdict
    found: SearchResult
    from_taps: Gain
    """The gain of each position's own states over those of other positions, with the best reading."""
    other_states: Measurement
    """The best reading, shown the states of other positions."""
    chance: float
    """The share of the most common answer token."""
    unevenness: float
    """That of the most uneven matrix; see the function `unevenness`."""
    understands: bool
    """Whether the target's states help it, and beyond chance."""
    other_target: str
    """The fingerprint of the target that it was trained for; empty if it is this one, or not recorded."""

    @property
    def faults(self) -> bool:
        """Whether anything is wrong with the drafter."""
        return self.verdict != "sound"


def examine(
    reading: Reading,
    target: Target,
    transcript: Transcript,
    length: int,
    other_target: str = "",
    progress: Progress = lambda *_: None,
) -> Examination:
    """Search for the best reading and judge it; the tensors of `reading` are on the target's device."""
    found = ReadingSearch(target, transcript, length, progress).run(reading)
    other_states = measure(found.reading, transcript.with_other_states(), target, length)
    from_taps, chance = gain(found.measured, other_states), transcript.most_common_share
    uneven = unevenness(found.reading)
    understands = from_taps.convincing(1, MIN_GAIN_FROM_TAPS) and found.measured.accepted[0] > chance
    verdict = judge(understands, uneven, bool(other_target), bool(found.adopted))
    return Examination(verdict, found, from_taps, other_states, chance, uneven, understands, other_target)


def judge(understands: bool, uneven: float, other_target: bool, adopted: bool) -> Verdict:
    """The verdict on a drafter.

    `understands`: whether the target's states help it; `uneven`: the unevenness of its matrices; `other_target`:
    whether it says that it was trained for another target; `adopted`: whether another reading won.
    """
    if not understands:
        return "random" if uneven <= RANDOM_UNEVENNESS else "mismatched"
    if other_target:
        return "mismatched"
    return "misread" if adopted else "sound"


RANDOM_UNEVENNESS = 1.4
"""Highest unevenness of matrices that may have been drawn at random."""


def unevenness(reading: Reading) -> float:
    """How unequal the lengths of rows and columns are in the most uneven matrix of the drafter's layers.

    The rows of a matrix of independent draws are nearly equally long: with n columns and fourth moment k (3 for normal,
    1.8 for uniform draws) the standard deviation of their lengths is sqrt((k - 1) / (4 n)) of the mean; the same holds
    for columns. Training makes some rows and columns matter more than others. In units of 1 / sqrt(2 n) the deviation
    is 1 for normal draws, 0.6 for uniform ones and 0 for orthogonal rows; in trained drafters it is above 2 in rows or
    columns of nearly every matrix. Embedding and head don't count: they are often copies of the target's.
    """
    return max(
        (
            max(_spread(weight, 1), _spread(weight, 0))
            for name, weight in reading.tensors.items()
            if weight.ndim == 2 and name not in SHAREABLE
        ),
        default=0.0,
    )


def _spread(weight: Tensor, dim: int) -> float:
    """The deviation of the lengths along `dim`, in units of that of independent normal draws."""
    lengths = weight.float().norm(dim=dim)
    return float(lengths.std() / lengths.mean().clamp(min=1e-12)) * sqrt(2 * weight.shape[dim])
