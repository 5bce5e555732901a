"""Running corrections of predicted seconds: medians of what was measured lately, so a burst of noise moves nothing.

Two kinds of error are kept apart. The machine's speed, common to everything done at about the same time, is the median
of the last rounds. What is left belongs to the size at hand and is remembered there, the median of that size's last
errors; sizes nearby borrow from it. All errors are logarithms of measured / predicted.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_OCTAVE = 2
"""Places an octave."""
_PLACES = 12 * _OCTAVE + 1
_REACH = 0.6
"""How far an error carries, in octaves."""
_LIMIT = math.log(4.0)
"""A single error counts no more than this."""


class Speed:
    """How slow the machine is just now, the median of the last `window` rounds' errors."""

    def __init__(self, window: int = 9) -> None:
        self._errors: deque[float] = deque(maxlen=window)
        self.error = 0.0

    def learn(self, error: float) -> None:
        """A round took exp(error) times what was predicted without a speed."""
        self._errors.append(error)
        self.error = median(self._errors)

    @property
    def factor(self) -> float:
        return math.exp(self.error)


class Residuals:
    """Errors by size (1 to 4096, logarithmic), each place's last `window` of them."""

    def __init__(self, window: int = 31) -> None:
        self._errors: list[deque[float]] = [deque(maxlen=window) for _ in range(_PLACES)]
        self._at = np.arange(_PLACES) / _OCTAVE  # in octaves
        self._factors: Array = np.ones(_PLACES)

    def learn(self, size: float, error: float) -> None:
        """Something of `size` took exp(error) times what was predicted, speed allowed for."""
        place = round(math.log2(max(size, 1.0)) * _OCTAVE)
        self._errors[min(place, _PLACES - 1)].append(max(-_LIMIT, min(_LIMIT, error)))

    def settle(self) -> None:
        """Let what was learnt count from now on."""
        counts = np.array([len(errors) for errors in self._errors], dtype=np.float64)
        medians = np.array([median(errors) if errors else 0.0 for errors in self._errors])
        near = np.exp(-(((self._at[:, None] - self._at) / _REACH) ** 2)) * np.minimum(counts, 4.0)
        # half an error's weight stays with the prediction: one measurement alone moves it two thirds of the way
        self._factors = np.exp((near @ medians) / (near.sum(1) + 0.5))

    def factor(self, size: Array) -> Array:
        """What predictions for `size` are multiplied by."""
        return np.interp(np.log2(np.maximum(size, 1.0)), self._at, self._factors)
