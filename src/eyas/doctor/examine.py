"""The doctor's verdict, from teacher forcing and the weights.

An untrained drafter, or one trained for another target, can't use the target's states: it drafts equally well with the
states of other positions, or it is right less often than if it always guessed the most common token. Both are measured
with the best reading. Whether such a drafter was trained at all can be seen in its matrices.
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
RANDOM_UNEVENNESS = 1.4
"""The highest unevenness of matrices that may be random."""


@dataclass(frozen=True)
class Examination:
    """The verdict on a drafter, with the measurements it is based on."""

    verdict: Verdict
    found: SearchResult
    from_taps: Gain
    """The gain from each position's own states over those of other positions, with the best reading."""
    other_states: Measurement
    """The best reading with the states of other positions."""
    chance: float
    """The share of the most common token among answer tokens."""
    unevenness: float
    """The unevenness of the most uneven matrix; see the function `unevenness`."""
    understands: bool
    """Whether the target's states help it, and it drafts better than chance."""
    other_target: str
    """The recorded fingerprint of its target; empty if it is this target's, or not recorded."""

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
    whether its provenance names another target; `adopted`: whether another reading won.
    """
    if not understands:
        return "random" if uneven <= RANDOM_UNEVENNESS else "mismatched"
    if other_target:
        return "mismatched"
    return "misread" if adopted else "sound"


def unevenness(reading: Reading) -> float:
    """How much the norms of rows or columns vary in the most uneven matrix of the drafter's layers.

    The rows of a random matrix have nearly equal norms: with n columns and fourth moment k (3 for normal, 1.8 for
    uniform entries) the standard deviation of their norms is sqrt((k - 1) / (4 n)) of the mean; the same holds for
    columns. Training makes some rows and columns matter more than others. In units of 1 / sqrt(2 n) the deviation is 1
    for normal entries, 0.6 for uniform ones and 0 for orthogonal rows; in trained drafters it is above 2 in rows or
    columns of nearly every matrix. Embedding and head are left out, because they are often copies of the target's.
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
    """The standard deviation of the norms along `dim`, in units of that of independent normal entries."""
    lengths = weight.float().norm(dim=dim)
    return float(lengths.std() / lengths.mean().clamp(min=1e-12)) * sqrt(2 * weight.shape[dim])
