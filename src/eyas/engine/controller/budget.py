"""Limits on the time that the controller's own work may take: a budget of seconds, and a pace for repeated work."""

from __future__ import annotations


class Budget:
    """Seconds that may be lost: a share of all time."""

    def __init__(self, share: float, credit: float = 0.0) -> None:
        """Begin with `credit` seconds; infinity makes the first use free."""
        self._share = share
        self._credit = credit

    def earn(self, seconds: float) -> None:
        """Add the budget's share of `seconds` of elapsed time."""
        self._credit += self._share * seconds

    def affords(self, cost: float) -> bool:
        """Whether `cost` seconds may be lost now. Caps the savings at twice that, so that uses don't cluster."""
        self._credit = min(self._credit, 2.0 * cost)
        return self._credit >= cost

    def spend(self, cost: float) -> None:
        """Charge the budget with `cost` lost seconds."""
        self._credit -= cost


class Pace:
    """Decides when to repeat some work, so that it takes no more than a share of the time."""

    def __init__(self, share: float, least: int, most: int) -> None:
        """Repeat every `least` to `most` rounds, if possible within `share` of the rounds' time; begin at once."""
        self._share = share
        self._least = least
        self._most = most
        self._cost = 0.0
        self._times = 0
        self._since = most
        self._seconds = 0.0

    def due(self) -> bool:
        """Whether the work should be done now."""
        affordable = self._seconds * self._share >= self._cost
        return self._since >= self._most or (self._since >= self._least and affordable)

    @property
    def cost(self) -> float:
        """The seconds that the work usually takes."""
        return self._cost

    def round(self, seconds: float) -> None:
        """Account for a decoding round that took `seconds`."""
        self._since += 1
        self._seconds += seconds

    def done(self, seconds: float) -> None:
        """Account for the work, which took `seconds`; a single outlier changes its expected cost little.

        The first time doesn't count: its code and data are in no cache, so it takes several times as long.
        """
        self._times += 1
        if self._times <= 2:
            self._cost = seconds * (self._times - 1)
        else:
            self._cost += 0.2 * (min(seconds, 3 * self._cost) - self._cost)
        self._since = 0
        self._seconds = 0.0
