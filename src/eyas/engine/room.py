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

    @property
    def tokens(self) -> int:
        """Allocated."""
        return self.slots * self.columns

    def fits(self, slots: int, columns: int) -> bool:
        """May there be so many?"""
        return self.limit is None or slots * columns <= self.limit

    def cover(self, slots: int, columns: int) -> bool:
        """Grow to hold at least `slots` x `columns`, which must fit; True if the rectangle changed.

        Doubles, so that copying is paid for once a doubling; close to the limit it takes what is left.
        """
        self._peak = (max(self._peak[0], slots), max(self._peak[1], columns))
        if slots <= self.slots and columns <= self.columns:
            return False
        wide = self.slots if slots <= self.slots else min(max(slots, 2 * self.slots), max(slots, self._most_slots))
        long = self.columns if columns <= self.columns else max(columns, 2 * self.columns)
        long += -long % _GRANULE
        if not self.fits(wide, long):
            assert self.limit is not None
            wide, long = slots, min(long, self.limit // slots)
        self.slots, self.columns = wide, max(long, columns)
        return True

    def shrink(self) -> bool:
        """Give back what the busy time that ends now hasn't needed; True if the rectangle changed."""
        (slots, columns), self._peak = self._peak, (0, 0)
        columns = min(self.columns, max(columns + -columns % _GRANULE, _FLOOR))
        if slots * columns * 2 > self.tokens:
            return False
        self.slots, self.columns = slots, columns
        return True
