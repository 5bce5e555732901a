"""The window of a drafter: which of a row's pairs it attends to, and at which RoPE positions.

A query always sees the first pairs of a row, the *sinks* (StreamingLLM, arXiv 2309.17453), and the last pairs. The
window moves on in steps: when sinks and window are full, the oldest quarter of the window is dropped in one go. So a
row's pairs lie in its slot without gaps, and which ones are kept depends only on their number, not on the passes that
read them. A position is an index among the kept pairs, so it never exceeds the sum of sinks, window and draft tree
depth. Rows in training see the same pairs at the same positions.

Nothing here needs torch: command lines check windows before anything is loaded.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from eyas.errors import UsageError

SINKS = 4
"""The number of first pairs that every query sees, as in StreamingLLM."""
GUESSES = 32
"""The positions that an `auto` window leaves for the guesses of a draft tree."""
DEFAULT_TRAINED_LENGTH = 2048
"""The training length that `auto` assumes for a drafter whose files don't record it."""

WindowChoice = int | Literal["auto", "off"] | None
"""The requested window: a number of pairs, `auto`, `off`, or None for the one in the drafter's files."""


class Window(NamedTuple):
    """The sinks and the last pairs of a row: at most `pairs`, and at least three quarters of them."""

    pairs: int
    sinks: int = SINKS

    @property
    def limit(self) -> int:
        """Maximum number of pairs of a row that are kept."""
        return self.sinks + self.pairs

    @property
    def step(self) -> int:
        """How many pairs are dropped in one step."""
        return max(1, self.pairs // 4)

    def dropped(self, count: int) -> int:
        """How many of a row's first `count` pairs are dropped: whole steps of pairs after the sinks."""
        return max(0, -(-(count - self.limit) // self.step)) * self.step

    def next_step(self, pair: int) -> int:
        """The first pair after `pair` at which the window has moved on."""
        return max(self.limit, pair + self.step - (pair - self.limit) % self.step)


def read_window(text: str | int | None) -> WindowChoice:
    """The choice that `text` names: a number of pairs, `auto`, or `off`. Raises UsageError."""
    if text is None or text == "auto" or text == "off":
        return text  # type: ignore[return-value]  # one of these
    if not str(text).isdecimal() or int(text) < 1:
        raise UsageError(f"`draft_window={text}`: write a number of pairs of at least 1, auto, or off")
    return int(text)


def trained_window(trained: object, positions: int) -> int:
    """The largest window with which a drafter never exceeds the length that it was `trained` on.

    `trained` is the `max_length` in its provenance, or `DEFAULT_TRAINED_LENGTH` if there is none; the window is also
    limited by the drafter's `positions`.
    """
    length = trained if isinstance(trained, int) and trained > 0 else DEFAULT_TRAINED_LENGTH
    return max(1, min(length, positions) - SINKS - GUESSES)
