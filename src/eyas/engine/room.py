"""How large the slot caches should be: slots x columns, grown on demand within a limit.

The cache is a rectangle, so its memory is slots x columns whatever the sequences' lengths. The limit holds for that
product: it is memory, not a count of the tokens in use.
"""

from __future__ import annotations

_GRANULE, _FLOOR = 64, 256


class CacheRoom:
    """The rectangle that is allocated and the largest that may be."""

    def __init__(self, most_slots: int, limit: int | None) -> None:
        self.slots = 0
        self.columns = 0
        self.limit = limit
        self._most_slots = most_slots
        self._peak = (0, 0)
        self._found: int | None = None  # what memory turned out to have room for

    @property
    def tokens(self) -> int:
        """Allocated."""
        return self.slots * self.columns

    def fits(self, slots: int, columns: int) -> bool:
        """May there be so many? One slot may try whatever the limit allows."""
        most = self._most(slots)
        return most is None or slots * columns <= most

    def cover(self, slots: int, columns: int, expected: int = 0) -> bool:
        """Grow to hold at least `slots` x `columns`, which must fit; True if the rectangle changed.

        It doubles, so that copying is paid for once a doubling, and makes room for the slots `expected` soon; close to
        the limit it takes what is left.
        """
        self._peak = (max(self._peak[0], slots), max(self._peak[1], columns))
        if slots <= self.slots and columns <= self.columns:
            return False
        wide, long = self.slots, self.columns
        if slots > wide:
            wide = max(slots, min(max(2 * wide, expected), self._most_slots))
        if columns > long:
            long = max(columns, 2 * long)
            long += -long % _GRANULE
        if not self.fits(wide, long):
            most = self._most(slots)
            wide, long = slots, long if most is None else min(long, most // slots)
        self.slots, self.columns = wide, max(long, columns)
        return True

    def exhausted(self) -> None:
        """There was no memory for the rectangle that `cover` promised: stay well below until the engine is idle."""
        self._found, self.slots = self.tokens // 2, 0

    def _most(self, slots: int) -> int | None:
        bounds = (self.limit, self._found if slots > 1 else None)
        return min((bound for bound in bounds if bound is not None), default=None)

    def shrink(self) -> bool:
        """Give back what the busy time that ends now hasn't needed; True if the rectangle changed."""
        (slots, columns), self._peak, self._found = self._peak, (0, 0), None
        columns = min(self.columns, max(columns + -columns % _GRANULE, _FLOOR))
        if slots * columns * 2 > self.tokens:
            return False
        self.slots, self.columns = slots, columns
        return True
