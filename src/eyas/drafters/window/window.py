"""The window of a drafter: which of a row's pairs it attends to, and at which RoPE positions.

The first pairs of a row, the *sinks*, are always seen (StreamingLLM, arXiv 2309.17453), and of the others the last
ones. The window moves on in steps: when sinks and window are full, the oldest quarter of the window is dropped at once.
So a row's pairs lie in its slot without gaps, and what is kept depends on the number of pairs alone, not on the passes
that read them. A position is an index among the pairs that are kept: none is larger than the window, its sinks, and the
depth of a draft tree, and training rows see the same.

Nothing here needs torch: command lines check windows before they load anything.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from eyas.errors import UsageError

SINKS = 4
"""The first pairs of a row that every query sees, as many as StreamingLLM keeps."""
GUESSES = 32
"""Positions that an `auto` window leaves for the guesses of a draft tree."""
USUAL_LENGTH = 2048
"""The length that `auto` supposes a drafter was trained on, if its files don't say."""

WindowChoice = int | Literal["auto", "off"] | None
"""Which window is asked for: a number of pairs, by rule, none, or what the drafter's files say."""


class Window(NamedTuple):
    """The sinks and the last pairs of a row: at most `pairs`, and at least three quarters of them."""

    pairs: int
    sinks: int = SINKS

    @property
    def limit(self) -> int:
        """The most pairs of a row that are kept."""
        return self.sinks + self.pairs

    @property
    def step(self) -> int:
        """How many pairs are dropped at once."""
        return max(1, self.pairs // 4)

    def dropped(self, count: int) -> int:
        """How many of a row's first `count` pairs are dropped: those after the sinks, as many as whole steps."""
        return max(0, -(-(count - self.limit) // self.step)) * self.step

    def next_step(self, pair: int) -> int:
        """The first pair after `pair` for which the window has moved on."""
        return max(self.limit, pair + self.step - (pair - self.limit) % self.step)


def read_window(text: str | int | None) -> WindowChoice:
    """The choice that `text` names: a number of pairs, `auto`, or `off`. Raises UsageError."""
    if text is None or text == "auto" or text == "off":
        return text  # type: ignore[return-value]  # one of these
    if not str(text).isdecimal() or int(text) < 1:
        raise UsageError(f"--draft-window {text}: write a number of pairs of at least 1, auto, or off")
    return int(text)


def trained_window(trained: object, positions: int) -> int:
    """The window with which a drafter never goes beyond the length that it was `trained` on.

    That is the `max_length` in its provenance; where there is none, what drafters are usually trained on. A drafter for
    fewer `positions` gets no more than those.
    """
    length = trained if isinstance(trained, int) and trained > 0 else USUAL_LENGTH
    return max(1, min(length, positions) - SINKS - GUESSES)
