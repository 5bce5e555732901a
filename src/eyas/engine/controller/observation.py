"""Which sequences the drafter observes."""

from __future__ import annotations

from collections import Counter

_MANY_ROWS = 4
"""The number of rows from which sequences may go unobserved."""
_JUDGED_ROUNDS = 64
"""The rounds after which a number of rows is judged."""
_HARDLY = 0.02
"""If at most this share of these rounds drafted, the drafter counts as unused."""
_SKIPPED = 8
"""The number of sequences that then go unobserved for each one that was observed."""
_LATEST = 16
"""The time constant, in rounds, of the running mean of rows."""


class ObservationPolicy:
    """Decides, when a sequence begins, whether the drafter observes it.

    Observing for an idle drafter costs a few percent of a small target's round. Rounds are counted by their number of
    rows (in octaves). If hardly any of them drafted, several times as many of the next sequences go unobserved as were
    observed. With few rows every text is observed, because one may be far easier than the last.

    Clients that wait for their answers finish together and come back one by one. So a sequence that begins almost alone
    is expected to get as many neighbors as the latest ones had.
    """

    def __init__(self) -> None:
        self._begun, self._rounds, self._used, self._unobserved = (Counter[int]() for _ in range(4))
        self._mean_rows = 0.0
        """The running mean of the rows of all rounds, observed or not."""

    def decoded(self, rows: int) -> None:
        """Account for any round, of `rows` rows."""
        self._mean_rows += (rows - self._mean_rows) / _LATEST

    def admits(self, rows: int) -> bool:
        """Whether a sequence that begins as one of `rows` is observed."""
        load = max(rows, round(self._mean_rows)).bit_length()
        if self._unobserved[load]:
            self._unobserved[load] -= 1
            return False
        self._begun[load] += 1
        return True

    def round(self, rows: int, used: bool) -> None:
        """Account for a round of `rows` rows, some of them observed, which `used` the drafter or didn't."""
        load = rows.bit_length()
        self._rounds[load] += 1
        self._used[load] += used
        begun, rounds = self._begun[load], self._rounds[load]
        if rows >= _MANY_ROWS and begun >= rows and rounds >= _JUDGED_ROUNDS:
            if self._used[load] <= _HARDLY * rounds:
                self._unobserved[load] = _SKIPPED * begun
            self._begun[load] = self._rounds[load] = self._used[load] = 0
