"""How much goes into the slots: the shape of their caches, and the size of passes. Both follow what memory allows."""

from __future__ import annotations

import math
from collections.abc import Sequence


class PassSize:
    """How many tokens a pass may hold: any number, until memory runs out in one; then half as many as that one held.

    After a while without such a failure twice as many are tried.
    """

    LEAST = 16
    """A pass of one sequence alone and no more tokens than these can't be made small enough."""
    _RECOVERY = 256
    """Steps without a failure until more is tried."""

    def __init__(self, max_running: int, prefill_chunk: int | None) -> None:
        self._max_running, self._prefill_chunk = max_running, prefill_chunk
        self._most: int | None = None
        self._failed = self._steps = 0

    @property
    def rows(self) -> int:
        """The most sequences in slots."""
        return self._max_running if self._most is None else min(self._max_running, self._most)

    @property
    def prefill_chunk(self) -> int | None:
        """The most prompt tokens that a step reads; None = all."""
        return min((n for n in (self._prefill_chunk, self._most) if n is not None), default=None)

    def fits(self, tokens: int) -> bool:
        """Whether a pass may hold so many tokens."""
        return self._most is None or tokens <= self._most

    def exhausted(self, tokens: int) -> None:
        """Memory ran out in a pass of so many tokens."""
        self._failed = max(self._failed, tokens)
        self._most = max(1, min(tokens, self._most or tokens) // 2)
        self._steps = 0

    def succeeded(self) -> None:
        """A step has gone well."""
        if self._most is None:
            return
        self._steps += 1
        if self._steps == self._RECOVERY:
            self._most, self._steps = 2 * self._most, 0
            if self._most > self._failed:
                self.restore()

    def restore(self) -> None:
        """Forget that memory has run out: nothing runs any more."""
        self._most, self._failed, self._steps = None, 0, 0


_GRANULE, _FLOOR = 64, 256
_MOST_MORE = 4096
"""Columns that are added at once beyond those needed: of long sequences, copies are rare all the same."""


class CacheRoom:
    """How large the slot caches should be: slots x columns, grown on demand within a limit of memory.

    The cache is a rectangle, which takes memory for slots x columns whatever the sequences' lengths. On a CPU that is
    so up to `dense` columns; of a wider one the system gives a row only the pages that it has written to. A row also
    takes what doesn't grow with it, its recurrent states: as much as `beside` columns.
    """

    def __init__(self, most_slots: int, limit: int | None, dense: int | None = None) -> None:
        """`dense` None: every rectangle takes all of its memory."""
        self.slots = self.columns = self.beside = 0
        self.limit = limit
        self._most_slots, self._dense = most_slots, dense
        self._peak = (0, 0)
        self._rows: Sequence[int] = ()  # columns that each row needs
        self._found = math.inf  # what memory turned out to have room for
        self.context = math.inf
        """Columns of the longest possible sequence."""
        self.planned: tuple[int, int] | None = None
        """Slots and columns that are soon needed, to which the caches are copied a piece at a time."""
        self.ready = False
        """Whether they are copied."""

    @property
    def tokens(self) -> int:
        """Number of tokens that there is memory for, used or not."""
        columns = sum(self._rows) if self._sparse(self.columns) else self.slots * self.columns
        return columns + self.slots * self.beside

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether the limits allow rows of so many columns; one row may always try what the configured limit allows."""
        return self.holds(len(rows), max(rows, default=0), sum(rows))

    def holds(self, rows: int, longest: int, total: int) -> bool:
        """`fits` for so many rows, the `longest` of which has so many columns, and all together a `total`."""
        taken = total if self._sparse(longest) else rows * longest
        return taken + rows * self.beside <= self.most(rows)

    def has(self, slots: int, columns: int) -> bool:
        """Whether the present rectangle has so many slots and columns."""
        return slots <= self.slots and columns <= self.columns

    def cover(self, rows: Sequence[int], expected: int = 0, soon: int = 0) -> bool:
        """Grow to hold rows of so many columns, which must fit; True if the rectangle changed.

        It doubles, by at most `_MOST_MORE` columns, so that copying is seldom paid for, and makes room for the slots
        `expected` and the columns needed `soon`; close to the limit it takes what is left.
        """
        slots, columns = len(rows), max(rows, default=0)
        self._rows = tuple(rows)
        self._peak = (max(self._peak[0], slots), max(self._peak[1], columns))
        if self.has(slots, columns):
            return False
        if self.planned is None or slots > self.planned[0] or columns > self.planned[1] or not self._may(*self.planned):
            self.planned = self._larger(slots, columns, expected, soon)
        (self.slots, self.columns), self.planned, self.ready = self.planned, None, False
        return True

    def plan(self, slots: int, columns: int, expected: int) -> None:
        """Plan the rectangle that soon has to `cover` so much, if that may be."""
        planned = self.planned or (0, 0)
        if (slots > planned[0] or columns > planned[1]) and self._may(slots, columns):
            self.planned, self.ready = self._larger(slots, columns, expected, columns), False

    def _larger(self, slots: int, columns: int, expected: int, soon: int) -> tuple[int, int]:
        wide, long = self.slots, self.columns
        if slots > wide:
            wide = max(slots, min(max(2 * wide, expected), self._most_slots))
        if columns > long:
            long = max(columns, soon, int(min(long + min(long, _MOST_MORE), self.context + _GRANULE)))
            long += -long % _GRANULE
        if not self._may(wide, long):
            wide, long = slots, int(min(long, self.most(slots) // slots - self.beside))
        return wide, max(long, columns)

    def _may(self, slots: int, columns: int) -> bool:
        return self._sparse(columns) or self.fits([columns] * slots)

    def exhausted(self) -> None:
        """There was no memory for the rectangle that `cover` promised: stay well below until the engine is idle."""
        self._found, self.slots, self.planned = self.tokens // 2, 0, None

    def shrink(self) -> bool:
        """Give back what the busy time that ends now hasn't needed; True if the rectangle changed."""
        (slots, columns), self._peak, self._found = self._peak, (0, 0), math.inf
        self._rows, self.planned = (), None
        columns = min(self.columns, max(columns + -columns % _GRANULE, _FLOOR))
        if slots * columns * 2 > self.slots * self.columns:
            return False
        self.slots, self.columns = slots, columns
        return True

    def _sparse(self, columns: int) -> bool:
        return self._dense is not None and columns > self._dense

    def most(self, slots: int) -> float:
        """The most tokens that so many slots may take."""
        return min(math.inf if self.limit is None else self.limit, self._found if slots > 1 else math.inf)
