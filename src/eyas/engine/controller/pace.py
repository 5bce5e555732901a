"""How often something may be done so that it takes no more than a share of the time."""

from __future__ import annotations

_EAGER = 6
"""Times that come at doubling intervals whatever they cost."""


class Pace:
    """Something that pays off in the long run, every so many rounds; in the beginning at doubling intervals."""

    def __init__(self, share: float, least: int, most: int) -> None:
        """Every `least` to `most` rounds, taking `share` of the rounds' time if that allows it."""
        self._share, self._least, self._most = share, least, most
        self._cost = 0.0
        self._since = most
        self._seconds = 0.0
        self._times = 0

    def due(self) -> bool:
        """Is it time again?"""
        early = self._times < _EAGER and self._since >= 2**self._times // 2
        return (
            early
            or self._since >= self._most
            or (self._since >= self._least and self._seconds * self._share >= self._cost)
        )

    def round(self, seconds: float) -> None:
        """A round went by."""
        self._since += 1
        self._seconds += seconds

    def done(self, seconds: float) -> None:
        """It was done and took `seconds`; slow ones are taken as noise by degrees."""
        self._cost = seconds if self._cost == 0.0 else self._cost + 0.2 * (min(seconds, 3 * self._cost) - self._cost)
        self._since, self._seconds = 0, 0.0
        self._times += 1
