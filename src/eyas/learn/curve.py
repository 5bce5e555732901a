"""Accept length over time, a point a minute: what the playground draws of a server that learns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_MINUTE = 60.0
_KEPT = 1440
"""Points that are kept: a day of full minutes."""


class _Point(NamedTuple):
    """The drafted rounds of a minute."""

    minute: int
    generation: int
    rounds: int
    accepted: int


class Curve:
    """One thread adds rounds, others read; it is kept in memory only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._points: deque[_Point] = deque(maxlen=_KEPT)

    def add(self, generation: int, offered: Sequence[int], accepted: Sequence[int]) -> None:
        """Count a round whose rows were offered trees of these depths, while this generation served."""
        counts = [count for depth, count in zip(offered, accepted, strict=True) if depth]
        if not counts:
            return
        minute, points = int(self._clock() // _MINUTE), self._points
        more = _Point(minute, generation, len(counts), sum(counts))
        if points and points[-1][:2] == more[:2]:
            more = _Point(minute, generation, points[-1].rounds + more.rounds, points[-1].accepted + more.accepted)
            points[-1] = more
        else:
            points.append(more)

    def read(self) -> list[dict[str, Any]]:
        """The points, oldest first; `time` in seconds since the epoch."""
        return [
            {
                "time": one.minute * _MINUTE,
                "generation": one.generation,
                "accept_length": round(1.0 + one.accepted / one.rounds, 3),
            }
            for one in list(self._points)
        ]
