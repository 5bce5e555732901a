"""Running corrections of predicted seconds, robust against noise.

A round's error, the logarithm of measured / predicted, is the machine's speed at the time, which everything done around
then shares, plus what is wrong with the prediction for that kind and size. Neither is known alone: a size always seen
in slow times would be blamed for them. So both are fitted to the last rounds together: the speed at a time is the mean
over the rounds around it, outliers down-weighted (Huber), a size's own error the median of what speed leaves over, in
turn until they agree. A burst of noise changes the speed of its time and nothing else; a rare probe of another size is
compared with the rounds around it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

KINDS = ("pass", "draft", "observe")
_ROUNDS = 600
"""Rounds that are remembered."""
_WINDOW = 9
"""Rounds around a time that tell its speed."""
_TURNS = 8
_USUAL = 0.1
"""An error that exceeds this, speed and size allowed for, loses weight."""
_OCTAVE = 2
"""Places an octave; errors of sizes that share a place are one."""
_PLACES = 12 * _OCTAVE + 1
_DOUBT = 0.5
"""An error seen n times counts n / (n + this)."""
_PLENTY = 2.0
"""A place seen n times has a say of n / (n + this) in its own correction and those around it."""
_NEAR: Array = 2.0 ** (-2.5 * np.abs(np.subtract.outer(np.arange(_PLACES), np.arange(_PLACES))))
"""What that is worth by distance: what pays is a matter of differences, which noise must not decide."""


class Part(NamedTuple):
    """One kind of work in a round."""

    kind: int
    """Index into `KINDS`."""
    size: float
    error: float
    """log(measured / predicted), no correction applied."""


class Residuals:
    """Speed by time, errors by kind and size: 1 to 4096, logarithmic, neighbours pooled, flat beyond the sizes seen."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[Part, ...]] = deque(maxlen=_ROUNDS)
        self._errors: Array = np.zeros((len(KINDS), _PLACES))
        self._seen: Array = np.zeros((len(KINDS), _PLACES))
        self._corrections: Array = np.zeros((len(KINDS), _PLACES))
        self._log_speed = 0.0
        self._settled = True

    def learn(self, parts: tuple[Part, ...]) -> None:
        """A round, its pass first."""
        self._rounds.append(parts)
        self._settled = False

    def settle(self) -> None:
        """Fit speed and errors to the rounds remembered; sizes not among them keep their errors."""
        if self._settled:
            return
        self._settled = True
        rounds = list(self._rounds)
        time = np.repeat(np.arange(len(rounds)), [len(parts) for parts in rounds])
        table = np.array([part for parts in rounds for part in parts], dtype=np.float64)  # [n, 3]
        at = table[:, 0].astype(np.int64) * _PLACES + _places(table[:, 1])
        raw = table[:, 2]
        first = np.flatnonzero(np.diff(time, prepend=-1))  # the passes
        errors, seen = self._errors.ravel(), self._seen.ravel()
        present, group = np.unique(at, return_inverse=True)
        counts = np.bincount(group)
        order = np.argsort(group, kind="stable")
        ends = counts.cumsum()
        weights = np.ones(len(rounds))
        for _ in range(_TURNS):
            passes = raw[first] - errors[at[first]]
            speed = _running_mean(passes, weights)
            weights = _USUAL / np.maximum(np.abs(passes - speed), _USUAL)
            left = (raw - speed[time])[order]
            for index, end in enumerate(ends):
                count = counts[index]
                errors[present[index]] = np.median(left[end - count : end]) * count / (count + _DOUBT)
        seen[present] = counts
        # what all sizes share is speed
        shared = float(np.average(errors[at[first]]))
        errors[seen > 0] -= shared
        self._log_speed = float(speed[-1]) + shared
        say = self._seen / (self._seen + _PLENTY)
        heard = say @ _NEAR
        self._corrections = (say * self._errors) @ _NEAR / np.where(heard > 0.0, heard, 1.0)

    def factor(self, kind: int, size: Array) -> Array:
        """What predictions for `size` are multiplied by."""
        at = np.log2(np.maximum(size, 1.0)) * _OCTAVE
        out: Array = np.exp(np.interp(at, np.arange(_PLACES), self._corrections[kind]) + self._log_speed)
        return out


def _places(sizes: Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = np.rint(np.log2(np.maximum(sizes, 1.0)) * _OCTAVE).astype(np.int64)
    return np.minimum(found, _PLACES - 1)


def _running_mean(series: Array, weights: Array) -> Array:
    """The weighted mean over `_WINDOW` entries around each one of `series`, fewer at the ends."""
    kernel = np.ones(_WINDOW)
    out: Array = np.convolve(series * weights, kernel, "full") / np.convolve(weights, kernel, "full")
    return out[_WINDOW // 2 : _WINDOW // 2 + len(series)]
